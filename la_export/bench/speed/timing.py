"""Timing several things in turn, so that a machine whose speed drifts slows all of them.

Owns rounds, deadlines and what is left of the samples. It does not know what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import numpy as np

from la_export.bench.speed.record import Timing

__all__ = ["Clock", "Rounds", "Samples", "Work", "seconds_of", "summarize"]

Clock = Callable[[], float]
Work = Callable[[], float]
"""Does something once and returns the seconds that count."""

Key = TypeVar("Key", bound=Hashable)
_SEED: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """How often to time.

    Args:
        least: rounds to make in any case.
        most: rounds after which to stop.
        deadline: when to begin no further round beyond `least`; None for no limit.
        clock: what `deadline` is read from.
    """

    least: int
    most: int
    deadline: float | None = None
    clock: Clock = time.monotonic

    def goes_on(self, done: int) -> bool:
        """Whether another round is due after so many."""
        if done < self.least:
            return True
        return done < self.most and (self.deadline is None or self.clock() < self.deadline)


class Samples(Generic[Key]):
    """Seconds by what was timed. What was timed before an interruption stays."""

    def __init__(self) -> None:
        self._seconds: dict[Key, list[float]] = {}

    def add(self, key: Key, seconds: float) -> None:
        """Keep one more sample."""
        self._seconds.setdefault(key, []).append(seconds)

    def timing(self, key: Key) -> Timing | None:
        """What is known of this key; None if it was never timed."""
        found = self._seconds.get(key)
        return summarize(found) if found else None

    def time_in_turn(
        self,
        groups: Sequence[Mapping[Key, Work]],
        rounds: Rounds,
        *,
        report: Callable[[int, int], None],
    ) -> None:
        """Time every work of every group once a round, in an order drawn anew each time.

        Before each group its first work runs once untimed: the threads of whatever ran before
        spin for a while, and caches hold other weights.

        Args:
            groups: what shares a session, and is best timed without another one in between.
            rounds: how often.
            report: told the number of rounds done and the most there will be.
        """
        rng = np.random.default_rng(_SEED)
        done = 0
        while rounds.goes_on(done):
            for group in groups:
                works = list(group.items())
                if not works:
                    continue
                works[0][1]()
                for index in rng.permutation(len(works)):
                    key, work = works[index]
                    self.add(key, work())
            done += 1
            report(done, rounds.most)


def summarize(seconds: Sequence[float]) -> Timing:
    """Median and quartiles of at least one sample."""
    low, middle, high = np.percentile(seconds, (25, 50, 75))
    return Timing(
        median_ms=1000 * float(middle),
        low_ms=1000 * float(low),
        high_ms=1000 * float(high),
        samples=len(seconds),
    )


def seconds_of(call: Callable[[], object]) -> Work:
    """The whole of a call as work."""

    def work() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return work
