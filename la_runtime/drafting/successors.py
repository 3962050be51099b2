"""Drafts recycled from rows the model has computed: what it thought likely behind its tokens.

Every verified row, accepted or not, says which tokens the model finds likely behind the row's
token. The latest such list is kept for the token, and for the token with the one before it, which
is right far more often. A tree of them stands behind the root. The idea is that of Token Recycling
(Luo et al., 2024), which keeps lists for single tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

from la_runtime.drafting.candidates import Bigram, Candidates, grow
from la_runtime.drafting.news import PassNews
from la_runtime.drafting.rates import HitRate, make_rates

__all__ = ["RecycledSource", "Successors"]

_MOST_CANDIDATES: Final = 32
_LEAST_CHANCE: Final = 0.01
_MOST_LISTS: Final = 8192
# How often the token of each rank came next over the benchmark's answers: where two tokens were
# known, and where one was.
_GUESSES_OF_TWO: Final = (0.75, 0.07, 0.04, 0.02, 0.01, 0.01, 0.005, 0.005)
_GUESSES_OF_ONE: Final = (0.22, 0.09, 0.055, 0.03, 0.02, 0.015, 0.015, 0.01)


class Successors:
    """The latest lists of what the model found likely behind a token, and behind two.

    It keeps at most 8,192 lists of eight token ids of either kind, the latest.
    """

    def __init__(self) -> None:
        self._of_one: dict[int, tuple[int, ...]] = {}
        self._of_two: dict[Bigram, tuple[int, ...]] = {}

    def learn(self, news: PassNews, before: Bigram) -> None:
        """Take over what the verified rows of a pass say.

        Args:
            news: of the pass.
            before: the last two tokens of the sequence before it.
        """
        tree, part = news.drafts, news.part
        read = [before]  # per node of the tree, its parent's token and its own
        for parent, token_id in zip(tree.parents, tree.token_ids, strict=True):
            read.append((read[parent][1], token_id))
        for node, tokens in enumerate(read):
            top_ids, _ = news.scores.top(part.rows.row(node))
            successors = tuple(top_ids[: len(_GUESSES_OF_ONE)])
            _remember(self._of_one, tokens[1], successors)
            _remember(self._of_two, tokens, successors)

    def of_two(self, tokens: Bigram) -> tuple[int, ...] | None:
        """Behind two tokens, best first; None where they were never verified."""
        return self._of_two.get(tokens)

    def of_one(self, token_id: int) -> tuple[int, ...] | None:
        """Behind a token, likewise."""
        return self._of_one.get(token_id)


class RecycledSource:
    """A tree of the likely successors of tokens.

    Args:
        root: the last two tokens of the sequence; its only one twice.
        successors: lists that it keeps up; others may read them.
    """

    def __init__(self, root: Bigram, successors: Successors | None = None) -> None:
        self._root = root
        self._successors = Successors() if successors is None else successors
        self._rates_of_one = make_rates(_GUESSES_OF_ONE)
        self._rates_of_two = make_rates(_GUESSES_OF_TWO)

    def learn(self, news: PassNews) -> None:
        """See which successors came, then take over what the rows say."""
        before = self._root
        for token_id in news.token_ids:
            for successor, rate in zip(*self._find(self._root), strict=False):
                rate.count(hit=successor == token_id)
            self._root = (self._root[1], token_id)
        self._successors.learn(news, before)

    def propose(self) -> Candidates:
        """The likeliest paths through the successors."""
        return grow(
            self._children, root=self._root, most=_MOST_CANDIDATES, least_chance=_LEAST_CHANCE
        )

    def _children(self, depth: int, tokens: Bigram) -> Iterator[tuple[int, float]]:
        for successor, rate in zip(*self._find(tokens), strict=False):
            yield successor, rate.value

    def _find(self, tokens: Bigram) -> tuple[Sequence[int], Sequence[HitRate]]:
        """What is known to follow, and how often each rank of such a list is right."""
        found = self._successors.of_two(tokens)
        if found is not None:
            return found, self._rates_of_two
        return self._successors.of_one(tokens[1]) or (), self._rates_of_one


_Key = TypeVar("_Key")


def _remember(lists: dict[_Key, tuple[int, ...]], key: _Key, found: tuple[int, ...]) -> None:
    """Keep a list as the latest; the one kept longest goes when there are too many."""
    lists.pop(key, None)
    if len(lists) == _MOST_LISTS:
        lists.pop(next(iter(lists)))
    lists[key] = found
