"""Measure what the runtime adds to the passes, and what building and opening a bundle take.

    .venv/bin/python scripts/runtime.py

Builds smollm2-135m into a temporary folder; writes docs/results/runtime.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import click

from la_export.bench.overhead import time_calls, time_steps
from la_export.bench.prompts import load_prompts, pick_prompts
from la_export.bench.results import Column, write_result
from la_export.reference import TorchReference
from la_runtime.generation import Engine
from la_runtime.layout import Layout

MODEL = "smollm2-135m"
NUM_TOKENS = 64
ROUNDS = 5
COLUMNS = [
    Column(key="figure", title="Figure"),
    Column(key="value", title="Measured", digits=3),
    Column(key="unit", title="Unit"),
    Column(key="bound", title="Bound"),
]


def row(figure: str, value: float, unit: str, bound: str) -> dict[str, Any]:
    """One figure; said on stderr as it is measured."""
    click.echo(f"{figure}: {value:.3f} {unit} ({bound})", err=True)
    return {"figure": figure, "value": value, "unit": unit, "bound": bound}


def build(out: Path) -> dict[str, Any]:
    """Build in a process of its own, so that its peak memory is its own."""
    options = ["--model", MODEL, "--k", "4", "--target", "onnx", "--out", str(out), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "la_export.cli", "build", *options],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def measure(bundle: Path, rows: list[dict[str, Any]]) -> None:
    """Everything that needs the bundle."""

    def open_and_close() -> None:
        Engine.open(bundle).close()

    (opening,) = time_calls([open_and_close], rounds=ROUNDS)
    rows.append(row("opening the bundle, digests included", opening, "s", "at most 3"))
    with Engine.open(bundle) as engine:
        picked = pick_prompts(load_prompts(), per_group=1)
        encoded = [engine.encode(prompt.turns[0], chat=True) for prompt in picked]
        prompts = sorted(encoded, key=len)[:4]
        lookahead = time_steps(engine, prompts, k=4, layout=Layout.ROOT_ONLY, num_tokens=NUM_TOKENS)
        plain = time_steps(engine, prompts, k=0, layout=Layout.ROOT_ONLY, num_tokens=NUM_TOKENS)
        rows.append(
            row(
                "time of a step outside its pass, batch 1, k = 4",
                100 * lookahead.outside_share,
                "% of the pass",
                "at most 5",
            )
        )
        rows.append(row("a pass of that step", 1000 * lookahead.pass_s, "ms", "none"))
        rows.append(
            row(
                "a plain step over its bare pass",
                plain.bare_ratio,
                "times",
                "at most 1.10",
            )
        )
        rows.append(row("a plain pass", 1000 * plain.pass_s, "ms", "none"))
        plainly, ahead = time_calls(
            [partial(engine.generate, prompts[0], k=k, max_new_tokens=NUM_TOKENS) for k in (0, 4)],
            rounds=ROUNDS,
        )
        rows.append(
            row(
                "speed of k = 4 over plain decoding, untuned vectors",
                plainly / ahead,
                "times",
                "reported",
            )
        )
        reference = TorchReference.load(MODEL)
        prompt = prompts[0]
        ours, theirs = time_calls(
            [
                lambda: engine.generate(prompt, k=0, max_new_tokens=NUM_TOKENS, ignore_eos=True),
                lambda: reference.generate_greedy(prompt, NUM_TOKENS, ()),
            ],
            rounds=ROUNDS,
        )
        rows.append(
            row(
                "plain decoding's speed over transformers' generate, both fp32",
                theirs / ours,
                "times",
                "reported",
            )
        )


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/results/runtime.json"))
def main(out: Path) -> None:
    """Measure and write the table."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / MODEL
        report = build(bundle)
        rows = [
            row("building the bundle", report["seconds"], "s", "at most 120"),
            row("its peak memory", report["peak_rss_bytes"] / 1e9, "GB", "at most 3"),
        ]
        measure(bundle, rows)
    write_result(
        out,
        command=".venv/bin/python scripts/runtime.py",
        columns=COLUMNS,
        rows=rows,
        facts={"model": MODEL, "new_tokens": NUM_TOKENS, "rounds": ROUNDS},
    )


if __name__ == "__main__":
    main()
