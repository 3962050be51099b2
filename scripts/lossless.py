"""Compare lookahead decoding of a bundle with plain decoding and with transformers.

    .venv/bin/python scripts/lossless.py engines/smollm2-135m --model smollm2-135m

Needs a bundle that was built for every k asked for. Several processes may share the work, each
with its own values of k: they fill one table. Rows of an earlier run over the very same bundle are
kept; remove the file to make them again. Ends with exit code 1 if any token differs without excuse.
"""

from __future__ import annotations

import fcntl
import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from la_export.bench.prompts import load_prompts, pick_prompts
from la_export.bench.results import Column, read_result, write_result
from la_export.reference import TorchReference
from la_export.verify.epsilon import measure_epsilon
from la_export.verify.lossless import (
    RAGGED_BATCH,
    PlainRun,
    Tally,
    compare_fixed_width,
    compare_lookahead,
    compare_reference,
    run_plainly,
)
from la_export.verify.tolerance import FP32
from la_runtime.generation import Engine
from la_runtime.layout import Layout

LONGEST_PROMPT = 900
EPSILON_TOKENS = 1000
FIXED_WIDTH_EVERY = 8
FIXED_WIDTH_PREFILL = 32
AT_ONE_WIDTH = "plain, all passes equally wide"
COLUMNS = [
    Column(key="compared_with", title="Compared with"),
    Column(key="k", title="k"),
    Column(key="layout", title="Layout"),
    Column(key="batch", title="Batch"),
    Column(key="prompts", title="Prompts"),
    Column(key="tokens", title="Tokens"),
    Column(key="equal", title="Equal"),
    Column(key="excused", title="Near-ties"),
    Column(key="different", title="Different"),
    Column(key="tokens_per_pass", title="Tokens per pass"),
]


def say(line: str) -> None:
    """Progress, with the time of day, on stderr."""
    click.echo(f"{time.strftime('%H:%M:%S')} {line}", err=True)


def pick(engine: Engine, per_group: int) -> list[tuple[str, tuple[int, ...]]]:
    """Name and token ids of the prompts: chat template, first turn, at most LONGEST_PROMPT."""
    encoded = {prompt: engine.encode(prompt.turns[0], chat=True) for prompt in load_prompts()}
    short = [prompt for prompt, ids in encoded.items() if len(ids) <= LONGEST_PROMPT]
    return [
        (f"{prompt.group}/{prompt.question_id}", encoded[prompt])
        for prompt in pick_prompts(short, per_group=per_group)
    ]


class Measurement:
    """Everything the rows need; plain decoding and epsilon are made when first asked for."""

    def __init__(
        self, engine: Engine, *, ks: tuple[int, ...], per_group: int, new_tokens: int, threads: int
    ) -> None:
        self._engine = engine
        self._ks = ks
        self._new_tokens = new_tokens
        self._threads = threads
        self._prompts = pick(engine, per_group)

    @cached_property
    def runs(self) -> list[PlainRun]:
        """Plain decoding of every prompt."""
        say(f"plain decoding of {len(self._prompts)} prompts")
        return [
            run_plainly(self._engine, name, ids, num_tokens=self._new_tokens)
            for name, ids in self._prompts
        ]

    @cached_property
    def epsilon(self) -> float:
        """Margin of a near-tie, over the prompts' and the model's own texts."""
        widths = sorted({layout.max_rows(k) for k in self._ks for layout in Layout})
        say(f"near-ties: one row against {widths} rows")
        text = [token for run in self.runs for token in (*run.prompt, *run.token_ids)]
        measured = measure_epsilon(
            self._engine.backend,
            text[:EPSILON_TOKENS],
            widths=widths,
            context=self._engine.bundle.manifest.model.context,
        )
        say(f"epsilon {measured:.2e}")
        return min(measured, FP32.epsilon)

    def against_transformers(self, model: str) -> Tally:
        """Plain decoding against transformers' greedy generation."""
        if self._threads:
            torch.set_num_threads(self._threads)
        reference = TorchReference.load(model)
        eos = self._engine.bundle.manifest.model.eos_token_ids

        def generate(token_ids: Sequence[int]) -> list[int]:
            return reference.generate_greedy(token_ids, self._new_tokens, eos)

        return compare_reference(self.runs, generate, epsilon=self.epsilon, report=say)

    def at_one_width(self, k: int, layout: Layout) -> Tally:
        """Lookahead decoding of some prompts against plain decoding, bit for bit."""
        return compare_fixed_width(
            self._engine,
            self._prompts[::FIXED_WIDTH_EVERY],
            what=AT_ONE_WIDTH,
            k=k,
            layout=layout,
            width=layout.max_rows(k) + FIXED_WIDTH_PREFILL,
            num_tokens=self._new_tokens,
            report=say,
        )

    def against_plain(self, k: int, layout: Layout, batch: int) -> Tally:
        """Lookahead decoding against plain decoding."""
        return compare_lookahead(
            self._engine,
            self.runs,
            batch,
            k=k,
            layout=layout,
            num_tokens=self._new_tokens,
            epsilon=self.epsilon,
            report=say,
        )


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.option("--model", required=True, help="The checkpoint the bundle was built from.")
@click.option("--k", "ks", type=int, multiple=True, default=(2, 4, 8), show_default=True)
@click.option("--per-group", type=int, default=8, show_default=True, help="Prompts per group.")
@click.option("--new-tokens", type=int, default=64, show_default=True)
@click.option("--threads", type=int, default=0)
@click.option(
    "--reference/--no-reference", default=True, help="Compare with transformers, too (slow)."
)
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/results/lossless.json"))
def main(
    bundle: Path,
    model: str,
    ks: tuple[int, ...],
    per_group: int,
    new_tokens: int,
    threads: int,
    reference: bool,
    out: Path,
) -> None:
    """Make the table and write it."""
    settings = f"{bundle} --model {model} --per-group {per_group} --new-tokens {new_tokens}"
    with Engine.open(bundle, threads=threads, max_batch=RAGGED_BATCH) as engine:
        table = Table(
            out,
            command=f".venv/bin/python scripts/lossless.py {settings}",
            bundle=bundle_facts(engine),
        )
        measurement = Measurement(
            engine, ks=ks, per_group=per_group, new_tokens=new_tokens, threads=threads
        )
        tasks: list[tuple[RowKey, Callable[[], Tally]]] = []
        if reference:
            key = RowKey("transformers", 0, "none", 1)
            tasks.append((key, partial(measurement.against_transformers, model)))
        for k, layout in product(ks, Layout):
            key = RowKey(AT_ONE_WIDTH, k, layout.value, 1)
            tasks.append((key, partial(measurement.at_one_width, k, layout)))
        for batch, k, layout in product((1, RAGGED_BATCH), ks, Layout):
            key = RowKey("plain", k, layout.value, batch)
            tasks.append((key, partial(measurement.against_plain, k, layout, batch)))
        for key, measure in tasks:
            if table.lacks(key):
                table.add(measure(), epsilon=measurement.epsilon)
    table.write()
    sys.exit(table.verdict())


