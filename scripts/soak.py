"""Make a thousand requests to one engine, and see whether its memory grows.

    .venv/bin/python scripts/soak.py engines/smollm2-135m

Once from one thread and once from eight, each in a process of its own. Memory at request 100 is
compared with that at the last. Writes docs/results/soak.json; ends with exit code 1 if it grew by
more than the bound.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import click

from la_export.bench.results import Cell, Column, write_result
from la_export.bench.soak import KINDS, Resident, soak
from la_runtime.generation import Engine

BOUND_MB = 5.0
COLUMNS = [
    Column(key="threads", title="Threads that ask"),
    Column(key="requests", title="Requests"),
    Column(key="early_mb", title="Resident early (MB)", digits=1),
    Column(key="late_mb", title="Resident at the end (MB)", digits=1),
    Column(key="grown_mb", title="Grown (MB)"),
    Column(key="bound_mb", title="At most", digits=1),
]


def say(found: Resident) -> None:
    """Progress, with the time of day, on stderr."""
    now = time.strftime("%H:%M:%S")
    click.echo(
        f"{now} {found.num_requests} requests: {found.resident_bytes / 1e6:.2f} MB", err=True
    )


def run(bundle: Path, requests: int, every: int, callers: int, threads: int) -> list[Resident]:
    """One engine from its opening to its end."""
    with Engine.open(bundle, threads=threads) as engine:
        return soak(engine, num_requests=requests, num_threads=callers, every=every, report=say)


@click.command()
@click.argument(
    "bundle", type=click.Path(path_type=Path, exists=True), default=Path("engines/smollm2-135m")
)
@click.option("--requests", type=click.IntRange(min=1), default=1000, show_default=True)
@click.option("--every", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--callers", type=int, multiple=True, default=(1, 8), show_default=True)
@click.option("--threads", type=int, default=1, show_default=True, help="Of one pass.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/results/soak.json"))
def main(
    bundle: Path, requests: int, every: int, callers: tuple[int, ...], threads: int, out: Path
) -> None:
    """Make the requests and write the table."""
    if requests % every:
        raise click.UsageError(f"--requests must be a multiple of --every, got {requests}")
    rows: list[dict[str, Cell]] = []
    looks: dict[str, list[float]] = {}
    for count in callers:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(run, bundle, requests, every, count, threads).result()
        sizes = [one.resident_bytes / 1e6 for one in found]
        looks[str(count)] = sizes
        rows.append(
            {
                "threads": count,
                "requests": requests,
                "early_mb": sizes[0],
                "late_mb": sizes[-1],
                "grown_mb": sizes[-1] - sizes[0],
                "bound_mb": BOUND_MB,
            }
        )
    callers_options = " ".join(f"--callers {count}" for count in callers)
    settings = f"--requests {requests} --every {every} {callers_options} --threads {threads}"
    write_result(
        out,
        command=f".venv/bin/python scripts/soak.py {bundle} {settings}",
        columns=COLUMNS,
        rows=rows,
        facts={
            "kinds": [kind.__name__.strip("_") for kind in KINDS],
            "early": f"after {every} requests",
            "resident_mb_by_callers": looks,
        },
    )
    grown = [float(row["grown_mb"] or 0) for row in rows]
    click.echo(f"grown by {', '.join(f'{mb:.2f} MB' for mb in grown)}: {out}", err=True)
    sys.exit(int(max(grown) >= BOUND_MB))


if __name__ == "__main__":
    main()
