"""Size and speed of the installed runtime: the body of `scripts/measure_footprint`.

Owns making an empty environment with nothing but the built wheel and what it asks for.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from la_export.bench.results import Cell, Column, write_result
from la_runtime.errors import HostError

__all__ = ["RuntimeEnvironment", "build_wheel", "make_runtime_environment"]

_WHEEL_SOURCES: Final = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "NOTICE",
    "la_export",
    "la_runtime",
)
_COLUMNS: Final = (
    Column(key="what", title="What"),
    Column(key="measured", title="Measured"),
    Column(key="bound", title="Bound", digits=1),
    Column(key="unit", title="Unit"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeEnvironment:
    """A virtual environment that holds the wheel with its `cpu` extra and nothing else, not pip.

    Args:
        folder: the environment.
    """

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def command(self) -> Path:
        """Its `la-runtime`."""
        return self.folder / "bin" / "la-runtime"

    @property
    def installed_bytes(self) -> int:
        """Size of every installed file."""
        return sum(path.stat().st_size for path in self.folder.glob("lib/**/*") if path.is_file())


def build_wheel(root: Path, destination: Path) -> Path:
    """Build the project's wheel from a copy of its sources, so that no build folder stays behind.

    Args:
        root: the repository.
        destination: folder for the wheel.

    Raises:
        HostError: the build failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for name in _WHEEL_SOURCES:
            source, target = root / name, Path(scratch) / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(source, target)
        _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", destination, scratch)
    (wheel,) = destination.glob("lookahead_attention-*.whl")
    return wheel


def make_runtime_environment(folder: Path, *, wheel: Path, wheelhouse: Path) -> RuntimeEnvironment:
    """Install `wheel[cpu]` into an empty environment, offline and without bytecode caches.

    Args:
        folder: where to make it; must not exist.
        wheel: what `build_wheel` returned.
        wheelhouse: wheels of everything the runtime needs; `scripts/test` makes it.

    Raises:
        HostError: the wheelhouse lacks something.
    """
    environment = RuntimeEnvironment(folder=folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    offline = ("--no-index", "--find-links", wheelhouse, "--no-compile")
    _pip("--python", environment.python, "install", *offline, f"{wheel}[cpu]")
    return environment


def _pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    # Settings of the machine, such as a constraint file, are none of an empty environment's.
    host = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(
        command,
        env={**host, "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise HostError(
            f"pip {arguments[0]} failed: {done.stderr.strip()[-2000:]}\n"
            "run scripts/test once, which downloads what it needs"
        )


def _median_s(measure: Callable[[], float], *, runs: int) -> float:
    measure()  # reads the files into the page cache
    return statistics.median(measure() for _ in range(runs))


def _import_s(python: Path, statement: str) -> float:
    program = (
        f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    )
    printed = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return float(printed.stdout)


def _run_s(command: Sequence[str | Path]) -> float:
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


@click.command()
@click.option("--runs", type=click.IntRange(min=1), default=9, show_default=True)
def _main(*, runs: int) -> None:
    """Measure size, import and --help of the installed runtime; run from the repository's root."""
    scripts = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as scratch:
        wheel = build_wheel(Path.cwd(), Path(scratch))
        runtime = make_runtime_environment(
            Path(scratch) / "environment", wheel=wheel, wheelhouse=Path(sys.prefix) / "wheelhouse"
        )
        delivered = runtime.installed_bytes
        # As pip leaves it by default: the times are those of compiled modules.
        subprocess.run([runtime.python, "-m", "compileall", "-q", runtime.folder], check=True)

        def timed_import(statement: str) -> float:
            return _median_s(lambda: _import_s(runtime.python, statement), runs=runs)

        def timed_help(command: Path) -> float:
            return _median_s(lambda: _run_s([command, "--help"]), runs=runs)

        rows: list[dict[str, Cell]] = [
            _row("`import la_runtime`", timed_import("import la_runtime"), bound=0.3, unit="s"),
            _row(
                "`from la_runtime import Engine`",
                timed_import("from la_runtime import Engine"),
                bound=None,
                unit="s",
            ),
            _row("`la-runtime --help`", timed_help(runtime.command), bound=0.5, unit="s"),
            _row("`la-export --help`", timed_help(scripts / "la-export"), bound=0.5, unit="s"),
            _row("installed runtime, `[cpu]`", delivered / 1e6, bound=200.0, unit="MB"),
            _row(
                "the same with bytecode of every module",
                runtime.installed_bytes / 1e6,
                bound=None,
                unit="MB",
            ),
        ]
    write_result(
        Path("docs/results/footprint.json"),
        command="scripts/measure_footprint",
        columns=_COLUMNS,
        rows=rows,
        facts={"runs": runs, "statistic": "median"},
    )
    for row in rows:
        click.echo(f"{row['what']:<45} {row['measured']:8} {row['unit']}", err=True)


def _row(what: str, measured: float, *, bound: float | None, unit: str) -> dict[str, Cell]:
    return {"what": what, "measured": round(measured, 3), "bound": bound, "unit": unit}


if __name__ == "__main__":
    _main()
