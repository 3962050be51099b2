"""Drafts from lookahead slots: what the last pass proposed."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final, TypeAlias

from la_runtime.drafting.candidates import Bigram, Candidates, grow
from la_runtime.drafting.news import PassNews
from la_runtime.drafting.rates import HitRate, make_rates
from la_runtime.drafting.successors import Successors
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


class _Standing(IntEnum):
    """What is known of a proposal from lists of what followed the tokens before it."""

    NO_LIST = 0
    FIRST_OF_TWO = 1
    LISTED_OF_TWO = 2
    NOT_LISTED_OF_TWO = 3
    LISTED_OF_ONE = 4
    NOT_LISTED_OF_ONE = 5


# Share of its probability that a proposal is worth until something was seen, by its standing.
# Starting values, learnt over: of lookaheads that nobody taught, and of tuned ones.
_FIRST_GUESSES: Final = {
    _Standing.NO_LIST: 0.4,
    _Standing.FIRST_OF_TWO: 0.9,
    _Standing.LISTED_OF_TWO: 0.4,
    _Standing.NOT_LISTED_OF_TWO: 0.2,
    _Standing.LISTED_OF_ONE: 0.7,
    _Standing.NOT_LISTED_OF_ONE: 0.3,
}

_FIRST_GUESSES_TUNED: Final = {
    _Standing.NO_LIST: 0.9,
    _Standing.FIRST_OF_TWO: 1.0,
    _Standing.LISTED_OF_TWO: 0.8,
    _Standing.NOT_LISTED_OF_TWO: 0.5,
    _Standing.LISTED_OF_ONE: 1.0,
    _Standing.NOT_LISTED_OF_ONE: 0.7,
}

_Proposals: TypeAlias = list[tuple[int, int]]
"""Tokens, each with the range of its probability."""


class SlotTree:
    """The likely proposals of each slot, in a tree.

    A slot's probabilities are those among its best tokens. How often a proposal of such a
    probability came true, slot by slot, is what it is taken to be worth: the slots of an untuned
    model are sure of things that do not happen.

    A slot proposes without knowing the tokens right before its own: not the bonus token, nor what
    the slots before it propose. Where it is known what followed those tokens elsewhere, proposals
    that did and proposals that did not are counted apart.

    Args:
        num_slots: most slots of a group.
        root: the last two tokens of the sequence; its only one twice.
        successors: what followed tokens elsewhere; somebody else keeps it up, behind this source.
        is_tuned: whether the lookaheads were taught, so that their probabilities mean something.
    """

    def __init__(
        self,
        num_slots: int,
        root: Bigram = (0, 0),
        successors: Successors | None = None,
        *,
        is_tuned: bool = False,
    ) -> None:
        guesses = _FIRST_GUESSES_TUNED if is_tuned else _FIRST_GUESSES
        middles = [
            (low + high) / 2 for low, high in zip((0.0, *_RANGES), (*_RANGES, 1.0), strict=True)
        ]
        self._rates = [
            [make_rates([guesses[standing] * middle for middle in middles])
             for standing in _Standing]
            for _ in range(num_slots)
        ]  # fmt: skip
        self._root = root
        self._successors = Successors() if successors is None else successors
        self._proposals: list[tuple[int, _Proposals]] = []  # of a slot of the group, from 0

    def learn(self, news: PassNews) -> None:
        """See which proposals came true, then take over what the slots of this pass say."""
        for depth, token_id in enumerate(news.token_ids):
            if depth < len(self._proposals):
                for proposed, rate in self._rated(depth, self._root):
                    rate.count(hit=proposed == token_id)
            self._root = (self._root[1], token_id)
        slot_index = news.part.rows.slot_index
        self._proposals = [
            (int(slot_index[row]) - 1, _weigh(news.scores.top(row))) for row in _slots(news)
        ]

    def propose(self) -> Candidates:
        """The likeliest paths, a token of each slot in turn."""
        return grow(
            self._children, root=self._root, most=_MOST_CANDIDATES, least_chance=_LEAST_CHANCE
        )

    def _children(self, depth: int, tokens: Bigram) -> Iterator[tuple[int, float]]:
        if depth <= len(self._proposals):
            for proposed, rate in self._rated(depth - 1, tokens):
                yield proposed, rate.value

    def _rated(self, place: int, before: Bigram) -> Iterator[tuple[int, HitRate]]:
        """What a slot proposes behind two tokens, with the rate that it shares with its like."""
        slot, proposals = self._proposals[place]
        rates = self._rates[slot]
        of_two, of_one = self._successors.of_two(before), self._successors.of_one(before[1])
        for token_id, probability in proposals:
            yield token_id, rates[_stand(token_id, of_two, of_one)][probability]


def _stand(token_id: int, of_two: Sequence[int] | None, of_one: Sequence[int] | None) -> _Standing:
    if of_two is not None:
        if token_id == of_two[0]:
            return _Standing.FIRST_OF_TWO
        is_listed = token_id in of_two
        return _Standing.LISTED_OF_TWO if is_listed else _Standing.NOT_LISTED_OF_TWO
    if of_one is not None:
        is_listed = token_id in of_one
        return _Standing.LISTED_OF_ONE if is_listed else _Standing.NOT_LISTED_OF_ONE
    return _Standing.NO_LIST


def _slots(news: PassNews) -> range:
    return proposing_rows(news.part.rows, news.path) if news.goes_on else range(0)


def _weigh(top: tuple[list[int], list[float]]) -> _Proposals:
    """A slot's best tokens, each with the range of its probability among them."""
    token_ids, logits = top
    if not all(map(math.isfinite, logits)):
        return []  # what no choice depends on can break none
    weights = [math.exp(logit - logits[0]) for logit in logits]
    total = sum(weights)
    return [
        (token_id, bisect_right(_RANGES, weight / total))
        for token_id, weight in zip(token_ids, weights, strict=True)
    ]
