"""A virtual environment for each peer: pinned packages, made once and kept in a cache folder.

Owns installing. It does not know what a peer does with its packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from la_runtime.errors import HostError

__all__ = [
    "Environment",
    "ensure_environment",
    "find_cpu_flags",
    "last_line",
    "llama_cmake_flags",
    "run_logged",
]

_CPU_FACTS: Final = Path("/proc/cpuinfo")
_STAMP: Final = "installed.sha256"

# What the kernel calls an extension, and llama.cpp's switches for code that uses it. Its own
# detection is left out: on some virtual machines it finds what the machine does not have.
_LLAMA_SWITCHES: Final[Mapping[str, tuple[str, ...]]] = {
    "sse4_2": ("GGML_SSE42",),
    "avx": ("GGML_AVX",),
    "avx2": ("GGML_AVX2",),
    "bmi2": ("GGML_BMI2",),
    "fma": ("GGML_FMA",),
    "f16c": ("GGML_F16C",),
    "avx_vnni": ("GGML_AVX_VNNI",),
    "avx512f": ("GGML_AVX512",),
    "avx512vbmi": ("GGML_AVX512_VBMI",),
    "avx512_vnni": ("GGML_AVX512_VNNI",),
    "avx512_bf16": ("GGML_AVX512_BF16",),
    "amx_tile": ("GGML_AMX_TILE",),
    "amx_int8": ("GGML_AMX_INT8",),
    "amx_bf16": ("GGML_AMX_BF16",),
}
_NO_VARIABLES: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What a peer's environment holds.

    Args:
        name: its folder.
        requirements: pinned packages; all come as wheels but for those that are compiled here.
        compiled: names of the packages that are compiled here.
        removed: packages that come along, are not needed, and would do harm.
        variables: of the installation's environment, such as a compiler's flags.
    """

    name: str
    requirements: tuple[str, ...]
    compiled: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Of everything that decides what is installed."""
        variables = sorted(self.variables.items())
        facts = [self.requirements, self.compiled, self.removed, variables, sys.version]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def folder(self, cache: Path) -> Path:
        """Where it is."""
        return cache / self.name

    def python(self, cache: Path) -> Path:
        """Its interpreter."""
        return self.folder(cache) / "bin" / "python"

    def is_ready(self, cache: Path) -> bool:
        """Whether it was made of these very requirements."""
        stamp = self.folder(cache) / _STAMP
        return stamp.is_file() and stamp.read_text(encoding="ascii") == self.digest


def find_cpu_flags(facts: Path = _CPU_FACTS) -> frozenset[str]:
    """Instruction set extensions of this processor, as Linux names them."""
    for line in facts.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def llama_cmake_flags(cpu_flags: frozenset[str]) -> str:
    """CMake's arguments for a llama.cpp that uses all that this processor has."""
    switches = [
        f"-D{switch}={'ON' if flag in cpu_flags else 'OFF'}"
        for flag, found in _LLAMA_SWITCHES.items()
        for switch in found
    ]
    return " ".join(["-DGGML_NATIVE=OFF", *switches, "-DLLAVA_BUILD=OFF"])


def ensure_environment(environment: Environment, cache: Path) -> None:
    """Make an environment unless it is there.

    Raises:
        HostError: a package cannot be installed; the reason in one line, the rest in a log.
    """
    if environment.is_ready(cache):
        return
    folder = environment.folder(cache)
    shutil.rmtree(folder, ignore_errors=True)
    log = cache / "logs" / f"install-{environment.name}.log"
    run_logged([sys.executable, "-m", "venv", folder], log)
    formats = ["--only-binary", ":all:"]
    for name in environment.compiled:
        # A wheel that pip kept may have been compiled with other flags.
        formats += ["--no-binary", name, "--no-cache-dir"]
    pip: list[str | Path] = [environment.python(cache), "-m", "pip", "--disable-pip-version-check"]
    run_logged(
        [*pip, "install", *formats, *environment.requirements], log, variables=environment.variables
    )
    if environment.removed:
        run_logged([*pip, "uninstall", "--yes", *environment.removed], log)
    (folder / _STAMP).write_text(environment.digest, encoding="ascii")


def run_logged(
    command: Sequence[str | Path], log: Path, *, variables: Mapping[str, str] = _NO_VARIABLES
) -> None:
    """Run a command, what it prints into a file.

    Raises:
        HostError: it failed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            check=False,
        )
    if done.returncode:
        reason = last_line(log) or "no reason given"
        raise HostError(f"{Path(command[0]).name} failed: {reason}; see logs/{log.name}")


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
