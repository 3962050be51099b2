from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from la_export.bench.footprint import RuntimeEnvironment, build_wheel, make_runtime_environment
from la_runtime import Engine
from tests.tiny_models import build_tiny_bundle

ROOT = Path(__file__).parent.parent
HEAVY = {"onnx", "onnx_ir", "onnxruntime", "onnxscript", "torch", "transformers"}

# What is installed as files; the bytecode that Python adds beside them comes on top.
MAX_INSTALLED_BYTES = 200e6


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> RuntimeEnvironment:
    """The wheel with `[cpu]` in an environment that holds nothing else."""
    return make_runtime_environment(
        tmp_path_factory.mktemp("installed") / "environment",
        wheel=wheel,
        wheelhouse=Path(sys.prefix) / "wheelhouse",
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_bundle(tmp_path_factory.mktemp("tiny"))


def _run(command: list[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run outside the repository, so that nothing but what is installed can be imported."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_the_wheel_holds_both_packages_their_data_and_the_licences(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
    info = str(Path(metadata_name).parent)

    assert {
        "la_runtime/py.typed",
        "la_export/py.typed",
        "la_export/bench/data/spec_bench.jsonl",
        "la_export/bench/data/NOTICE",
        "la_export/bench/report/page.html",
        f"{info}/licenses/LICENSE",
        f"{info}/licenses/NOTICE",
    } <= set(names)
    assert {name.split("/")[0] for name in names} == {"la_export", "la_runtime", info}
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (metadata["Name"], metadata["Version"]) == (declared["name"], declared["version"])
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_installed_runtime_cannot_import_the_heavy_libraries(
    installed: RuntimeEnvironment, tmp_path: Path
) -> None:
    program = (
        "import importlib.util, sys;"
        "print([name for name in sys.argv[1:] if importlib.util.find_spec(name)])"
    )

    done = _run([installed.python, "-c", program, *sorted(HEAVY)], tmp_path)

    assert done.stdout.strip() == "['onnxruntime']", done.stderr


def test_the_installed_runtime_generates_what_the_engine_generates_here(
    installed: RuntimeEnvironment, bundle: Path, tmp_path: Path
) -> None:
    options = ["--prompt", "The cat sat", "--max-new-tokens", "12", "--json"]

    done = _run([installed.command, "generate", bundle, *options], tmp_path)

    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    with Engine.open(bundle) as engine:
        plain = engine.generate("The cat sat", max_new_tokens=12, k=0)
    assert record["token_ids"] == list(plain.token_ids)
    assert record["text"] == plain.text


def test_the_installed_runtime_is_small(installed: RuntimeEnvironment) -> None:
    assert installed.installed_bytes <= MAX_INSTALLED_BYTES


def test_the_installed_command_knows_its_version(
    installed: RuntimeEnvironment, tmp_path: Path
) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    done = _run([installed.command, "--version"], tmp_path)

    assert done.stdout.split()[-1] == declared, done.stderr


def _loaded_by(program: str) -> set[str]:
    """Top-level modules loaded after a program ran in a fresh interpreter."""
    report = "import json, sys; json.dump(sorted(sys.modules), sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\n{report}"], capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in json.loads(done.stderr)}


@pytest.mark.parametrize("statement", ["import la_runtime", "from la_runtime import Engine"])
def test_importing_the_runtime_loads_no_heavy_library(statement: str) -> None:
    loaded = _loaded_by(statement)

    assert "la_runtime" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("la_export", ["--help"]),
        ("la_export", ["build", "--help"]),
        ("la_export", ["doctor", "--help"]),
        ("la_export", ["estimate", "--help"]),
        ("la_runtime", ["--help"]),
        ("la_runtime", ["generate", "--help"]),
    ],
)
def test_help_answers_without_heavy_libraries(package: str, arguments: list[str]) -> None:
    program = (
        f"from {package}.cli import main\n"
        f"try:\n    main({arguments!r})\n"
        "except SystemExit as end:\n    assert not end.code"
    )

    loaded = _loaded_by(program)

    assert package in loaded
    assert not loaded & HEAVY


def test_cpu_and_gpu_offer_the_same_versions_of_the_same_library() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    (cpu,), gpu = extras["cpu"], extras["gpu"]

    assert cpu.replace("onnxruntime", "onnxruntime-gpu") in gpu
    assert not {"onnxruntime"} & {requirement.partition(">")[0] for requirement in gpu}


def test_imports_run_downwards_only() -> None:
    command = Path(sys.executable).parent / "lint-imports"

    done = subprocess.run(
        [command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout


def _repository_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_place_outside_the_repository() -> None:
    # A bracket in each pattern keeps it from finding itself.
    foreign = re.compile(
        rb"/wor[k]/|/roo[t]/|/hom[e]/\w|\.\./share[d]|/op[t]/|pypi\.or[g]|pythonhoste[d]"
    )

    found = [
        f"{path.relative_to(ROOT)}: {match[0].decode()}"
        for path in _repository_files()
        if (match := foreign.search(path.read_bytes()))
    ]

    assert not found


@pytest.mark.parametrize(
    "script",
    [
        ".ci/run",
        "scripts/demo",
        "scripts/docs",
        "scripts/gpu_check",
        "scripts/measure_footprint",
        "scripts/readme_tables",
        "scripts/test",
    ],
)
def test_scripts_are_executable_and_stop_at_the_first_failure(script: str) -> None:
    path = ROOT / script

    assert path.stat().st_mode & 0o111
    first, *rest = path.read_text().splitlines()
    assert first == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in rest
    subprocess.run(["bash", "-n", path], check=True)
