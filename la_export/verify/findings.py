"""What a rung of the ladder finds: figures against bounds, and whatever differed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

__all__ = ["Figure", "Finding", "RungResult", "Status", "Suspect", "join_problems", "join_results"]

_SHOWN_PROBLEMS: Final = 3


class Status(StrEnum):
    """How a rung ended.

    ``skipped``: it has no meaning for this reference or bundle, and the detail says why.
    ``could_not_run``: it broke off, so that nothing is known.
    """

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    COULD_NOT_RUN = "could_not_run"


# Of several endings of one rung the last in this list counts.
_GRAVITY: Final = (Status.SKIPPED, Status.PASSED, Status.COULD_NOT_RUN, Status.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured value.

    Args:
        name: what was measured.
        value: how much.
        bound: the largest value that passes; None when it is only reported.
    """

    name: str
    value: float
    bound: float | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the bound is kept; NaN keeps none."""
        return self.bound is None or self.value <= self.bound

    def __str__(self) -> str:
        shown = f"{self.name} {self.value:.3g}"
        return shown if self.bound is None else f"{shown} (at most {self.bound:.3g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A text whose logits differ from the reference's.

    Args:
        token_ids: the text.
        position_ids: where its tokens stand; 0, 1, 2, ... when empty.
    """

    token_ids: tuple[int, ...]
    position_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a rung reports.

    Args:
        figures: what was measured.
        problems: what differed, one line each, the first ones first; any fails the rung.
        detail: what was compared, in a line.
        skipped: why nothing was; empty when something was.
        suspect: the first text whose logits differ, for whoever looks for the layer.
    """

    figures: tuple[Figure, ...] = ()
    problems: tuple[str, ...] = ()
    detail: str = ""
    skipped: str = ""
    suspect: Suspect | None = None

    @property
    def status(self) -> Status:
        """``failed`` with any problem or any bound broken."""
        if self.skipped:
            return Status.SKIPPED
        is_good = not self.problems and all(figure.is_kept for figure in self.figures)
        return Status.PASSED if is_good else Status.FAILED

    @property
    def explanation(self) -> str:
        """One line: what went wrong, else what was compared."""
        broken = [f"{figure} is out of bounds" for figure in self.figures if not figure.is_kept]
        wrong = [*self.problems, *broken]
        return self.skipped or (join_problems(wrong) if wrong else self.detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class RungResult:
    """One rung of a ladder that was climbed.

    Args:
        number: from 1.
        name: of the rung.
        status: how it ended.
        figures: what was measured.
        detail: what differed, or what was compared, or why it did not run.
        seconds: wall time.
        suspect: see `Finding`.
    """

    number: int
    name: str
    status: Status
    figures: tuple[Figure, ...]
    detail: str
    seconds: float
    suspect: Suspect | None = None

    def __post_init__(self) -> None:
        assert math.isfinite(self.seconds), "a rung takes a time"


def join_results(
    climbed: Sequence[tuple[str, tuple[RungResult, ...]]],
) -> tuple[RungResult, ...]:
    """One result a rung from several ladders: the worst status, and what each of them says.

    Args:
        climbed: per ladder what it is called, and its results, the same rungs in each.
    """
    if len(climbed) == 1:
        return climbed[0][1]
    names = [name for name, _ in climbed]
    by_rung = zip(*(results for _, results in climbed), strict=True)
    return tuple(_join(names, results) for results in by_rung)


def _join(names: Sequence[str], results: tuple[RungResult, ...]) -> RungResult:
    worst = max(results, key=lambda result: _GRAVITY.index(result.status))
    return replace(
        worst,
        figures=tuple(
            replace(figure, name=f"{figure.name}, {name}")
            for name, result in zip(names, results, strict=True)
            for figure in result.figures
        ),
        detail="; ".join(
            f"{name}: {result.detail}" for name, result in zip(names, results, strict=True)
        ),
        seconds=sum(result.seconds for result in results),
    )


def join_problems(problems: Sequence[str]) -> str:
    """The first few problems in one line, and how many more there are."""
    shown = "; ".join(problems[:_SHOWN_PROBLEMS])
    more = len(problems) - _SHOWN_PROBLEMS
    return f"{shown}; and {more} more" if more > 0 else shown
