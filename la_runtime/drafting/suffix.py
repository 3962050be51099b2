"""Drafts copied from the text itself: what followed earlier occurrences of its last tokens.

Long copies are what summaries, answers from documents and edits of code are made of. The idea is
that of prompt lookup decoding (Saxena, 2023); here the output is looked through as well, and how
far a copy is trusted follows from how long a match it continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from la_runtime.drafting.candidates import Candidates
from la_runtime.drafting.news import PassNews
from la_runtime.drafting.rates import make_rates

__all__ = ["SuffixSource"]

# Tokens of the longest n-gram that is looked up; a match is then followed further back.
_LONGEST_GRAM: Final = 4
_LONGEST_MATCH: Final = 32
_LONGEST_COPY: Final = 16
_LEAST_CHANCE: Final = 0.02
# The least lengths of a match that share a rate, and how often the next token was right at each,
# over the benchmark's answers.
_MATCHES: Final = (1, 2, 3, 4, 6, 9, 14)
_GUESSES: Final = (0.20, 0.45, 0.60, 0.70, 0.80, 0.87, 0.93)


def _rate_index(match: int) -> int:
    return max(index for index, least in enumerate(_MATCHES) if match >= least)


_RATE_OF_MATCH: Final = (0, *map(_rate_index, range(1, _LONGEST_MATCH + _LONGEST_COPY + 1)))


@dataclass(slots=True)
class _Copy:
    """Tokens from `start` on may come next: the `match` tokens before them are the last ones."""

    start: int
    match: int


class SuffixSource:
    """Copies behind the longest matches of a sequence's last tokens.

    It keeps the sequence's tokens and, per token, at most four positions.

    Args:
        prompt: the tokens the sequence begins with.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._token_ids: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}
        self._copies: list[_Copy] = []
        self._rates = make_rates(_GUESSES)
        for token_id in prompt:
            self._append(token_id)

    def learn(self, news: PassNews) -> None:
        """Read what was emitted, and see how the last copies fared."""
        for token_id in news.token_ids:
            self._judge(token_id)
            self._append(token_id)

    def _judge(self, token_id: int) -> None:
        """Count the copies that foretold a token, and drop those that did not."""
        standing = []
        for copy in self._copies:
            is_hit = self._token_ids[copy.start] == token_id
            self._rates[_RATE_OF_MATCH[copy.match]].count(hit=is_hit)
            if is_hit and copy.match < len(_RATE_OF_MATCH) - 1:
                standing.append(_Copy(copy.start + 1, copy.match + 1))
        self._copies = standing

    def _append(self, token_id: int) -> None:
        """Remember where the last n-grams go on, and the token."""
        token_ids, latest = self._token_ids, self._latest
        place = len(token_ids)
        for size in range(1, min(_LONGEST_GRAM, place) + 1):
            latest[tuple(token_ids[place - size :])] = place
        token_ids.append(token_id)

    def propose(self) -> Candidates:
        """What followed the latest occurrences of the last n-grams, each size of them."""
        self._copies = self._find_copies()
        token_ids: list[int] = []
        parents: list[int] = []
        chances: list[float] = []
        edges: dict[tuple[int, int], int] = {}
        for copy in self._copies:
            node, chance = 0, 1.0
            for place in range(copy.start, min(copy.start + _LONGEST_COPY, len(self._token_ids))):
                match = copy.match + place - copy.start
                chance *= self._rates[_RATE_OF_MATCH[match]].value
                if chance < _LEAST_CHANCE:
                    break
                edge = (node, self._token_ids[place])
                node = edges.get(edge, 0)
                if node:  # a longer match has said so
                    chance = min(chance, chances[node - 1])
                    continue
                token_ids.append(edge[1])
                parents.append(edge[0])
                chances.append(chance)
                node = edges[edge] = len(token_ids)
        return Candidates(
            token_ids=tuple(token_ids), parents=tuple(parents), chances=tuple(chances)
        )

    def _find_copies(self) -> list[_Copy]:
        """Where to copy from, the longest match first."""
        token_ids = self._token_ids
        copies: list[_Copy] = []
        for size in range(min(_LONGEST_GRAM, len(token_ids)), 0, -1):
            start = self._latest.get(tuple(token_ids[-size:]))
            if start is None or any(copy.start == start for copy in copies):
                continue
            match = size
            while (
                match < _LONGEST_MATCH
                and match < start
                and token_ids[start - 1 - match] == token_ids[-1 - match]
            ):
                match += 1
            copies.append(_Copy(start, match))
        return copies
