"""When two token sequences count as the same, and what may excuse a difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from la_export.verify.tolerance import Tolerance

__all__ = [
    "Comparison",
    "Comparisons",
    "Verdict",
    "compare_tokens",
    "refuse_near_ties",
]


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


def refuse_near_ties(near_ties: Sequence[str], allowed: int) -> tuple[str, ...]:
    """The near-ties behind a line that counts them, if they are more than allowed."""
    if len(near_ties) <= allowed:
        return ()
    return (f"{len(near_ties)} near-ties, allowed {allowed}", *near_ties)


@dataclass(slots=True, kw_only=True)
class Comparisons:
    """Comparisons summed up. A place is excused once, however many ways of decoding meet it.

    Args:
        tolerance: how many places may be excused.
        epsilon: largest margin of a near-tie.
        num_tokens: tokens compared.
        differences: what is not excused, a line each.
        near_ties: excused places, a line each.
    """

    tolerance: Tolerance
    epsilon: float
    num_tokens: int = 0
    differences: list[str] = field(default_factory=list)
    near_ties: dict[tuple[str, int], str] = field(default_factory=dict)
    _references: dict[str, int] = field(default_factory=dict)

    def compare(
        self,
        text: str,
        how: str,
        reference: Sequence[int],
        margins: Sequence[float],
        found: Sequence[int],
    ) -> Verdict:
        """Compare one decoding with its reference.

        Args:
            text: what the reference is called; equal names are one reference.
            how: how the other was decoded.
            reference: see `compare_tokens`.
            margins: see `compare_tokens`.
            found: see `compare_tokens`.
        """
        comparison = compare_tokens(reference, margins, found, epsilon=self.epsilon)
        self.num_tokens += comparison.num_compared
        self._references[text] = len(reference)
        if comparison.verdict is Verdict.EQUAL:
            return comparison.verdict
        place = comparison.position
        line = (
            f"{text}, {how}: new token {place} is {_token(found, place)}, expected "
            f"{_token(reference, place)} (margin {comparison.margin:.2g}, epsilon "
            f"{self.epsilon:.2g})"
        )
        if comparison.verdict is Verdict.EXCUSED:
            self.near_ties.setdefault((text, place), line)
        else:
            self.differences.append(line)
        return comparison.verdict

    @property
    def problems(self) -> tuple[str, ...]:
        """What is not excused, and the near-ties if there are too many of them."""
        num_tokens = sum(self._references.values())
        near_ties = tuple(self.near_ties.values())
        return (
            *self.differences,
            *refuse_near_ties(near_ties, self.tolerance.excuse_allowance(num_tokens)),
        )


def _token(token_ids: Sequence[int], place: int) -> str:
    return str(token_ids[place]) if place < len(token_ids) else "missing"
