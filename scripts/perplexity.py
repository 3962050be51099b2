"""Publish what `la-export perplexity` has recorded in bundles.

    .venv/bin/python scripts/perplexity.py engines/smollm2-135m-int8 engines/smollm2-135m-int4

Measures nothing itself: run `la-export perplexity` on each bundle first. Texts of fewer tokens are
other texts, so figures of two bundles compare only where their tokens are as many; ratios to the
source are of the same tokens always.
"""

from __future__ import annotations

from pathlib import Path

import click

from la_export.bench.results import Cell, Column, write_result
from la_runtime.bundle import open_bundle
from la_runtime.errors import LookaheadError, UsageError

RESULT = Path("docs/results/perplexity.json")
COLUMNS = (
    Column(key="bundle", title="Bundle"),
    Column(key="precision", title="Precision"),
    Column(key="text", title="Text"),
    Column(key="tokens", title="Tokens"),
    Column(key="perplexity", title="Perplexity"),
    Column(key="source", title="Source's"),
    Column(key="ratio", title="Ratio", digits=4),
)
ALL = "all"


def rows_of(folder: Path) -> list[dict[str, Cell]]:
    """A row for each kind of text, and one for all.

    Raises:
        UsageError: nothing was recorded in the bundle, or without its source.
    """
    manifest = open_bundle(folder).manifest
    facts = manifest.perplexity
    if facts is None or facts.source is None:
        raise UsageError(
            f"{folder} has no perplexity of it and its source; run la-export perplexity"
        )
    named = [(text.text, text) for text in facts.texts] + [(ALL, facts.overall)]
    return [
        {
            "bundle": folder.name,
            "precision": manifest.precision,
            "text": name,
            "tokens": text.num_tokens,
            "perplexity": text.perplexity,
            "source": text.source_perplexity,
            "ratio": text.ratio,
        }
        for name, text in named
    ]


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
def main(bundles: tuple[Path, ...]) -> None:
    """Write the table of BUNDLES; run from the repository's root."""
    try:
        rows = [row for folder in bundles for row in rows_of(folder)]
    except LookaheadError as error:
        raise click.ClickException(str(error)) from error
    names = " ".join(str(folder) for folder in bundles)
    write_result(
        RESULT,
        command=f".venv/bin/python scripts/perplexity.py {names}",
        columns=COLUMNS,
        rows=rows,
        facts={"measured_by": "la-export perplexity BUNDLE [--tokens N]"},
    )


if __name__ == "__main__":
    main()
