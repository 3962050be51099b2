"""Measure an engine as services use it: many threads, streams, and conversations.

    .venv/bin/python scripts/service.py engines/smollm2-135m

Every figure is a ratio of things timed in turn. Writes docs/results/service.json; ends with exit
code 1 if threads together are slower than the bound allows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import click

from la_export.bench.overhead import time_calls
from la_export.bench.prompts import load_prompts, pick_prompts
from la_export.bench.results import Column, write_result
from la_runtime.generation import Engine

THREADS = 8
REQUESTS = 16
NUM_TOKENS = 32
LEAST_SHARE = 0.95
LONGEST_PROMPT = 150
COLUMNS = [
    Column(key="figure", title="Figure"),
    Column(key="k", title="k"),
    Column(key="value", title="Measured", digits=3),
    Column(key="bound", title="Bound"),
]


def row(figure: str, k: int, value: float, bound: str) -> dict[str, Any]:
    """One ratio; said on stderr as it is measured."""
    click.echo(f"{figure}, k = {k}: {value:.3f} ({bound})", err=True)
    return {"figure": figure, "k": k, "value": value, "bound": bound}


def compare_threads(engine: Engine, prompts: Sequence[Sequence[int]], k: int, rounds: int) -> float:
    """Tokens a second of all threads together, over those of the same requests one by one."""

    def ask(prompt: Sequence[int]) -> None:
        engine.generate(prompt, k=k, max_new_tokens=NUM_TOKENS, ignore_eos=True)

    def ask_in_turn() -> None:
        for prompt in prompts:
            ask(prompt)

    with ThreadPoolExecutor(THREADS) as threads:
        in_turn, together = time_calls(
            [ask_in_turn, lambda: list(threads.map(ask, prompts))], rounds=rounds
        )
    return in_turn / together


def compare_stepping(engine: Engine, prompt: Sequence[int], k: int, rounds: int) -> float:
    """Time of a stream through the engine's thread, over the same steps run by the caller."""

    def step() -> None:
        with engine.prefill(prompt, k=k, max_new_tokens=NUM_TOKENS, ignore_eos=True) as state:
            while state.finish_reason is None:
                state.step()

    def stream() -> None:
        for _ in engine.stream(prompt, k=k, max_new_tokens=NUM_TOKENS, ignore_eos=True):
            pass

    stepping, streaming = time_calls([step, stream], rounds=rounds)
    return streaming / stepping


def compare_turns(engine: Engine, text: str, k: int, rounds: int) -> float:
    """Time to the first token of a second turn, over that of the same prompt without a cache."""
    shares = []
    for _ in range(rounds):
        with engine.start() as conversation:
            conversation.send(text, k=k, max_new_tokens=NUM_TOKENS)
            warm = conversation.send("Why?", k=k, max_new_tokens=1)
        cold = engine.generate(conversation.messages[:-1], k=k, max_new_tokens=1)
        shares.append(warm.stats.ttft_s / cold.stats.ttft_s)
    return median(shares)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.option("--threads", type=int, default=0, help="Threads of a pass.  [default: all cores]")
@click.option("--rounds", type=int, default=3, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/results/service.json"))
def main(bundle: Path, threads: int, rounds: int, out: Path) -> None:
    """Measure and write the table."""
    rows = []
    with Engine.open(bundle, threads=threads) as engine:
        engine.warmup()
        picked = pick_prompts(load_prompts(), per_group=REQUESTS)
        encoded = [engine.encode(prompt.turns[0], chat=True) for prompt in picked]
        prompts = [ids for ids in encoded if len(ids) <= LONGEST_PROMPT][:REQUESTS]
        text = max((prompt.turns[0] for prompt in picked), key=len)[:2000]
        for k in (0, 4):
            share = compare_threads(engine, prompts, k, rounds)
            rows.append(
                row(
                    f"tokens/s of {THREADS} threads over one request after another",
                    k,
                    share,
                    f"at least {LEAST_SHARE}",
                )
            )
        for k in (0, 4):
            rows.append(
                row(
                    "time of a stream over the same steps run by the caller",
                    k,
                    compare_stepping(engine, prompts[0], k, rounds),
                    "none",
                )
            )
        rows.append(
            row(
                "time to the first token of a second turn over that of a cold run",
                4,
                compare_turns(engine, text, 4, rounds),
                "none",
            )
        )
        max_batch = engine.max_batch
    write_result(
        out,
        command=(
            f".venv/bin/python scripts/service.py {bundle} --threads {threads} --rounds {rounds}"
        ),
        columns=COLUMNS,
        rows=rows,
        facts={
            "requests": len(prompts),
            "new_tokens": NUM_TOKENS,
            "rounds": rounds,
            "max_batch": max_batch,
        },
    )
    slowest = min(one["value"] for one in rows[:2])
    sys.exit(int(slowest < LEAST_SHARE))


if __name__ == "__main__":
    main()
