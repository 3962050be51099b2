"""How long steps of a bundle take on a machine, as its manifest records them.

Measured values, for whoever chooses how many rows a step should have. Nothing verifies them, and
no certificate depends on them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from la_runtime.records import Record

__all__ = ["StepTime", "StepTimes"]

# A step of fewer is a root, or a root and a draft.
_FEWEST_ROWS_WITH_SLOTS: Final = 3


class StepTime(Record):
    """L(T): one exact step of T rows at batch 1, every row of it scored.

    Args:
        rows: T.
        median_ms: of the samples.
        low_ms: their first quartile.
        high_ms: their third quartile.
        samples: how many.
    """

    rows: int = Field(ge=1)
    median_ms: float = Field(gt=0, allow_inf_nan=False)
    low_ms: float = Field(gt=0, allow_inf_nan=False)
    high_ms: float = Field(gt=0, allow_inf_nan=False)
    samples: int = Field(ge=1)


class StepTimes(Record):
    """What was measured on one machine, with one backend and so many threads.

    Args:
        utc: when.
        backend: what ran the graph.
        backend_version: of its library.
        processor: what it ran on.
        threads: of one pass.
        past: tokens in the cache before each step.
        slots_ms: what a step of three rows or more, some of which are slots, takes longer than one
            of as many tokens: their adapter is read for them alone.
        times: by ascending number of rows.
    """

    utc: str
    backend: str
    backend_version: str
    processor: str
    threads: int = Field(ge=0)
    past: int = Field(ge=0)
    slots_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    times: tuple[StepTime, ...] = Field(min_length=1)

    @model_serializer(mode="wrap")
    def _leave_out_what_is_nothing(self, serialize: SerializerFunctionWrapHandler) -> Any:
        """Runtimes from before there was such a field read the others."""
        record = serialize(self)
        if not self.slots_ms:
            del record["slots_ms"]
        return record

    @model_validator(mode="after")
    def _check_slots(self) -> StepTimes:
        least = min((ms for _, ms in self.token_times), default=1.0)
        if least <= 0:
            raise ValueError(f"slots take {self.slots_ms} ms, no less than a whole step")
        return self

    @field_validator("times")
    @classmethod
    def _check_order(cls, times: tuple[StepTime, ...]) -> tuple[StepTime, ...]:
        if not all(one.rows < other.rows for one, other in pairwise(times)):
            raise ValueError(
                f"expected ascending numbers of rows, got {[time.rows for time in times]}"
            )
        return times

    @property
    def token_times(self) -> list[tuple[int, float]]:
        """Numbers of rows, and milliseconds of a step without slots."""
        return [
            (time.rows, time.median_ms - self.slots_ms * (time.rows >= _FEWEST_ROWS_WITH_SLOTS))
            for time in self.times
        ]

    @property
    def place(self) -> tuple[str, str, int]:
        """What they hold for; a later measurement of the same place takes theirs."""
        return (self.backend, self.processor, self.threads)
