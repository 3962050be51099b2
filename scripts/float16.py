"""Measure how far float16 is from float32 arithmetic on the same rounded weights: ours, PyTorch's.

    .venv/bin/python scripts/float16.py engines/smollm2-135m-fp16

Reads the verification's texts of tokens at random. Writes docs/results/float16.json, which the
bounds of `la_export.verify.tolerance` refer to.
"""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from pathlib import Path

import click
import numpy as np
import torch

from la_export.bench.results import Column, write_result
from la_export.checkpoint import find_model, load_checkpoint
from la_export.options import Precision
from la_export.reference import TorchReference
from la_export.verify.ladder import FULL, Ladder
from la_export.verify.passes import read_text
from la_export.verify.rungs.logits import _unread_tokens
from la_runtime.backends import open_backend
from la_runtime.bundle import open_bundle

WIDTH = 16
COLUMNS = [
    Column(key="text", title="Text"),
    Column(key="torch", title="PyTorch's float16", digits=5),
    Column(key="graph", title="The graph's float16", digits=5),
]


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--texts", type=int, default=16, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/results/float16.json"))
def main(bundle: Path, model: str, texts: int, out: Path) -> None:
    """Compare both with float32, as shares of the logits' range."""
    source = find_model(model, revision=None, allow_bin=False)
    checkpoint = load_checkpoint(source, context=None)
    halves = checkpoint.load_model().to(torch.float16)
    reference = TorchReference.load(model, precision=Precision.FP16)
    opened = open_bundle(bundle)
    rows = []
    with closing(open_backend("ort-cpu", opened, threads=1)) as backend:
        ladder = Ladder(opened, backend, source=None, settings=FULL)
        for number, token_ids in enumerate(islice(_unread_tokens(ladder), texts)):
            truth = reference.scores(token_ids)
            with torch.no_grad():
                found = halves(torch.tensor([token_ids])).logits[0].float().numpy()
            ours = read_text(backend, token_ids, width=WIDTH, context=ladder.context)
            span = float(np.ptp(truth))
            rows.append(
                {
                    "text": number,
                    "torch": float(np.abs(found - truth).max()) / span,
                    "graph": float(np.abs(ours - truth).max()) / span,
                }
            )
            click.echo(", ".join(f"{key} {value}" for key, value in rows[-1].items()), err=True)
    write_result(
        out,
        command=f".venv/bin/python scripts/float16.py {bundle}",
        columns=COLUMNS,
        rows=rows,
        facts={
            "largest_torch": max(row["torch"] for row in rows),
            "largest_graph": max(row["graph"] for row in rows),
        },
    )


if __name__ == "__main__":
    main()
