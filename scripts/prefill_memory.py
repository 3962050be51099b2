"""Measure the memory that reading a long prompt takes, beside that for a short one.

    .venv/bin/python scripts/prefill_memory.py engines/smollm2-135m

Each prompt is read in a process of its own. The bound holds for what the passes add to the open
bundle and K/V, and so for all that the process holds beyond K/V. Writes
docs/results/prefill_memory.json; ends with exit code 1 if the long prompt takes more.
"""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import click

from la_export.bench.memory import PrefillMemory, measure_prefill
from la_export.bench.results import Cell, Column, write_result

BOUND = 1.2
COLUMNS = [
    Column(key="prompt_tokens", title="Prompt tokens"),
    Column(key="cache_mb", title="K/V (MB)", digits=1),
    Column(key="beyond_mb", title="Beyond bundle and K/V (MB)", digits=1),
    Column(key="process_mb", title="Process beyond K/V (MB)", digits=1),
]


def measure_in_fresh_process(bundle: Path, num_tokens: int, threads: int) -> PrefillMemory:
    """`measure_prefill` where nothing was allocated before."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_prefill, bundle, num_tokens, threads=threads).result()


def as_row(measured: PrefillMemory) -> dict[str, Cell]:
    """One row of the table, in MB of 10^6 bytes."""
    return {
        "prompt_tokens": measured.num_tokens,
        "cache_mb": measured.cache_bytes / 1e6,
        "beyond_mb": measured.beyond_cache_bytes / 1e6,
        "process_mb": measured.process_beyond_cache_bytes / 1e6,
    }


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.option("--short", type=click.IntRange(min=1), default=500, show_default=True)
@click.option("--long", type=click.IntRange(min=1), default=4000, show_default=True)
@click.option("--threads", type=int, default=1, show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("docs/results/prefill_memory.json")
)
def main(bundle: Path, short: int, long: int, threads: int, out: Path) -> None:
    """Measure and write the table."""
    measured = [measure_in_fresh_process(bundle, tokens, threads) for tokens in (short, long)]
    rows = [as_row(one) for one in measured]
    small, large = measured
    ratio = large.beyond_cache_bytes / small.beyond_cache_bytes
    process_ratio = large.process_beyond_cache_bytes / small.process_beyond_cache_bytes
    settings = f"--short {short} --long {long} --threads {threads}"
    write_result(
        out,
        command=f".venv/bin/python scripts/prefill_memory.py {bundle} {settings}",
        columns=COLUMNS,
        rows=rows,
        facts={"ratio": ratio, "process_ratio": process_ratio, "bound": BOUND},
    )
    for row in rows:
        click.echo(", ".join(f"{key} {value:.1f}" for key, value in row.items()), err=True)
    click.echo(
        f"beyond bundle and K/V {ratio:.2f} times, process beyond K/V {process_ratio:.2f} times; "
        f"at most {BOUND}",
        err=True,
    )
    sys.exit(int(max(ratio, process_ratio) > BOUND))


if __name__ == "__main__":
    main()
