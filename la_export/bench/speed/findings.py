"""What a run knows so far, and its record at any time."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import Final

from la_export.bench.speed.ceilings import step_cost
from la_export.bench.speed.curves import (
    GROWTH_BATCHES,
    GROWTH_PASTS,
    GROWTH_ROWS,
    PREFILL_TOKENS,
    RESERVED_PLACES,
    STEP_ROWS,
    GrowthKey,
    PrefillKey,
    ReservedKey,
    StepKey,
    step_past,
    tokens_key,
)
from la_export.bench.speed.decoding import Answers
from la_export.bench.speed.figures import StepCurve, decode_rate, make_decode_run
from la_export.bench.speed.record import (
    BundleRun,
    DecodeRun,
    GrowthPoint,
    MachineRates,
    MemoryFigures,
    OutsideShare,
    PrefillTime,
    ReservedPoint,
    Section,
    Settings,
    SpeedRecord,
    StepPoint,
)
from la_export.bench.speed.steps import Scored
from la_export.bench.speed.subjects import Subject
from la_export.bench.speed.timing import Samples
from la_export.bench.speed.transient import transient_shares
from la_export.bench.speed.ways import PLAINLY, Way
from la_runtime.certificate import processor_name
from la_runtime.layout import Layout

__all__ = ["Findings"]

_PACKAGES: Final = ("lookahead-attention", "numpy", "onnxruntime", "tokenizers")


class Findings:
    """Samples, answers and figures of the bundles of a run; whoever measures adds to them.

    Args:
        subjects: the bundles.
        ways: of decoding, by bundle.
        settings: of the run.
        memory: of processes, by bundle.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        ways: Mapping[str, Sequence[Way]],
        settings: Settings,
        memory: Mapping[str, MemoryFigures],
    ) -> None:
        self._subjects = subjects
        self._ways = ways
        self._settings = settings
        self.rates: MachineRates | None = None
        self.steps: Samples[StepKey] = Samples()
        self.growth: Samples[GrowthKey] = Samples()
        self.growth_absent: dict[GrowthKey, str] = {}
        self.reserved: Samples[ReservedKey] = Samples()
        self.prefill: Samples[PrefillKey] = Samples()
        self.answers: dict[str, Answers] = {subject.name: {} for subject in subjects}
        self.outside: dict[str, list[OutsideShare]] = {subject.name: [] for subject in subjects}
        self._memory = memory

    def record(self, *, complete: bool, utc: str, seconds: float) -> SpeedRecord:
        """What is known now.

        Args:
            complete: whether everything was measured.
            utc: when the run began.
            seconds: how long it has taken.
        """
        return SpeedRecord(
            complete=complete,
            utc=utc,
            seconds=round(seconds, 1),
            processor=processor_name(),
            cores=len(os.sched_getaffinity(0)),
            versions=_versions(),
            settings=self._settings,
            rates=self.rates,
            bundles=tuple(self._bundle_run(subject) for subject in self._subjects),
        )

    def _bundle_run(self, subject: Subject) -> BundleRun:
        steps = tuple(self._step_points(subject))
        base = self._fastest_plain(subject)
        lengths = dict.fromkeys(way.k for way in self._ways[subject.name])
        return subject.describe().model_copy(
            update={
                "plain_bundle": base,
                "slots_ms": self._slots_ms(subject),
                "step_times": steps,
                "growth": tuple(self._growth_points(subject)),
                "reserved": tuple(self._reserved_points(subject)),
                "prefill": tuple(self._prefill_times(subject)),
                "outside": tuple(self.outside[subject.name]),
                "decoding": () if base is None else self._decode_runs(subject, base, steps),
                "memory": self._memory.get(subject.name),
                "transient": transient_shares(
                    subject.engine.backend.contract, lengths=list(lengths), layouts=list(Layout)
                ),
            }
        )

    def _step_points(self, subject: Subject) -> Iterator[StepPoint]:
        past = step_past(subject.context)
        for rows in STEP_ROWS:
            for scored in Scored:
                timing = self.steps.timing(StepKey(bundle=subject.name, rows=rows, scored=scored))
                if timing is None:
                    continue
                scored_rows = scored.rows_of(rows)
                point = StepPoint(rows=rows, scored_rows=scored_rows, past=past, time=timing)
                if self.rates is None:
                    yield point
                    continue
                cost = step_cost(
                    subject.manifest,
                    self.rates,
                    weight_bytes=subject.weight_bytes,
                    rows=rows,
                    scored_rows=scored_rows,
                    past=past,
                )
                yield point.model_copy(
                    update={
                        "weights_ms": 1000 * cost.weights_s,
                        "operations_ms": 1000 * cost.operations_s,
                    }
                )

    def _slots_ms(self, subject: Subject) -> float | None:
        key = tokens_key(subject.name)
        tokens = self.steps.timing(key)
        slots = self.steps.timing(replace(key, has_slots=True))
        if tokens is None or slots is None:
            return None
        return max(0.0, slots.median_ms - tokens.median_ms)

    def _growth_points(self, subject: Subject) -> Iterator[GrowthPoint]:
        if Section.GROWTH not in self._settings.sections:
            return
        for batch, rows, past in product(GROWTH_BATCHES, GROWTH_ROWS, GROWTH_PASTS):
            key = GrowthKey(bundle=subject.name, rows=rows, past=past, batch=batch)
            timing = self.growth.timing(key)
            why = None if timing else self.growth_absent.get(key, "it was not reached")
            yield GrowthPoint(rows=rows, past=past, batch=batch, time=timing, absent=why)

    def _reserved_points(self, subject: Subject) -> Iterator[ReservedPoint]:
        for places in RESERVED_PLACES:
            timing = self.reserved.timing(ReservedKey(bundle=subject.name, reserved=places))
            if timing is not None:
                past = step_past(subject.context)
                yield ReservedPoint(past=past, reserved=places, time=timing)

    def _prefill_times(self, subject: Subject) -> Iterator[PrefillTime]:
        for tokens in PREFILL_TOKENS:
            timing = self.prefill.timing(PrefillKey(bundle=subject.name, tokens=tokens))
            if timing is not None:
                rate = 1000 * tokens / timing.median_ms
                yield PrefillTime(prompt_tokens=tokens, time=timing, tokens_per_s=rate)

    def _fastest_plain(self, subject: Subject) -> str | None:
        """The bundle of this model and precision that decodes plainly the fastest."""
        rates = {}
        for other in self._subjects:
            plain = self.answers[other.name].get(PLAINLY)
            if plain and _kind(other) == _kind(subject):
                rates[other.name] = decode_rate(list(plain.values())) or 0.0
        return max(rates, key=lambda name: rates[name]) if rates else None

    def _decode_runs(
        self, subject: Subject, base: str, steps: Sequence[StepPoint]
    ) -> tuple[DecodeRun, ...]:
        answers = self.answers[subject.name]
        if PLAINLY not in answers:
            return ()
        rates = self.rates

        def ceiling(rows: float, past: float) -> float:
            assert rates is not None, "asked only where they were measured"
            return step_cost(
                subject.manifest,
                rates,
                weight_bytes=subject.weight_bytes,
                rows=rows,
                scored_rows=rows,
                past=past,
            ).ceiling_s

        return tuple(
            make_decode_run(
                way,
                answers=answers[way],
                plain=answers[PLAINLY],
                base=self.answers[base][PLAINLY],
                curve=StepCurve.of(steps),
                ceiling=None if rates is None else ceiling,
            )
            for way in self._ways[subject.name]
            if way in answers
        )


def _kind(subject: Subject) -> tuple[str, str]:
    return (subject.manifest.model.name, subject.manifest.precision)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
