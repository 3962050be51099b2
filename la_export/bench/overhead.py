"""What the runtime adds to the passes themselves, measured within one run.

Every ratio compares things that were timed in turn, so that a machine whose speed drifts slows
both. The ceiling of a decode step is the pass alone: `InferenceSession.run` on bound buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import onnxruntime as ort

from la_runtime.backends.ort import OrtBackend
from la_runtime.generation import DecodeState, Engine
from la_runtime.layout import Layout

__all__ = ["PassTimer", "StepTimes", "time_calls", "time_steps", "timed_passes"]


class PassTimer:
    """Adds up the time spent in the passes of a backend, in whichever of its sessions they run."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: tuple[ort.InferenceSession, Any] | None = None

    def run(self, session: ort.InferenceSession, binding: Any, options: Any) -> None:
        """Run, timed."""
        start = time.perf_counter()
        session.run_with_iobinding(binding, options)
        self.seconds += time.perf_counter() - start
        self._last = (session, binding)

    def run_again(self) -> None:
        """The last pass, with the very same buffers bound; not added."""
        assert self._last is not None, "a pass has run"
        session, binding = self._last
        session.run_with_iobinding(binding)


class _TimedSession:
    """Stands in for a session of a backend."""

    def __init__(self, session: ort.InferenceSession, timer: PassTimer) -> None:
        self._session = session
        self._timer = timer

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        """Run, timed."""
        self._timer.run(self._session, binding, options)

    def io_binding(self) -> Any:
        """A binding of the session."""
        return self._session.io_binding()


@contextmanager
def timed_passes(backend: OrtBackend) -> Iterator[PassTimer]:
    """Within it the passes of a backend are timed."""
    timer = PassTimer()
    sessions = backend.session, backend.tokens_only
    backend.session, backend.tokens_only = (
        None if session is None else _TimedSession(session, timer) for session in sessions
    )
    try:
        yield timer
    finally:
        backend.session, backend.tokens_only = sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Medians over the steps of some decodings.

    Args:
        step_s: seconds of a whole step.
        pass_s: seconds of its pass.
        outside_share: time outside the pass, relative to the pass; median of the steps' ratios.
        bare_ratio: time of a step relative to the same pass run again by itself right after it;
            median of the ratios.
        num_steps: how many there were.
    """

    step_s: float
    pass_s: float
    outside_share: float
    bare_ratio: float
    num_steps: int


def time_steps(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    layout: Layout,
    num_tokens: int,
) -> StepTimes:
    """Time every decode step, and after each the bare pass with the very same buffers bound."""
    backend = engine.backend
    assert isinstance(backend, OrtBackend), "passes are timed in ONNX Runtime's session"
    steps: list[tuple[float, float, float]] = []
    with timed_passes(backend) as timer:
        for prompt in prompts:
            with engine.prefill(
                prompt, k=k, layout=layout, max_new_tokens=num_tokens, ignore_eos=True
            ) as state:
                while state.finish_reason is None:
                    step_s, pass_s = _time_step(state, timer)
                    start = time.perf_counter()
                    timer.run_again()
                    steps.append((step_s, pass_s, time.perf_counter() - start))
    return StepTimes(
        step_s=median(step for step, _, _ in steps),
        pass_s=median(passed for _, passed, _ in steps),
        outside_share=median((step - passed) / passed for step, passed, _ in steps),
        bare_ratio=median(step / bare for step, _, bare in steps),
        num_steps=len(steps),
    )


def _time_step(state: DecodeState, timer: PassTimer) -> tuple[float, float]:
    timer.seconds = 0.0
    start = time.perf_counter()
    state.step()
    return time.perf_counter() - start, timer.seconds


def time_calls(calls: Sequence[Callable[[], object]], *, rounds: int) -> list[float]:
    """Median seconds of each call, made in turn `rounds` times."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, times in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return [median(times) for times in seconds]
