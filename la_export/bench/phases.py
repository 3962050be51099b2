"""Where the time of a step goes outside its pass, by phase.

The runtime's own functions are timed while real passes run between them. A pass streams the model's
weights through the processor's caches, so what follows it meets none of its code or data there and
takes several times what it takes in a loop by itself: phases cannot be timed alone.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from statistics import median
from typing import Any
from unittest.mock import patch

from la_export.bench.overhead import PassTimer, timed_passes
from la_runtime import batch
from la_runtime.backends.ort import OrtBackend
from la_runtime.block import BlockWriter
from la_runtime.generation import DecodeState, Engine
from la_runtime.sampling import SamplingParams
from la_runtime.sequence import TokenSequence
from la_runtime.text import GeneratedText

__all__ = ["Phase", "PhaseTimes", "time_phases"]


class Phase(StrEnum):
    """What a step does besides its pass, in order.

    ``plan``: which rows. ``inputs``: their ids, positions and mask. ``bind``: the backend's share
    of a pass. ``read``: the best scores into Python. ``select``: choices, acceptance, proposals.
    ``text``: tokens into text. ``commit``: the cache. ``rest``: everything between them.
    """

    PLAN = "plan"
    INPUTS = "inputs"
    BIND = "bind"
    READ = "read"
    SELECT = "select"
    TEXT = "text"
    COMMIT = "commit"
    REST = "rest"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """Medians over the steps of some decodings.

    Args:
        outside_us: microseconds of a step outside its pass, measured without the phases.
        pass_ms: milliseconds of its pass.
        phases_us: of each phase; timing them adds a little to each.
        num_steps: how many steps were timed as a whole, and as many by phase.
    """

    outside_us: float
    pass_ms: float
    phases_us: dict[Phase, float]
    num_steps: int


class _Clock:
    """Adds up the time of each phase, less that of the phases inside it."""

    def __init__(self) -> None:
        self._seconds: dict[Phase | None, float] = defaultdict(float)
        self._inner = [0.0]

    def take(self) -> dict[Phase | None, float]:
        """What was added up since the last call."""
        taken, self._seconds = self._seconds, defaultdict(float)
        return taken

    def timed(self, function: Callable[..., Any], phase: Phase | None) -> Callable[..., Any]:
        """The function, its time counted for a phase; for none, as time of no phase."""

        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                passed = time.perf_counter() - start
                self._seconds[phase] += passed - self._inner.pop()
                self._inner[-1] += passed

        return call


_TIMED: tuple[tuple[Any, str, Phase | None], ...] = (
    (DecodeState, "step", Phase.REST),
    (TokenSequence, "plan", Phase.PLAN),
    (BlockWriter, "write", Phase.INPUTS),
    (OrtBackend, "forward", Phase.BIND),
    (PassTimer, "run", None),
    (batch, "read_best", Phase.READ),
    (batch, "_select", Phase.SELECT),
    (GeneratedText, "push", Phase.TEXT),
    (OrtBackend, "commit", Phase.COMMIT),
)


@contextmanager
def _watch_phases() -> Iterator[_Clock]:
    clock = _Clock()
    with ExitStack() as patches:
        for owner, name, phase in _TIMED:
            timed = clock.timed(getattr(owner, name), phase)
            patches.enter_context(patch.object(owner, name, timed))
        yield clock


def time_phases(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> PhaseTimes:
    """Time the steps of these prompts, each decoded twice: by whole steps, and by phases.

    Args:
        engine: on ONNX Runtime's CPU backend.
        prompts: token ids.
        params: of every request.
    """
    backend = engine.backend
    assert isinstance(backend, OrtBackend), "passes are timed in ONNX Runtime's session"
    wholes: list[tuple[float, float]] = []
    by_phase: list[dict[Phase | None, float]] = []
    with timed_passes(backend) as timer:
        for prompt in prompts:
            with engine.prefill(prompt, params) as state:
                while state.finish_reason is None:
                    wholes.append(_time_whole(state, timer))
            with engine.prefill(prompt, params) as state, _watch_phases() as clock:
                while state.finish_reason is None:
                    state.step()
                    by_phase.append(clock.take())
    return PhaseTimes(
        outside_us=1e6 * median(step - passed for step, passed in wholes),
        pass_ms=1e3 * median(passed for _, passed in wholes),
        phases_us={phase: 1e6 * median(seconds[phase] for seconds in by_phase) for phase in Phase},
        num_steps=len(wholes),
    )


def _time_whole(state: DecodeState, timer: PassTimer) -> tuple[float, float]:
    timer.seconds = 0.0
    start = time.perf_counter()
    state.step()
    return time.perf_counter() - start, timer.seconds
