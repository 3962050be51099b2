"""Measure whether a proposal's probability says how often it is right, slot by slot.

    .venv/bin/python scripts/reliability.py engines/smollm2-135m-fp32 \
        engines/smollm2-135m-fp32-untuned

The texts are the benchmark's prompts with the model's own greedy answers; slots stand behind every
prefix of an answer and are computed in PyTorch. Writes docs/results/reliability.json (ranges of
probability) and docs/results/auroc.json (a row for each slot).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch

from la_export.bench.results import Column, write_result
from la_export.bench.speed.questions import load_questions
from la_export.lookahead import read_lookaheads
from la_export.tune.attention import use_tuning_attention
from la_export.tune.lookaheads import Lookaheads
from la_export.tune.reliability import Proposals, auroc, collect_proposals, reliability
from la_export.tune.texts import OwnText
from la_export.verify.source_model import open_checkpoint
from la_runtime.generation import Engine

BIN_COLUMNS = [
    Column(key="lookaheads", title="Lookaheads"),
    Column(key="slot", title="Slot"),
    Column(key="range", title="Probability"),
    Column(key="count", title="Proposals"),
    Column(key="mean_probability", title="Mean probability", digits=3),
    Column(key="share_right", title="Share right", digits=3),
]
AUROC_COLUMNS = [
    Column(key="lookaheads", title="Lookaheads"),
    Column(key="slot", title="Slot"),
    Column(key="count", title="Proposals"),
    Column(key="share_right", title="Share right", digits=3),
    Column(key="mean_probability", title="Mean probability", digits=3),
    Column(key="auroc", title="AUROC", digits=3),
]


@click.command()
@click.argument("bundles", type=click.Path(path_type=Path, exists=True), nargs=-1, required=True)
@click.option("--slots", type=int, default=8, show_default=True)
@click.option("--per-category", type=int, default=2, show_default=True)
@click.option("--new-tokens", type=int, default=128, show_default=True)
@click.option("--longest", type=int, default=500, show_default=True, help="Prompt tokens.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/results"))
def main(
    bundles: tuple[Path, ...],
    slots: int,
    per_category: int,
    new_tokens: int,
    longest: int,
    out: Path,
) -> None:
    """Make both tables and write them."""
    bins: list[dict[str, Any]] = []
    curves: list[dict[str, Any]] = []
    for bundle in bundles:
        for proposals, origin in _collect(bundle, slots, per_category, new_tokens, longest):
            bins += [
                {
                    "lookaheads": origin,
                    "slot": proposals.slot,
                    "range": f"{one.low:g} to {one.high:g}",
                    "count": one.count,
                    "mean_probability": one.mean_probability,
                    "share_right": one.share_right,
                }
                for one in reliability(proposals)
            ]
            curves.append(
                {
                    "lookaheads": origin,
                    "slot": proposals.slot,
                    "count": len(proposals.right),
                    "share_right": float(proposals.right.mean()),
                    "mean_probability": float(proposals.probabilities.mean()),
                    "auroc": auroc(proposals.probabilities, proposals.right),
                }
            )
            click.echo(", ".join(f"{n} {v}" for n, v in curves[-1].items()), err=True)
    command = " ".join([".venv/bin/python scripts/reliability.py", *map(str, bundles)])
    facts = {"per_category": per_category, "new_tokens": new_tokens, "longest_prompt": longest}
    write_result(
        out / "reliability.json", command=command, columns=BIN_COLUMNS, rows=bins, facts=facts
    )
    write_result(
        out / "auroc.json", command=command, columns=AUROC_COLUMNS, rows=curves, facts=facts
    )


def _collect(
    bundle: Path, slots: int, per_category: int, new_tokens: int, longest: int
) -> list[tuple[Proposals, str]]:
    with Engine.open(bundle) as engine:
        picked = load_questions(None, per_category=per_category, fits=lambda _: True)
        prompts = [engine.encode(prompt.text, chat=True) for prompt in picked]
        texts = []
        for prompt in prompts:
            if len(prompt) <= longest:
                answer = engine.generate(prompt, k=0, max_new_tokens=new_tokens).token_ids
                texts.append(OwnText(token_ids=(*prompt, *answer), answered_from=len(prompt)))
        opened = engine.bundle
    weights = read_lookaheads(opened.path(opened.manifest.lookahead.path))
    checkpoint = open_checkpoint(opened.manifest, None, otherwise="nothing can be measured")
    model = checkpoint.load_model()
    model.requires_grad_(False)
    use_tuning_attention(model)
    found = collect_proposals(
        model,
        Lookaheads.of_weights(weights.vectors, weights.adapter),
        texts,
        num_slots=min(slots, len(weights.vectors)),
        group_mask=weights.group_mask,
    )
    return [(proposals, weights.origin) for proposals in found]


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
