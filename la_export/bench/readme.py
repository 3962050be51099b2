"""The body of `scripts/readme_tables`: refills the README's tables, or says whether they differ."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import click

from la_export.bench.results import Result, read_result
from la_export.bench.tables import fill_tables
from la_runtime.errors import LookaheadError

__all__ = ["load_results"]


def load_results(folder: Path) -> Mapping[str, Result]:
    """Every result file of a folder, by its stem.

    Raises:
        UsageError: a file is not in the result format.
    """
    return {path.stem: read_result(path) for path in sorted(folder.glob("*.json"))}


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit 1 when a table differs.")
def _main(*, check: bool) -> None:
    """Refill the tables of README.md from docs/results; run from the repository's root."""
    path = Path("README.md")
    text = path.read_text(encoding="utf-8")
    try:
        filled = fill_tables(text, load_results(Path("docs/results")))
    except LookaheadError as error:
        raise click.ClickException(str(error)) from error
    if filled == text:
        return
    if check:
        raise click.ClickException(f"the tables of {path} are stale: run scripts/readme_tables")
    partial = path.with_suffix(".partial")
    partial.write_text(filled, encoding="utf-8")
    os.replace(partial, path)
    click.echo(f"refilled {path}", err=True)


if __name__ == "__main__":
    _main()
