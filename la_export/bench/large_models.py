"""Builds models of full size on this machine and decodes with them, into large_models.json.

    scripts/large_models --work FOLDER --build llama-7b:int8 --decode llama-7b:int8
    scripts/large_models --work FOLDER --build llama-7b@12:fp16 --plan llama-7b@12:fp16

`llama-7b@12` are its first twelve layers.

Weights are random, from `scripts/make_checkpoint`: time, memory and disk are those of the real
sizes, and so are the checks against PyTorch; text is noise. Rows of earlier runs stay in the file
until they are measured again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Final

import click
import numpy as np

from la_export.bench.gpu.random_checkpoint import write_random_checkpoint
from la_export.bench.gpu.shapes import SHAPES
from la_export.bench.memory import peak_bytes
from la_export.bench.overhead import time_steps
from la_export.bench.plan_build import measure_plan
from la_export.bench.results import Cell, Column, read_result, write_result
from la_export.bench.speed.steps import Scored, allocate_filled, make_step
from la_export.estimate import EstimateOptions, Target, TargetEstimate, estimate, read_shape
from la_export.options import BuildOptions, Precision
from la_runtime.bundle import MANIFEST_NAME
from la_runtime.generation import Engine
from la_runtime.layout import Layout

__all__ = ["main"]

_MODULE: Final = "la_export.bench.large_models"
_K: Final = 8
_WIDTHS: Final = (1, 2, 3, 5, 9, 13, 17, 25, 33)
_PAST: Final = 256
_RESERVED: Final = 320
_ROUNDS: Final = 5
_PROMPT: Final = tuple(range(100, 132))
_NEW_TOKENS: Final = 12
_GB: Final = 1e9
_COLUMNS: Final = [
    Column(key="model", title="Shape"),
    Column(key="precision", title="Precision"),
    Column(key="build_minutes", title="Build (min)", digits=1),
    Column(key="build_peak_gb", title="its peak memory (GB)", digits=2),
    Column(key="estimated_build_peak_gb", title="estimated", digits=2),
    Column(key="disk_gb", title="Disk (GB)", digits=2),
    Column(key="estimated_disk_gb", title="estimated", digits=2),
    Column(key="open_peak_gb", title="Decoding (GB)", digits=2),
    Column(key="estimated_open_gb", title="estimated", digits=2),
    Column(key="l17", title="L(17) / L(1)", digits=2),
    Column(key="plan_peak_gb", title="Plan for RTX (GB)", digits=2),
]
Row = dict[str, Cell]


@click.command()
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder for checkpoints and bundles; those that lie there are used again.",
)
@click.option("--build", "builds", multiple=True, metavar="MODEL:PRECISION", help="Build it.")
@click.option("--decode", "decodes", multiple=True, metavar="MODEL:PRECISION", help="Decode it.")
@click.option("--plan", "plans", multiple=True, metavar="MODEL:fp16", help="Plan it for RTX.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("docs/results/large_models.json"),
    show_default=True,
)
@click.option("--decode-bundle", type=click.Path(path_type=Path), hidden=True)
def main(
    work: Path,
    builds: tuple[str, ...],
    decodes: tuple[str, ...],
    plans: tuple[str, ...],
    out: Path,
    decode_bundle: Path | None,
) -> None:
    """Build and decode models of full size, one behind the other."""
    if decode_bundle is not None:
        click.echo(json.dumps(_decode(decode_bundle)))
        return
    rows = {
        (str(row["model"]), str(row["precision"])): _empty(row["model"], row["precision"]) | row
        for row in _earlier(out)
    }
    tasks = ((builds, _measure_build), (decodes, _run), (plans, _measure_plan))
    for asked, measure in ((name, measure) for names, measure in tasks for name in names):
        model, precision = asked.split(":")
        row = rows.setdefault((model, precision), _empty(model, precision))
        row |= measure(work, model, Precision(precision))
        click.echo(json.dumps(row), err=True)
        write_result(
            out,
            command="scripts/large_models --work FOLDER "
            + " ".join(f"--build {m}:{p} --decode {m}:{p}" for m, p in sorted(rows)),
            columns=_COLUMNS,
            rows=[rows[key] for key in sorted(rows)],
            facts={"k": _K, "past": _PAST, "rounds": _ROUNDS},
        )


def _earlier(out: Path) -> Iterator[Row]:
    if out.is_file():
        yield from (dict(row) for row in read_result(out).rows)


def _empty(model: Cell, precision: Cell) -> Row:
    """What was not measured is shown as such."""
    return dict.fromkeys((column.key for column in _COLUMNS), None) | {
        "model": model,
        "precision": precision,
    }


def _measure_build(work: Path, model: str, precision: Precision) -> Row:
    """The command of the README, in a process of its own."""
    folder = _checkpoint(work, model)
    bundle = _bundle(work, model, precision)
    command = [
        *(sys.executable, "-m", "la_export.cli", "build", "--model", str(folder)),
        *("--k", str(_K), "--precision", precision.value),
        *("--target", "onnx", "--out", str(bundle), "--json"),
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    report = json.loads(done.stdout)
    target = _estimate(folder, precision)
    manifest = report["manifest"]
    disk = sum(entry["bytes"] for entry in manifest["files"].values())
    return {
        "build_minutes": report["seconds"] / 60,
        "build_peak_gb": report["peak_rss_bytes"] / _GB,
        "estimated_build_peak_gb": target.build_host_bytes / _GB,
        "disk_gb": (disk + (bundle / MANIFEST_NAME).stat().st_size) / _GB,
        "estimated_disk_gb": target.disk_bytes / _GB,
        "largest_difference": max(
            check["value"]
            for check in manifest["checks"]
            if check["detail"].startswith("of the true range") or "twin" in check["name"]
        ),
        **{
            f"check {check['name']}": check["value"]
            for check in manifest["checks"]
            if isinstance(check["value"], float)
        },
        **{f"{stage['stage']}_s": stage["seconds"] for stage in report["stages"]},
    }


def _measure_plan(work: Path, model: str, precision: Precision) -> Row:
    """A plan of TensorRT for RTX, which needs no GPU."""
    built = measure_plan(_bundle(work, model, precision), "--k", str(_K))
    return {
        "plan_minutes": built.record["seconds"] / 60,
        "plan_peak_gb": built.peak_bytes / _GB,
        "plan_gb": built.record["bytes"] / _GB,
        "plan_fused": f"{built.record['fused_attentions']} of {built.record['attentions']}",
    }


def _run(work: Path, model: str, precision: Precision) -> Row:
    """Decoding, in a process of its own."""
    bundle = _bundle(work, model, precision)
    command = [sys.executable, "-m", _MODULE, "--work", str(work), "--decode-bundle", str(bundle)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    found: Row = json.loads(done.stdout)
    target = _estimate(_checkpoint(work, model), precision)
    memory = target.steps[0].memory
    # Of the cache, what was reserved.
    others = target.host_bytes(target.steps[0]) - memory.cache
    return found | {"estimated_open_gb": (others + _RESERVED * memory.cache_per_token) / _GB}


def _estimate(folder: Path, precision: Precision) -> TargetEstimate:
    options = BuildOptions(model=str(folder), lookahead_lengths=(_K,), precision=precision)
    shape = read_shape(str(folder), revision=None, context=None)
    found = estimate(shape, EstimateOptions(build=options, max_batch=1))
    return next(target for target in found.targets if target.target is Target.ORT_CPU)


def _decode(bundle: Path) -> Row:
    began = time.perf_counter()
    with Engine.open(bundle) as engine:
        opened = time.perf_counter() - began
        answers = [
            engine.generate(_PROMPT, k=k, max_new_tokens=_NEW_TOKENS, ignore_eos=True).token_ids
            for k in (0, _K)
        ]
        times = time_steps(engine, [_PROMPT], k=4, layout=Layout.ROOT_ONLY, num_tokens=_NEW_TOKENS)
        context = engine.bundle.manifest.model.context
        state = allocate_filled(engine.backend, past=_PAST, reserved=_RESERVED, context=context)
        steps = [
            make_step(
                engine.backend,
                state,
                num_rows=width,
                scored=Scored.VERIFIED,
                context=context,
            )
            for width in _WIDTHS
        ]
        seconds = _time_in_turn(steps)
    return {
        "open_s": opened,
        "open_peak_gb": peak_bytes() / _GB,
        "answers_equal": answers[0] == answers[1],
        "outside_percent": 100 * times.outside_share,
        "l17": seconds[_WIDTHS.index(17)] / seconds[0],
        **{f"L({w}) s": s for w, s in zip(_WIDTHS, seconds, strict=True)},
    }


def _time_in_turn(steps: list[Callable[[], float]]) -> list[float]:
    """The median of each over rounds in which all run, once to warm up."""
    rounds = np.array([[step() for step in steps] for _ in range(1 + _ROUNDS)])
    return [median(column) for column in rounds[1:].T.tolist()]


def _checkpoint(work: Path, model: str) -> Path:
    folder = work / model
    if not (folder / "tokenizer_config.json").is_file():
        name, _, layers = model.partition("@")
        shape = SHAPES[name]
        if layers:
            shape = replace(shape, num_layers=int(layers))
        write_random_checkpoint(folder, shape)
    return folder


def _bundle(work: Path, model: str, precision: Precision) -> Path:
    return work / f"{model}-{precision}"


if __name__ == "__main__":
    main()
