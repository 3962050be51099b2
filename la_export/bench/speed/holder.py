"""A process that opens a bundle, decodes a few tokens, says so, and waits to be ended.

    python -m la_export.bench.speed.holder BUNDLE --threads N

Prints one JSON object; ends when its standard input does.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click

from la_export.bench.memory import peak_bytes
from la_runtime.generation import Engine

__all__: list[str] = []


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--threads", type=click.IntRange(min=0), required=True)
def _main(bundle: Path, *, threads: int) -> None:
    """Hold BUNDLE open."""
    start = time.perf_counter()
    with Engine.open(bundle, threads=threads) as engine:
        open_s = time.perf_counter() - start
        engine.warmup()
        click.echo(json.dumps({"open_s": open_s, "peak_rss_bytes": peak_bytes()}))
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    _main()
