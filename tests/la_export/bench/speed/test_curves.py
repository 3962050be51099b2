from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from la_export.bench.speed import curves
from la_export.bench.speed.curves import (
    GROWTH_BATCHES,
    GrowthKey,
    PrefillKey,
    ReservedKey,
    StepKey,
    time_growth,
    time_prefill,
    time_reserved,
    time_step_rows,
)
from la_export.bench.speed.steps import Scored
from la_export.bench.speed.subjects import Subject, open_subjects
from la_export.bench.speed.timing import Rounds, Samples

ONCE = Rounds(least=1, most=1)


def _ignore(done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def subject(tiny: Path) -> Iterator[Subject]:
    with open_subjects([tiny], threads=1) as (opened,):
        yield opened


def test_every_row_count_is_timed_with_both_heads_where_they_differ(subject: Subject) -> None:
    samples: Samples[StepKey] = Samples()

    time_step_rows([subject], samples, ONCE, _ignore)

    def is_timed(rows: int, scored: Scored) -> bool:
        return samples.timing(StepKey(bundle="bundle", rows=rows, scored=scored)) is not None

    assert all(is_timed(rows, Scored.ALL) for rows in curves.STEP_ROWS)
    verified = [rows for rows in curves.STEP_ROWS if is_timed(rows, Scored.VERIFIED)]
    assert verified == [rows for rows in curves.STEP_ROWS if rows > 2]


def _grow(subject: Subject) -> tuple[Samples[GrowthKey], dict[GrowthKey, str]]:
    samples: Samples[GrowthKey] = Samples()
    absent: dict[GrowthKey, str] = {}
    time_growth(subject, samples, ONCE, _ignore, absent=absent)
    return samples, absent


def test_points_beyond_the_context_are_named_and_the_others_timed(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "GROWTH_PASTS", (0, 32, 250, 256))

    samples, absent = _grow(subject)

    for batch in GROWTH_BATCHES:
        for past, rows, fits in ((0, 17, True), (32, 17, True), (250, 1, True), (250, 17, False)):
            key = GrowthKey(bundle="bundle", rows=rows, past=past, batch=batch)
            assert (samples.timing(key) is not None) is fits
            assert absent.get(key) == (None if fits else "the context is 256")


def test_points_that_would_fill_the_memory_are_passed_over(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    place_bytes = 2 * 2 * 2 * 16 * 4
    monkeypatch.setattr(curves, "GROWTH_PASTS", (32,))
    monkeypatch.setattr(curves, "available_memory_bytes", lambda: 2 * 4 * 33 * place_bytes)

    samples, absent = _grow(subject)

    small, large = (GrowthKey(bundle="bundle", rows=1, past=32, batch=b) for b in (4, 16))
    assert samples.timing(small) is not None
    assert samples.timing(large) is None
    assert "GB of memory are free" in absent[large]


def test_reserving_more_places_changes_nothing_that_a_pass_sees(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []
    forward = subject.engine.backend.forward

    def watch(state, inputs):
        shapes.append(inputs.attention_mask.shape)
        return forward(state, inputs)

    monkeypatch.setattr(subject.engine.backend, "forward", watch)
    samples: Samples[ReservedKey] = Samples()

    time_reserved([subject], samples, Rounds(least=2, most=2), _ignore)

    for places in curves.RESERVED_PLACES:
        assert samples.timing(ReservedKey(bundle="bundle", reserved=places)).samples == 2
    steps = {shape for shape in shapes if shape[2] == 1}
    assert max(shape[3] for shape in steps) < curves.RESERVED_PLACES[0]


def test_prompts_that_do_not_fit_are_left_out(subject: Subject) -> None:
    samples: Samples[PrefillKey] = Samples()

    time_prefill([subject], samples, ONCE, _ignore)

    timed = [
        tokens
        for tokens in curves.PREFILL_TOKENS
        if samples.timing(PrefillKey(bundle="bundle", tokens=tokens))
    ]
    assert timed == [64]
