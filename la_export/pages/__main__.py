"""The body of `scripts/docs`: makes the generated blocks of docs/*.md anew, or only compares."""

from __future__ import annotations

import os
from pathlib import Path

import click

from la_export.pages.blocks import fill_blocks
from la_export.pages.command_page import COMMAND_BLOCKS
from la_export.pages.contract_page import CONTRACT_BLOCKS
from la_runtime.errors import LookaheadError


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit 1 when a page differs.")
def _main(*, check: bool) -> None:
    """Make the generated blocks of docs/*.md anew; run from the repository's root."""
    for path in sorted(Path("docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        try:
            filled = fill_blocks(text, {**CONTRACT_BLOCKS, **COMMAND_BLOCKS})
        except LookaheadError as error:
            raise click.ClickException(f"{path}: {error}") from error
        if filled == text:
            continue
        if check:
            raise click.ClickException(f"{path} is stale: run scripts/docs")
        partial = path.with_suffix(".partial")
        partial.write_text(filled, encoding="utf-8")
        os.replace(partial, path)
        click.echo(f"made {path} anew", err=True)


if __name__ == "__main__":
    _main()
