"""How often slots are right on texts they were not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from la_export.tune.groups import NO_TARGET, GroupBlock, every_anchor, pack_groups
from la_export.tune.library import TextLibrary
from la_export.tune.texts import OwnText

__all__ = ["Acceptance", "Propose", "chain_tokens_per_pass", "measure", "spread_anchors"]

_TEXTS_AT_ONCE = 8

Anchors = list[tuple[int, int]]
Propose = Callable[[TextLibrary, Sequence[int], Sequence[Anchors]], NDArray[np.int64]]
"""[texts, rows] what slots of groups behind anchors of some texts propose, as packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Slots against the tokens that the model wrote itself.

    Args:
        right: [groups, slots] whether each slot was right; a slot behind the text's end was not.
        known: [groups, slots] whether there was a token to propose.
    """

    right: NDArray[np.bool_]
    known: NDArray[np.bool_]

    @property
    def by_slot(self) -> tuple[float, ...]:
        """Share of slots that were right, by slot."""
        counted = np.maximum(self.known.sum(axis=0), 1)
        return tuple(float(share) for share in self.right.sum(axis=0) / counted)

    @property
    def accepted(self) -> float:
        """Slots that were right before the first that was not, in the mean over groups."""
        return float(np.cumprod(self.right, axis=1).sum(axis=1).mean())


def measure(
    library: TextLibrary, anchors: Sequence[Anchors], num_slots: int, propose: Propose
) -> Acceptance:
    """Whole groups behind these anchors.

    Args:
        library: the texts.
        anchors: of each of its first texts, all with `num_slots`.
        num_slots: of a group.
        propose: gives what slots propose.
    """
    right, known = [], []
    for indices in _batches(len(anchors)):
        groups = [anchors[index] for index in indices]
        block = pack_groups([library.texts[index] for index in indices], groups)
        found = _right(propose(library, indices, groups), block)
        for row, of_text in enumerate(groups):
            size = len(of_text) * num_slots
            right.append(found[row, :size].reshape(-1, num_slots))
            known.append(block.targets[row, :size].reshape(-1, num_slots) != NO_TARGET)
    return Acceptance(right=np.concatenate(right), known=np.concatenate(known))


def spread_anchors(text: OwnText, num_slots: int, count: int) -> Anchors:
    """So many of a text's anchors, evenly spaced; all where it has no more."""
    anchors = every_anchor(text, num_slots)
    places = np.linspace(0, len(anchors) - 1, min(count, len(anchors))).round().astype(int)
    return [anchors[place] for place in places]


def chain_tokens_per_pass(
    library: TextLibrary, num_slots: int, propose: Propose
) -> tuple[float, int]:
    """Replays greedy decoding with chains of drafts, groups behind every prefix.

    Args:
        library: texts; their answers are decoded.
        num_slots: drafts of a chain, at most.
        propose: gives what slots propose.

    Returns:
        Tokens per pass, over all texts, and the number of passes.
    """
    tokens = passes = 0
    for indices in _batches(len(library)):
        groups = [every_anchor(library.texts[index], num_slots) for index in indices]
        block = pack_groups([library.texts[index] for index in indices], groups)
        right = _right(propose(library, indices, groups), block)
        for row, of_text in enumerate(groups):
            found = right[row, : len(of_text) * num_slots].reshape(-1, num_slots)
            accepted = np.cumprod(found, axis=1).sum(axis=1)  # [anchors]
            steps = list(_replay(accepted))
            tokens += sum(steps)
            passes += len(steps)
    return tokens / max(passes, 1), passes


def _right(proposed: NDArray[np.int64], block: GroupBlock) -> NDArray[np.bool_]:
    right: NDArray[np.bool_] = (proposed == block.targets) & (block.targets != NO_TARGET)
    return right


def _replay(accepted: NDArray[np.int64]) -> Iterator[int]:
    """Tokens of each pass behind the prefill, whose group stands behind the first anchor."""
    place = 0
    while place < len(accepted):
        step = int(accepted[place]) + 1
        yield step
        place += step


def _batches(count: int) -> Iterator[range]:
    bounds = [*range(0, count, _TEXTS_AT_ONCE), count]
    yield from (range(start, end) for start, end in pairwise(bounds))
