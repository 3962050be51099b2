"""From answers to figures: rates, acceptance, speedups with their intervals, loops. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from statistics import median
from typing import Final

import numpy as np

from la_export.bench.speed.record import (
    OVERALL,
    AnswerFigures,
    DecodeRun,
    Interval,
    PositionAcceptance,
    StepPoint,
)
from la_export.bench.speed.ways import Answer, Way

__all__ = ["StepCurve", "decode_rate", "does_loop", "make_decode_run", "speedup"]

_LOOP_GRAM: Final = 4
_LOOP_TIMES: Final = 4
_RESAMPLES: Final = 2000
_INTERVAL: Final = (2.5, 97.5)
_SEED: Final = 0

Ceiling = Callable[[float, float], float]
"""Seconds that a step of so many rows takes at least, behind so many tokens."""


def does_loop(token_ids: Sequence[int]) -> bool:
    """Whether four tokens in a row come up four times or more."""
    grams = zip(*(token_ids[start:] for start in range(_LOOP_GRAM)), strict=False)
    return max(Counter(grams).values(), default=0) >= _LOOP_TIMES


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCurve:
    """L(T) between the row counts that were measured, drawn straight.

    Args:
        milliseconds: by number of rows, ascending.
    """

    milliseconds: Mapping[int, float]

    @classmethod
    def of(cls, points: Iterable[StepPoint]) -> StepCurve:
        """The curve of the points whose rows were all scored."""
        known = {p.rows: p.time.median_ms for p in points if p.scored_rows == p.rows}
        return cls(milliseconds=dict(sorted(known.items())))

    def relative(self, rows: float) -> float | None:
        """L(rows) / L(1); None outside what was measured."""
        times = self.milliseconds
        if 1 not in times or not 1 <= rows <= max(times):
            return None
        return float(np.interp(rows, list(times), list(times.values()))) / times[1]


def decode_rate(answers: Sequence[Answer]) -> float | None:
    """Tokens after prefill's a second, over all answers; None without such tokens."""
    tokens = sum(_decode_tokens(answer) for answer in answers)
    seconds = sum(answer.stats.decode_s for answer in answers)
    return tokens / seconds if tokens and seconds else None


def _decode_tokens(answer: Answer) -> int:
    return answer.stats.new_tokens - answer.stats.prefill_tokens


def speedup(answers: Sequence[Answer], base: Sequence[Answer]) -> Interval | None:
    """Decode tokens a second over those of `base`, which answers the same questions in order.

    The interval is that of 2,000 draws of the questions with replacement; a question keeps its
    answer of either side.
    """
    sides = [
        np.array([[_decode_tokens(answer), answer.stats.decode_s] for answer in side])
        for side in (answers, base)
    ]  # [questions, 2] each
    if not len(answers) or decode_rate(answers) is None or decode_rate(base) is None:
        return None
    drawn = np.random.default_rng(_SEED).integers(
        len(answers), size=(_RESAMPLES, len(answers))
    )  # [draws, questions]
    sums = [side[drawn].sum(axis=1) for side in sides]  # [draws, 2] each
    usable = np.all([(side > 0).all(axis=1) for side in sums], axis=0)
    ours, theirs = (side[usable, 0] / side[usable, 1] for side in sums)
    low, high = np.percentile(ours / theirs, _INTERVAL)
    value = (decode_rate(answers) or 0.0) / (decode_rate(base) or 1.0)
    return Interval(value=value, low=float(low), high=float(high), samples=len(answers))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """Answers of one way, of the bundle's own plain decoding and of the fastest one, in step."""

    answers: Sequence[Answer]
    plain: Sequence[Answer]
    base: Sequence[Answer]

    @property
    def is_base(self) -> bool:
        """Whether these are the very answers that others are compared with."""
        return all(one is other for one, other in zip(self.answers, self.base, strict=True))

    def only(self, holds: Callable[[Answer, Answer], bool]) -> _Comparison:
        """The questions of which this holds for the answer and the plain answer."""
        kept = [
            i for i, pair in enumerate(zip(self.answers, self.plain, strict=True)) if holds(*pair)
        ]
        sides = ([side[i] for i in kept] for side in (self.answers, self.plain, self.base))
        answers, plain, base = sides
        return _Comparison(answers=answers, plain=plain, base=base)


