"""News of passes made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from la_runtime.block import Part
from la_runtime.drafting.news import PassNews
from la_runtime.errors import LookaheadError
from la_runtime.layout import DraftTree, Group, make_rows

__all__ = ["HandMadeScores", "make_news"]


class HandMadeScores:
    """Best tokens by row; asking for another row is an error, as where a processor fails."""

    def __init__(self, best: Mapping[int, Mapping[int, float]]) -> None:
        self._best = best

    def propose(self, row: int, after: Sequence[int]) -> int:
        if row not in self._best:
            raise LookaheadError(f"row {row} fails")
        return next(iter(self._best[row]))

    def top(self, row: int) -> tuple[list[int], list[float]]:
        return list(self._best[row]), list(self._best[row].values())


def make_news(
    token_ids: Sequence[int],
    *,
    root: int = 0,
    drafts: Sequence[int] = (),
    groups: Sequence[Group] = (),
    path: Sequence[int] = (),
    best: Mapping[int, Mapping[int, float]] | None = None,
    goes_on: bool = True,
) -> PassNews:
    """A pass over a root and a chain of drafts that emitted these tokens.

    Args:
        token_ids: emitted.
        root: token of the root.
        drafts: tokens of the chain.
        groups: of slots.
        path: accepted drafts.
        best: by row, its best tokens and their logits, best first.
        goes_on: see `PassNews`.
    """
    rows = make_rows(1, tuple(range(len(drafts))), tuple(groups))
    return PassNews(
        part=Part(rows=rows, token_ids=(root, *drafts), scored_from=0),
        drafts=DraftTree.chain(tuple(drafts)),
        scores=HandMadeScores(best or {row: {0: 0.0} for row in range(rows.num_rows)}),
        path=tuple(path),
        token_ids=tuple(token_ids),
        goes_on=goes_on,
    )
