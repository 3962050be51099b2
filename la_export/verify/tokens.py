"""When two token sequences count as the same, and what may excuse a difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = [
    "EPSILON_LIMIT_FP32",
    "EXCUSED_SHARE_LIMIT_FP32",
    "Comparison",
    "Verdict",
    "compare_tokens",
]

EPSILON_LIMIT_FP32: Final = 1e-3
EXCUSED_SHARE_LIMIT_FP32: Final = 1 / 5000


class Verdict(StrEnum):
    """``equal``; ``excused``: the first difference is a near-tie; ``different``: it is not."""

    EQUAL = "equal"
    EXCUSED = "excused"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The outcome of one comparison.

    Args:
        verdict: the outcome.
        num_compared: tokens up to and including the first difference, or all of them.
        position: index of the first difference among the new tokens, -1 when there is none.
        margin: the reference's best minus second-best logit there, 0.0 when there is none.
    """

    verdict: Verdict
    num_compared: int
    position: int = -1
    margin: float = 0.0


def compare_tokens(
    reference: Sequence[int], margins: Sequence[float], found: Sequence[int], *, epsilon: float
) -> Comparison:
    """Compare with a reference; a difference is excused only by a near-tie where it starts.

    What follows a first difference belongs to another text and is not compared.

    Args:
        reference: tokens of plain decoding.
        margins: per reference token, best minus second-best logit of the row that chose it.
        found: the tokens to judge.
        epsilon: largest margin of a near-tie.
    """
    for position, (expected, token) in enumerate(zip(reference, found, strict=False)):
        if expected != token:
            margin = margins[position]
            verdict = Verdict.EXCUSED if margin < epsilon else Verdict.DIFFERENT
            return Comparison(
                verdict=verdict, num_compared=position + 1, position=position, margin=margin
            )
    shorter = min(len(reference), len(found))
    if len(reference) != len(found):
        return Comparison(
            verdict=Verdict.DIFFERENT, num_compared=shorter, position=shorter, margin=0.0
        )
    return Comparison(verdict=Verdict.EQUAL, num_compared=shorter)
