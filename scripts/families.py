"""Build every family with small random weights in every precision, and decode it.

    .venv/bin/python scripts/families.py

A cell says `yes` where the bundle was built, passed the checks against PyTorch, and gave the
same tokens with lookaheads as without, in float32 those of PyTorch; where it was refused, with what
words. Writes docs/results/families.json.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Final

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from la_export.bench.results import Column, write_result
from la_export.options import BuildOptions, Precision
from la_export.pipeline import NO_PLANS, build
from la_export.plan import PlanOptions, Target
from la_export.reference import TorchReference
from la_runtime import Engine
from la_runtime.errors import LookaheadError
from tests.tiny_models import FAMILIES, OTHER_FAMILIES, make_tiny_checkpoint

K: Final = 4
NUM_TOKENS: Final = 24
PROMPT: Final = (5, 17, 90, 201, 33, 8, 121, 64, 9, 250, 77, 12)
PRECISIONS: Final = (Precision.FP32, Precision.FP16, Precision.INT8, Precision.INT4)
PLANNED: Final = (Precision.FP32, Precision.FP16)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/results/families.json"))
@click.option("--family", "only", multiple=True, help="Of these alone; of all when not given.")
def main(out: Path, only: tuple[str, ...]) -> None:
    """One row for each family."""
    rows = []
    for family in only or sorted((*FAMILIES, *OTHER_FAMILIES)):
        row: dict[str, str] = {"family": family}
        with tempfile.TemporaryDirectory() as scratch:
            checkpoint = make_tiny_checkpoint(Path(scratch) / "checkpoint", family)
            for precision in PRECISIONS:
                row[precision.value] = decode(checkpoint, precision)
            for precision in PLANNED:
                row[f"rtx_{precision.value}"] = plan(checkpoint, precision)
        rows.append(row)
        click.echo(", ".join(f"{key} {value}" for key, value in row.items()), err=True)
    columns = [Column(key="family", title="Family")]
    columns += [Column(key=p.value, title=f"{p.value} on ONNX Runtime") for p in PRECISIONS]
    columns += [Column(key=f"rtx_{p.value}", title=f"{p.value} plan for RTX") for p in PLANNED]
    command = ".venv/bin/python scripts/families.py"
    write_result(out, command=command, columns=columns, rows=rows, facts={"k": K})


def options_of(checkpoint: Path, precision: Precision, folder: Path) -> BuildOptions:
    """A bundle of the one lookahead length."""
    return BuildOptions(
        model=str(checkpoint),
        lookahead_lengths=(K,),
        precision=precision,
        out=folder / "bundle",
    )


def decode(checkpoint: Path, precision: Precision) -> str:
    """Build for ONNX Runtime, decode with and without lookaheads."""
    with tempfile.TemporaryDirectory() as scratch:
        options = options_of(checkpoint, precision, Path(scratch))
        try:
            bundle = build(options, plans=NO_PLANS).bundle
        except LookaheadError as error:
            return f"no: {error}"
        with Engine.open(bundle, threads=1) as engine:
            found = [
                list(
                    engine.generate(
                        list(PROMPT), k=k, max_new_tokens=NUM_TOKENS, ignore_eos=True
                    ).token_ids
                )
                for k in (0, K)
            ]
    if precision is Precision.FP32:
        reference = TorchReference.load(str(checkpoint))
        found.append(reference.generate_greedy(PROMPT, NUM_TOKENS, ()))
    return "yes" if all(tokens == found[0] for tokens in found) else "no: other tokens"


def plan(checkpoint: Path, precision: Precision) -> str:
    """Build with a plan of TensorRT for RTX."""
    with tempfile.TemporaryDirectory() as scratch:
        options = options_of(checkpoint, precision, Path(scratch))
        try:
            build(options, plans=PlanOptions(target=Target.TRT_RTX))
        except LookaheadError as error:
            return f"no: {error}"
    return "yes"


if __name__ == "__main__":
    main()
