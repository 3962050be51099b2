"""What the runtime adds to the passes themselves, measured within one run.

Every ratio compares things that were timed in turn, so that a machine whose speed drifts slows
both. The ceiling of a decode step is the pass alone: `InferenceSession.run` on bound buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import onnxruntime as ort

from la_runtime.backends.ort import OrtBackend
from la_runtime.generation import DecodeState, Engine
from la_runtime.layout import Layout

__all__ = ["PassTimer", "StepTimes", "time_calls", "time_steps"]


class PassTimer:
    """Stands in for a backend's session and adds up the time spent in passes.

    Args:
        session: the session to run.
    """

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self.seconds = 0.0
        self.last_binding: Any = None

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        """Run, timed."""
        start = time.perf_counter()
        self._session.run_with_iobinding(binding, options)
        self.seconds += time.perf_counter() - start
        self.last_binding = binding

    def io_binding(self) -> Any:
        """A binding of the session."""
        return self._session.io_binding()


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
    session = backend.session
    timer = PassTimer(session)
    steps: list[tuple[float, float, float]] = []
    backend.session = timer
    try:
        for prompt in prompts:
            with engine.prefill(
                prompt, k=k, layout=layout, max_new_tokens=num_tokens, ignore_eos=True
            ) as state:
                while state.finish_reason is None:
                    step_s, pass_s = _time_step(state, timer)
                    start = time.perf_counter()
                    session.run_with_iobinding(timer.last_binding)
                    steps.append((step_s, pass_s, time.perf_counter() - start))
    finally:
        backend.session = session
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
