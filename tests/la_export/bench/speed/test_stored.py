from __future__ import annotations

from pathlib import Path

from la_export.bench.speed.record import SpeedRecord
from la_export.bench.speed.stored import make_step_times, store_step_times
from la_runtime.bundle import open_bundle
from la_runtime.certificate import certified_digests, hash_facts
from la_runtime.step_times import StepTimes
from tests.la_export.bench.speed.records import make_record


def _make(record: SpeedRecord) -> StepTimes:
    times = make_step_times(record, record.bundles[0])
    assert times is not None
    return times


def test_the_curve_with_every_row_scored_is_stored() -> None:
    times = _make(make_record())

    assert [(time.rows, time.median_ms) for time in times.times] == [(1, 10.0), (5, 15.0)]
    assert (times.threads, times.past, times.processor) == (2, 256, "a processor")


def test_what_slots_take_is_stored_beside_the_steps() -> None:
    record = make_record()
    measured = record.bundles[0].model_copy(update={"slots_ms": 1.5})

    found = make_step_times(record, measured)

    assert found is not None
    assert (_make(record).slots_ms, found.slots_ms) == (0.0, 1.5)


def test_without_step_times_there_is_nothing_to_store() -> None:
    record = make_record()

    unmeasured = record.bundles[0].model_copy(update={"step_times": ()})

    assert make_step_times(record, unmeasured) is None


def test_storing_changes_nothing_that_a_certificate_covers(bundle: Path) -> None:
    before = open_bundle(bundle)

    store_step_times(before, _make(make_record()))

    after = open_bundle(bundle).manifest
    assert after.step_times == (_make(make_record()),)
    assert hash_facts(after) == hash_facts(before.manifest)
    assert certified_digests(after, "ort-cpu") == certified_digests(before.manifest, "ort-cpu")


def test_a_later_measurement_takes_the_place_of_one_with_as_many_threads(bundle: Path) -> None:
    opened = open_bundle(bundle)
    first = _make(make_record())
    later = first.model_copy(update={"utc": "2026-02-02T00:00:00Z"})
    single = first.model_copy(update={"threads": 1})

    for times in (first, single, later):
        store_step_times(opened, times)

    assert open_bundle(bundle).manifest.step_times == (single, later)