def make_decode_run(
    way: Way,
    *,
    answers: Mapping[str, Answer],
    plain: Mapping[str, Answer],
    base: Mapping[str, Answer],
    curve: StepCurve,
    ceiling: Ceiling | None,
) -> DecodeRun:
    """The figures of one way of decoding, over the questions that all three answered.

    Args:
        way: how the answers were decoded.
        answers: by question.
        plain: of the same bundle's plain decoding.
        base: of the plain decoding that speedups are over.
        curve: L(T) of the bundle.
        ceiling: of the machine, if it was measured.
    """
    shared = [name for name in answers if name in plain and name in base]
    compared = _Comparison(
        answers=[answers[name] for name in shared],
        plain=[plain[name] for name in shared],
        base=[base[name] for name in shared],
    )

    def tabulate(part: _Comparison) -> tuple[AnswerFigures, ...]:
        categories = dict.fromkeys(answer.category for answer in part.answers)
        split = [(name, part.only(partial(_is_of, name))) for name in categories]
        return tuple(
            _summarize(way, name, some, curve=curve, ceiling=ceiling)
            for name, some in (*split, (OVERALL, part))
        )

    steady = compared.only(
        lambda answer, plain: not does_loop(answer.token_ids) and not does_loop(plain.token_ids)
    )
    return DecodeRun(
        k=way.k,
        layout=way.layout,
        selection=way.selection,
        sources=way.sources,
        tau=way.tau,
        lossless=way.lossless,
        answers=tabulate(compared),
        without_loops=tabulate(steady),
    )


def _is_of(category: str, answer: Answer, _: Answer) -> bool:
    return answer.category == category


def _summarize(
    way: Way,
    category: str,
    compared: _Comparison,
    *,
    curve: StepCurve,
    ceiling: Ceiling | None,
) -> AnswerFigures:
    answers = compared.answers
    stats = [answer.stats for answer in answers]
    tokens = sum(stat.new_tokens for stat in stats)
    seconds = sum(stat.ttft_s + stat.decode_s for stat in stats)
    passes = sum(stat.passes - stat.prefill_passes for stat in stats)
    decoded = sum(_decode_tokens(answer) for answer in answers)
    rows = sum(stat.rows - stat.prefill_rows for stat in stats)
    tokens_per_pass = decoded / passes if passes else None
    rows_per_pass = rows / passes if passes else None
    yielded = ceiling_rate = None
    if tokens_per_pass is not None and rows_per_pass is not None:
        relative = curve.relative(rows_per_pass)
        yielded = tokens_per_pass / relative if relative else None
        if ceiling is not None:
            past = sum(stat.prompt_tokens + stat.new_tokens / 2 for stat in stats) / len(stats)
            ceiling_rate = tokens_per_pass / ceiling(rows_per_pass, past)
    return AnswerFigures(
        category=category,
        samples=len(answers),
        tokens=tokens,
        decode_tokens_per_s=decode_rate(answers),
        end_to_end_tokens_per_s=tokens / seconds if seconds else None,
        ttft_s=median(stat.ttft_s for stat in stats) if stats else None,
        tokens_per_pass=tokens_per_pass,
        rows_per_pass=rows_per_pass,
        accepted=_acceptance(answers),
        speedup=None if compared.is_base else speedup(answers, compared.base),
        yielded=yielded,
        ceiling_tokens_per_s=ceiling_rate,
        equal=sum(
            answer.token_ids == plain.token_ids
            for answer, plain in zip(answers, compared.plain, strict=True)
        ),
        looping=sum(does_loop(answer.token_ids) for answer in answers),
    )


def _acceptance(answers: Sequence[Answer]) -> tuple[PositionAcceptance, ...]:
    drafted = zip_longest(*(answer.stats.drafted for answer in answers), fillvalue=0)
    accepted = zip_longest(*(answer.stats.accepted for answer in answers), fillvalue=0)
    return tuple(
        PositionAcceptance(position=position, drafted=sum(tested), accepted=sum(right))
        for position, (tested, right) in enumerate(zip(drafted, accepted, strict=True), 1)
    )
