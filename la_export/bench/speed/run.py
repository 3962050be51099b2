"""A whole run: what is measured in which order, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, Protocol

import numpy as np

from la_export.bench.overhead import time_steps
from la_export.bench.speed.ceilings import measure_rates
from la_export.bench.speed.curves import (
    step_past,
    time_growth,
    time_prefill,
    time_reserved,
    time_step_rows,
)
from la_export.bench.speed.decoding import ask
from la_export.bench.speed.findings import Findings
from la_export.bench.speed.questions import Question
from la_export.bench.speed.record import (
    MemoryFigures,
    OutsideShare,
    Section,
    Settings,
    SpeedRecord,
)
from la_export.bench.speed.subjects import Subject
from la_export.bench.speed.timing import Rounds
from la_export.bench.speed.ways import Way, make_ways
from la_runtime.layout import Layout

__all__ = ["LENGTHS", "Progress", "SpeedRun", "pick_lengths"]

LENGTHS: Final = (1, 2, 4, 8, 12, 16)

_LEAST_ROUNDS: Final = 3
_STEP_ROUNDS: Final = 31
_GROWTH_ROUNDS: Final = 7
_RESERVED_ROUNDS: Final = 101
_PREFILL_ROUNDS: Final = 7
_OUTSIDE_TOKENS: Final = 64
# How the time is shared where it is limited.
_SHARES: Final[Mapping[Section, float]] = {
    Section.STEP_TIMES: 0.2,
    Section.GROWTH: 0.2,
    Section.PREFILL: 0.1,
    Section.DECODING: 0.45,
}
_SEED: Final = 0


class Progress(Protocol):
    """Told what a run is at."""

    def begin(self, title: str) -> None:
        """Something longer begins."""
        ...

    def advance(self, done: int, total: int) -> None:
        """It has come so far."""
        ...

    def end(self) -> None:
        """It is done."""
        ...


def pick_lengths(built: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """Values of k above 0 to decode with: those wanted, or of the usual ones those built.

    Args:
        built: what the bundle was built for.
        wanted: what was asked for; empty for the usual ones.
    """
    return tuple(k for k in sorted(set(built)) if k > 0 and k in (wanted or LENGTHS))


class SpeedRun:
    """Measures the sections of the settings, but for memory, which open bundles would disturb.

    Args:
        subjects: the bundles.
        questions: what they are asked; none are needed without the section of decoding.
        settings: what was asked for.
        memory: what was measured of it before, by bundle.
        progress: told what is measured.
        keep: called whenever something was measured that should not be lost.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        questions: Sequence[Question],
        settings: Settings,
        *,
        memory: Mapping[str, MemoryFigures],
        progress: Progress,
        keep: Callable[[SpeedRecord], None],
    ) -> None:
        self._subjects = subjects
        self._questions = questions
        self._settings = settings
        self._progress = progress
        self._keep = keep
        self._utc = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._began = time.monotonic()
        self._ways = {subject.name: _ways_of(subject, settings) for subject in subjects}
        self._found = Findings(subjects, self._ways, settings, memory)

    def record(self, *, complete: bool) -> SpeedRecord:
        """What is known now.

        Args:
            complete: whether everything was measured.
        """
        seconds = time.monotonic() - self._began
        return self._found.record(complete=complete, utc=self._utc, seconds=seconds)

    def measure(self) -> None:
        """Measure everything. What is known when this is interrupted is in `record`."""
        measures: Mapping[Section, Callable[[float | None], None]] = {
            Section.STEP_TIMES: self._measure_steps,
            Section.GROWTH: self._measure_growth,
            Section.PREFILL: self._measure_prefill,
            Section.DECODING: self._measure_decoding,
        }
        self._begin("what the machine can do")
        self._found.rates = measure_rates(self._settings.threads)
        self._end()
        wanted = [section for section in measures if section in self._settings.sections]
        for index, section in enumerate(wanted):
            measures[section](self._deadline(section, wanted[index:]))

    def _deadline(self, section: Section, left: Sequence[Section]) -> float | None:
        """When a section should end, of what is left of the minutes."""
        if self._settings.minutes is None:
            return None
        now = time.monotonic()
        remaining = max(0.0, self._began + 60 * self._settings.minutes - now)
        return now + remaining * _SHARES[section] / sum(_SHARES[other] for other in left)

    def _begin(self, title: str) -> None:
        self._progress.begin(title)

    def _end(self) -> None:
        self._progress.end()
        self._keep(self.record(complete=False))

    def _measure_steps(self, deadline: float | None) -> None:
        self._begin("steps of 1 to 64 rows")
        rounds = Rounds(least=_LEAST_ROUNDS, most=_STEP_ROUNDS, deadline=deadline)
        time_step_rows(self._subjects, self._found.steps, rounds, self._progress.advance)
        self._end()
        for subject in self._subjects:
            self._begin(f"steps outside the backend's run, {subject.name}")
            self._measure_outside(subject)
            self._end()

    def _measure_outside(self, subject: Subject) -> None:
        past = step_past(subject.context)
        num_tokens = min(_OUTSIDE_TOKENS, subject.context - past)
        vocab_size = subject.engine.backend.contract.vocab_size
        prompt = np.random.default_rng(_SEED).integers(vocab_size, size=past).tolist()
        for k in dict.fromkeys(way.k for way in self._ways[subject.name]):
            found = time_steps(
                subject.engine, [prompt], k=k, layout=Layout.ROOT_ONLY, num_tokens=num_tokens
            )
            self._found.outside[subject.name].append(
                OutsideShare(
                    k=k,
                    share=found.outside_share,
                    run_ms=1000 * found.pass_s,
                    samples=found.num_steps,
                )
            )

    def _measure_growth(self, deadline: float | None) -> None:
        for index, subject in enumerate(self._subjects):
            self._begin(f"steps behind 0 to 4,096 tokens, {subject.name}")
            rounds = Rounds(
                least=_LEAST_ROUNDS,
                most=_GROWTH_ROUNDS,
                deadline=_next_share(deadline, parts_left=len(self._subjects) - index + 1),
            )
            time_growth(
                subject,
                self._found.growth,
                rounds,
                self._progress.advance,
                absent=self._found.growth_absent,
            )
            self._end()
        self._begin("steps with few and with many places reserved")
        rounds = Rounds(least=_GROWTH_ROUNDS, most=_RESERVED_ROUNDS, deadline=deadline)
        time_reserved(self._subjects, self._found.reserved, rounds, self._progress.advance)
        self._end()

    def _measure_prefill(self, deadline: float | None) -> None:
        self._begin("prompts of 64 to 1,024 tokens")
        rounds = Rounds(least=_LEAST_ROUNDS, most=_PREFILL_ROUNDS, deadline=deadline)
        time_prefill(self._subjects, self._found.prefill, rounds, self._progress.advance)
        self._end()

    def _measure_decoding(self, deadline: float | None) -> None:
        self._begin(f"decoding, prompts: {len(self._questions)}")

        def report(done: int, total: int) -> None:
            self._progress.advance(done, total)
            self._keep(self.record(complete=False))

        ask(
            self._subjects,
            self._questions,
            ways=self._ways,
            new_tokens=self._settings.new_tokens,
            answers=self._found.answers,
            goes_on=lambda: deadline is None or time.monotonic() < deadline,
            report=report,
        )
        self._end()


def _next_share(deadline: float | None, *, parts_left: int) -> float | None:
    """When the next of so many parts should end, so that each gets as much of what is left."""
    if deadline is None:
        return None
    now = time.monotonic()
    return now + max(0.0, deadline - now) / parts_left


def _ways_of(subject: Subject, settings: Settings) -> tuple[Way, ...]:
    return make_ways(
        pick_lengths(subject.manifest.lookahead_lengths, settings.lookahead_lengths),
        layouts=settings.layouts,
        selections=settings.selections,
        sources=settings.sources,
        tau=settings.tau,
    )
