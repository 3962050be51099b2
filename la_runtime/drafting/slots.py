"""Drafts from lookahead slots: what the last pass proposed."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from la_runtime.drafting.candidates import Bigram, Candidates, grow
from la_runtime.drafting.news import PassNews
from la_runtime.drafting.rates import HitRate, make_rates
from la_runtime.errors import LookaheadError
from la_runtime.layout import StepRows

__all__ = ["SlotChain", "SlotTree", "proposing_rows"]


def proposing_rows(rows: StepRows, path: Sequence[int]) -> range:
    """Block rows of the slots that propose the tokens after the bonus token, nearest first.

    The group behind the last accepted node proposes with all its slots. When the layout has none
    there, the nearest group further up the path does, less the slots whose tokens are now known:
    slot (j, a-j+i) proposes the i-th token after the bonus token.

    Args:
        rows: the rows of the pass.
        path: the accepted drafts from the root down.
    """
    nodes = (0, *path)
    for passed, node in enumerate(reversed(nodes)):
        slots = rows.slot_rows(node)
        if slots:
            return slots[passed:]
    return range(0)


class SlotChain:
    """The best proposal of each slot, one behind the other: the paper's drafts."""

    def __init__(self) -> None:
        self._token_ids: tuple[int, ...] = ()

    def learn(self, news: PassNews) -> None:
        """Take over what the slots propose, up to the first that has nothing to say.

        A slot may fail (a grammar has ended, say) where the model, coming there, would have
        stopped.
        """
        after = list(news.token_ids)
        try:
            for row in _slots(news):
                after.append(news.scores.propose(row, after))
        except LookaheadError:
            pass
        self._token_ids = tuple(after[len(news.token_ids) :])

    def propose(self) -> Candidates:
        """The chain; all of it counts as certain."""
        token_ids = self._token_ids
        return Candidates(
            token_ids=token_ids,
            parents=tuple(range(len(token_ids))),
            chances=(1.0,) * len(token_ids),
        )


_MOST_CANDIDATES: Final = 32
_LEAST_CHANCE: Final = 0.01
# Upper ends of the ranges of probability whose proposals share a rate.
_RANGES: Final = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
# Share of its probability that a proposal is worth until something was seen.
_FIRST_GUESS: Final = 0.4

_Proposals: TypeAlias = list[tuple[int, HitRate]]


class SlotTree:
    """The likely proposals of each slot, in a tree.

    A slot's probabilities are those among its best tokens. How often a proposal of such a
    probability came true, slot by slot, is what it is taken to be worth: the slots of an untuned
    model are sure of things that do not happen.

    Args:
        num_slots: most slots of a group.
    """

    def __init__(self, num_slots: int) -> None:
        middles = [
            (low + high) / 2 for low, high in zip((0.0, *_RANGES), (*_RANGES, 1.0), strict=True)
        ]
        self._rates = [
            make_rates([_FIRST_GUESS * middle for middle in middles]) for _ in range(num_slots)
        ]
        self._proposals: list[_Proposals] = []

    def learn(self, news: PassNews) -> None:
        """See which proposals came true, then take over what the slots of this pass say."""
        for proposals, token_id in zip(self._proposals, news.token_ids, strict=False):
            for proposed, rate in proposals:
                rate.count(hit=proposed == token_id)
        slot_index = news.part.rows.slot_index
        self._proposals = [
            _weigh(news.scores.top(row), self._rates[slot_index[row] - 1]) for row in _slots(news)
        ]

    def propose(self) -> Candidates:
        """The likeliest paths, a token of each slot in turn."""
        return grow(self._children, root=(0, 0), most=_MOST_CANDIDATES, least_chance=_LEAST_CHANCE)

    def _children(self, depth: int, tokens: Bigram) -> Iterator[tuple[int, float]]:
        if depth <= len(self._proposals):
            for proposed, rate in self._proposals[depth - 1]:
                yield proposed, rate.value


def _slots(news: PassNews) -> range:
    return proposing_rows(news.part.rows, news.path) if news.goes_on else range(0)


def _weigh(top: tuple[list[int], list[float]], rates: Sequence[HitRate]) -> _Proposals:
    """A slot's best tokens, each with the rate of its probability among them."""
    token_ids, logits = top
    if not all(map(math.isfinite, logits)):
        return []  # what no choice depends on can break none
    weights = [math.exp(logit - logits[0]) for logit in logits]
    total = sum(weights)
    return [
        (token_id, rates[bisect_right(_RANGES, weight / total)])
        for token_id, weight in zip(token_ids, weights, strict=True)
    ]
