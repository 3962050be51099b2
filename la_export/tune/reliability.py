"""Whether a proposal's probability says how often it is right: the paper's claim, in figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from la_export.tune.groups import NO_TARGET, every_anchor, pack_groups
from la_export.tune.library import TextLibrary
from la_export.tune.lookaheads import Lookaheads
from la_export.tune.passes import run_groups
from la_export.tune.texts import OwnText
from la_runtime.layout import GroupMask

__all__ = ["Proposals", "ReliabilityBin", "auroc", "collect_proposals", "reliability"]

_EDGES: Final = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposals:
    """What one slot proposed behind every prefix of some texts.

    Args:
        slot: from 1.
        probabilities: [prefixes] of its best token, over the whole vocabulary.
        right: [prefixes] whether the model chose that token.
    """

    slot: int
    probabilities: NDArray[np.float64]
    right: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Proposals of like probability.

    Args:
        low: of their probabilities.
        high: likewise.
        count: how many.
        mean_probability: of them.
        share_right: how often they were right.
    """

    low: float
    high: float
    count: int
    mean_probability: float
    share_right: float


@torch.no_grad()
def collect_proposals(
    model: PreTrainedModel,
    lookaheads: Lookaheads,
    texts: Sequence[OwnText],
    *,
    num_slots: int,
    group_mask: GroupMask,
) -> tuple[Proposals, ...]:
    """Best token of each slot behind every prefix of the answers.

    Args:
        model: prepared by `attention.use_tuning_attention`.
        lookaheads: of it.
        texts: prompts and the model's own greedy answers.
        num_slots: of a group.
        group_mask: what a slot sees of its group.
    """
    found: list[list[tuple[float, bool]]] = [[] for _ in range(num_slots)]
    head = model.get_output_embeddings()
    library = TextLibrary(model, texts, memory_bytes=0)
    for index, text in enumerate(texts):
        block = pack_groups([text], [every_anchor(text, num_slots)])
        hidden = run_groups(model, lookaheads, library.states([index]), block, group_mask)
        shares, tokens = torch.softmax(head(hidden[0]).float(), dim=-1).max(dim=-1)
        for slot, share, token, target in zip(
            block.slots[0], shares.tolist(), tokens.tolist(), block.targets[0], strict=True
        ):
            if target != NO_TARGET:
                found[slot].append((share, token == target))
    return tuple(
        Proposals(
            slot=slot,
            probabilities=np.array([share for share, _ in of_slot]),
            right=np.array([right for _, right in of_slot], bool),
        )
        for slot, of_slot in enumerate(found, 1)
    )


def reliability(proposals: Proposals) -> Iterator[ReliabilityBin]:
    """Proposals by ranges of their probability; ranges that none falls into are left out."""
    for low, high in pairwise(_EDGES):
        inside = (proposals.probabilities > low) & (proposals.probabilities <= high)
        if inside.any():
            yield ReliabilityBin(
                low=low,
                high=high,
                count=int(inside.sum()),
                mean_probability=float(proposals.probabilities[inside].mean()),
                share_right=float(proposals.right[inside].mean()),
            )


def auroc(scores: NDArray[np.float64], right: NDArray[np.bool_]) -> float | None:
    """How often something right has the higher score than something wrong; ties count half.

    None where there is only one of the two.

    Source:
        Mann and Whitney 1947, by ranks.
    """
    num_right, num_wrong = int(right.sum()), int((~right).sum())
    if not num_right or not num_wrong:
        return None
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = ends - (counts - 1) / 2  # from 1, the mean of those that are equal
    total = float(ranks[place][right].sum())
    return (total - num_right * (num_right + 1) / 2) / (num_right * num_wrong)
