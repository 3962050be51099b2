"""Measure how far int8 is from PyTorch's int8, and PyTorch's from itself when its input is nudged.

    .venv/bin/python scripts/int8.py engines/smollm2-135m-int8

An activation that is one step of float32 off can round to another integer. So two implementations
of the same rule drift apart, and so does one from itself when its embeddings are off by a
millionth. Reads the verification's prompts and its texts of tokens at random. Writes
docs/results/int8.json, which the bounds of `la_export.verify.tolerance` refer to.
"""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from la_export.bench.results import Cell, Column, write_result
from la_export.verify.ladder import FULL, Ladder
from la_export.verify.passes import read_text
from la_export.verify.rungs.logits import _divergence, _unread_tokens
from la_export.verify.source_model import open_source
from la_runtime.backends import open_backend
from la_runtime.bundle import open_bundle

WIDTH = 16
GRAPH, NUDGED = "the graph", "PyTorch, nudged"
COLUMNS = [
    Column(key="texts", title="Texts"),
    Column(key="compared", title="Compared with PyTorch"),
    Column(key="positions", title="Positions"),
    Column(key="largest", title="Largest difference, of the range", digits=3),
    Column(key="median", title="Median of the positions' largest", digits=3),
    Column(key="kl", title="Largest KL", digits=3),
    Column(key="other_best", title="Another best token, %", digits=1),
    Column(key="margin", title="by at most", digits=2),
]


class Differences:
    """What was seen between two readings of texts, position by position."""

    def __init__(self) -> None:
        self.shares: list[float] = []
        self.divergences: list[float] = []
        self.margins: list[float] = []

    def add(self, found: NDArray[np.float32], truth: NDArray[np.float32]) -> None:
        """Compare [tokens, vocab_size] of a text."""
        self.shares += (np.abs(found - truth).max(axis=-1) / np.ptp(truth)).tolist()
        self.divergences += _divergence(truth, found).tolist()
        rows = np.arange(len(truth))
        best = found.argmax(axis=-1)
        self.margins += (truth.max(axis=-1) - truth[rows, best]).tolist()

    def row(self, texts: str, compared: str) -> dict[str, Cell]:
        """A row of the table."""
        others = [margin for margin in self.margins if margin > 0]
        return {
            "texts": texts,
            "compared": compared,
            "positions": len(self.shares),
            "largest": max(self.shares),
            "median": float(np.median(self.shares)),
            "kl": max(self.divergences),
            "other_best": 100 * len(others) / len(self.margins),
            "margin": max(others, default=0.0),
        }


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--texts", type=int, default=16, show_default=True, help="Of each kind, at most.")
@click.option("--seeds", type=int, default=4, show_default=True, help="Nudges of each text.")
@click.option("--threads", type=int, default=1, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/results/int8.json"))
def main(bundle: Path, model: str, texts: int, seeds: int, threads: int, out: Path) -> None:
    """Compare the graph with PyTorch, and PyTorch with itself."""
    opened = open_bundle(bundle)
    source = open_source(opened, model, threads=threads)
    rows = []
    with closing(open_backend("ort-cpu", opened, threads=threads)) as backend:
        ladder = Ladder(opened, backend, source=source, settings=FULL)
        kinds = {
            "prompts": [prompt.token_ids for prompt in ladder.prompts[:texts]],
            "tokens at random": list(islice(_unread_tokens(ladder), texts)),
        }
        for kind, all_ids in kinds.items():
            found = {GRAPH: Differences(), NUDGED: Differences()}
            for number, token_ids in enumerate(all_ids):
                truth = ladder.reference.scores(token_ids)
                ours = read_text(backend, token_ids, width=WIDTH, context=ladder.context)
                found[GRAPH].add(ours, truth)
                for seed in range(seeds):
                    nudged = ladder.reference.nudged_scores(token_ids, seed=seed)
                    found[NUDGED].add(nudged, truth)
                click.echo(f"{kind} {number + 1} of {len(all_ids)}", err=True)
            rows += [differences.row(kind, name) for name, differences in found.items()]
            click.echo(rows[-2:], err=True)
    write_result(
        out,
        command=f".venv/bin/python scripts/int8.py {bundle} --texts {texts} --seeds {seeds}",
        columns=COLUMNS,
        rows=rows,
        facts={"nudge": "each embedding by a millionth of itself, at random"},
    )


if __name__ == "__main__":
    main()
