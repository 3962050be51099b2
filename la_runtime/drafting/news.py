"""What a pass tells the sources of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from la_runtime.block import Part
from la_runtime.layout import DraftTree

__all__ = ["PassNews", "ReadableScores"]


class ReadableScores(Protocol):
    """Scores of one sequence's scored rows, addressed by block row."""

    def propose(self, row: int, after: Sequence[int]) -> int:
        """The token that the request would choose after a row, had the sequence these tokens."""
        ...

    def top(self, row: int) -> tuple[list[int], list[float]]:
        """The best tokens after a row and their logits, best first; no filter is applied."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PassNews:
    """One pass of one sequence, valid until the next pass.

    Args:
        part: the sequence's part of the block.
        drafts: what it verified.
        scores: of its rows.
        path: the accepted drafts.
        token_ids: what the pass emitted: the tokens on the path and the bonus token, or fewer.
        goes_on: whether there may be tokens behind them, so that slots have something to propose.
    """

    part: Part
    drafts: DraftTree
    scores: ReadableScores
    path: tuple[int, ...]
    token_ids: tuple[int, ...]
    goes_on: bool