class RowKey(NamedTuple):
    """What tells one row from another."""

    compared_with: str
    k: int
    layout: str
    batch: int


class Table:
    """The rows so far, written after each one; rows already in the file are not made again.

    Several processes may fill one file, each with its own values of k.
    """

    def __init__(self, path: Path, *, command: str, bundle: dict[str, Any]) -> None:
        self._path = path
        self._command = command
        self._bundle = bundle
        self._rows: list[dict[str, Any]] = []
        self._excuses: list[str] = []
        self._read()

    def _read(self) -> None:
        if self._path.exists():
            earlier = read_result(self._path)
            if earlier.command == self._command and earlier.facts.get("bundle") == self._bundle:
                self._rows = list(earlier.rows)
                self._excuses = earlier.facts["excuses"]

    def lacks(self, key: RowKey) -> bool:
        """Whether there is no such row yet."""
        return not any(row_key(row) == key for row in self._rows)

    def add(self, tally: Tally, *, epsilon: float) -> None:
        """Add a row, and write the file."""
        row = as_row(tally) | {"epsilon": epsilon}
        say(", ".join(f"{key} {value}" for key, value in row.items()))
        with open(self._path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._read()
            if self.lacks(row_key(row)):
                self._rows.append(row)
                self._excuses += tally.excuses
                self.write()

    def write(self) -> None:
        """Write the file: the reference first, then by comparison, batch, k and layout."""
        self._rows.sort(key=lambda row: (row["k"] > 0, row["batch"], *row_key(row)))
        for row in self._rows:
            row["tokens_per_pass"] = row["tokens_per_pass"] or None  # not counted everywhere
        write_result(
            self._path,
            command=self._command,
            columns=COLUMNS,
            rows=self._rows,
            facts={
                "bundle": self._bundle,
                "tokens": self._total("tokens"),
                "excused": self._total("excused"),
                "excused_limit": FP32.excused_share,
                "different": self._total("different"),
                "excuses": self._excuses,
            },
        )

    def _total(self, key: str) -> int:
        return sum(int(row[key]) for row in self._rows)

    def verdict(self) -> int:
        """Say the totals; 0 when every difference is excused and excuses are rare enough."""
        tokens, excused, different = map(self._total, ("tokens", "excused", "different"))
        say(f"{tokens} tokens compared, {excused} near-ties, {different} different: {self._path}")
        return int(different > 0 or excused > tokens * FP32.excused_share)


def bundle_facts(engine: Engine) -> dict[str, Any]:
    """What was measured: the command that builds the bundle, and the digests of its files."""
    manifest = engine.bundle.manifest
    lengths = " ".join(f"--k {k}" for k in manifest.lookahead_lengths)
    return {
        "command": f"la-export build --model {manifest.model.name} {lengths}",
        "sha256": {path: entry.sha256 for path, entry in sorted(manifest.files.items())},
    }


def row_key(row: dict[str, Any]) -> RowKey:
    """The key of a row as written."""
    return RowKey(row["compared_with"], row["k"], row["layout"], row["batch"])


def as_row(tally: Tally) -> dict[str, Any]:
    """One row of the table."""
    return {
        "compared_with": tally.what,
        "k": tally.k,
        "layout": tally.layout,
        "batch": tally.batch,
        "prompts": tally.prompts,
        "tokens": tally.tokens,
        "equal": tally.equal,
        "excused": tally.excused,
        "different": tally.different,
        "tokens_per_pass": tally.tokens_per_pass,
    }


if __name__ == "__main__":
    main()
