"""How often something came true, of late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["HitRate", "make_rates"]

# Trials that a first guess counts as, and after how many older ones have lost most of their weight.
_GUESS_WEIGHT: Final = 8.0
_MEMORY: Final = 200.0


class HitRate:
    """A share of hits that begins at a guess and forgets slowly.

    Args:
        guess: what to say before anything was seen, in (0, 1).
    """

    __slots__ = ("_hits", "_trials", "value")

    def __init__(self, guess: float) -> None:
        self._hits = guess * _GUESS_WEIGHT
        self._trials = _GUESS_WEIGHT
        self.value = guess

    def count(self, *, hit: bool) -> None:
        """One more trial."""
        self._hits += hit
        self._trials += 1.0
        if self._trials > _MEMORY:
            shrunk = _MEMORY / self._trials
            self._hits *= shrunk
            self._trials = _MEMORY
        self.value = self._hits / self._trials


def make_rates(guesses: Sequence[float]) -> tuple[HitRate, ...]:
    """One rate per guess."""
    return tuple(map(HitRate, guesses))
