from __future__ import annotations

import pytest
from pydantic import ValidationError

from la_runtime.step_times import StepTime, StepTimes


def make_step_times(*rows: int, threads: int = 1, processor: str = "one") -> StepTimes:
    return StepTimes(
        utc="2026-01-01T00:00:00Z",
        backend="ort-cpu",
        backend_version="1.2.3",
        processor=processor,
        threads=threads,
        past=256,
        times=tuple(
            StepTime(rows=count, median_ms=2.0, low_ms=1.0, high_ms=3.0, samples=5)
            for count in rows
        ),
    )


def test_they_read_back_as_they_were_written() -> None:
    times = make_step_times(1, 2, 9)

    assert StepTimes.model_validate_json(times.model_dump_json()) == times


@pytest.mark.parametrize("rows", [(2, 1), (1, 1), ()])
def test_rows_that_do_not_ascend_are_refused(rows: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match=r"ascending numbers of rows|at least 1"):
        make_step_times(*rows)


def test_the_place_is_backend_processor_and_threads() -> None:
    assert make_step_times(1).place == make_step_times(1, 2).place
    assert make_step_times(1).place != make_step_times(1, threads=2).place
    assert make_step_times(1).place != make_step_times(1, processor="other").place
