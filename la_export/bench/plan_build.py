"""Time and memory of building plans: the body of `scripts/plan_build`.

Builds what the command `la-export plan` builds, by that command, each plan in a process of its
own, so that its peak memory is that of one plan.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from la_export.bench.results import Cell, Column, write_result
from la_export.options import BuildOptions, Precision
from la_export.pipeline import build
from la_runtime.contract import CacheForm
from la_runtime.errors import HostError

__all__ = ["BuiltPlan", "measure_plan"]

# The command, then its own figures: of a child, the system counts its parent's memory too.
_PROGRAM: Final = """
import sys
import time
from la_export.bench.memory import peak_bytes
from la_export.cli import main
code = main(sys.argv[1:], standalone_mode=False)
print(peak_bytes(), time.process_time())
sys.exit(code)
"""
_LENGTHS: Final = (2, 4, 8)
_MOST_SECONDS: Final = 60.0
_MOST_BYTES: Final = 4e9
_COLUMNS: Final = (
    Column(key="cache_form", title="Cache form"),
    Column(key="k", title="k"),
    Column(key="seconds", title="Seconds", digits=1),
    Column(key="cpu_seconds", title="CPU seconds", digits=1),
    Column(key="peak_gb", title="Peak memory (GB)"),
    Column(key="plan_mb", title="Plan (MB)", digits=1),
    Column(key="fused", title="Fused attentions"),
    Column(key="layers", title="Layers"),
    Column(key="profiles", title="Profiles"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltPlan:
    """One plan as the command built it.

    Args:
        record: what the command printed of it.
        peak_bytes: peak resident memory of the command.
        cpu_seconds: of the command, all threads; what else runs meanwhile does not count.
    """

    record: dict[str, Any]
    peak_bytes: int
    cpu_seconds: float

    @property
    def keeps_bounds(self) -> bool:
        """Whether it was built in time and memory, with every attention fused."""
        return (
            self.cpu_seconds < _MOST_SECONDS
            and self.peak_bytes < _MOST_BYTES
            and self.record["fused_attentions"] == self.record["attentions"]
        )


def measure_plan(bundle: Path, *options: str) -> BuiltPlan:
    """Build one plan of a bundle for TensorRT for RTX with `la-export plan`.

    Args:
        bundle: folder of the bundle; the plan takes the place of those it has.
        options: of the command; they must ask for a single plan.

    Raises:
        HostError: the command failed.
    """
    command = [sys.executable, "-c", _PROGRAM, "plan", str(bundle)]
    command += ["--target", "trt-rtx", "--json", "--quiet", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise HostError(f"the plan was not built: exit code {done.returncode}")
    printed, _, figures = done.stdout.strip().rpartition("\n")
    (record,) = json.loads(printed)["plans"]
    peak_bytes, cpu_seconds = figures.split()
    return BuiltPlan(record=record, peak_bytes=int(peak_bytes), cpu_seconds=float(cpu_seconds))


def _measure_all(bundle: Path, lengths: Sequence[int]) -> Iterator[tuple[str, BuiltPlan]]:
    for k in lengths:
        yield str(k), measure_plan(bundle, "--k", str(k))
    yield "shared", measure_plan(bundle, "--plans", "shared")


def _row(cache_form: CacheForm, k: str, built: BuiltPlan) -> dict[str, Cell]:
    record = built.record
    return {
        "cache_form": cache_form.value,
        "k": k,
        "seconds": record["seconds"],
        "cpu_seconds": round(built.cpu_seconds, 1),
        "peak_gb": round(built.peak_bytes / 1e9, 3),
        "plan_mb": round(record["bytes"] / 1e6, 1),
        "fused": f"{record['fused_attentions']} of {record['attentions']}",
        "layers": record["layers"],
        "profiles": len(record["profiles"]),
        "keeps_bounds": built.keeps_bounds,
    }


def _make_bundle(model: str, cache_form: CacheForm, folder: Path) -> Path:
    """A bundle of the model in float16, if it is not there already."""
    if not folder.exists():
        build(
            BuildOptions(
                model=model,
                lookahead_lengths=_LENGTHS,
                precision=Precision.FP16,
                cache_form=cache_form,
                out=folder,
            )
        )
    return folder


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    help="Folder for the bundles; those of an earlier run are used again.  [default: none kept]",
)
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("docs/results/plan_build.json")
)
def _main(*, model: str, work: Path | None, out: Path) -> None:
    """Build plans of a model in float16, in both cache forms; ends with 1 out of bounds."""
    rows: list[dict[str, Cell]] = []
    version = ""
    with tempfile.TemporaryDirectory() as scratch:
        for cache_form in CacheForm:
            bundle = _make_bundle(model, cache_form, (work or Path(scratch)) / cache_form)
            for k, built in _measure_all(bundle, _LENGTHS):
                rows.append(_row(cache_form, k, built))
                version = built.record["version"]
                click.echo(json.dumps(rows[-1]), err=True)
    write_result(
        out,
        command="scripts/plan_build",
        columns=_COLUMNS,
        rows=rows,
        facts={
            "model": model,
            "precision": Precision.FP16.value,
            "target": "trt-rtx",
            "tensorrt_rtx": version,
            "gpu": None,
            "most_cpu_seconds": _MOST_SECONDS,
            "most_gb": _MOST_BYTES / 1e9,
        },
    )
    sys.exit(0 if all(row["keeps_bounds"] for row in rows) else 1)


if __name__ == "__main__":
    _main()
