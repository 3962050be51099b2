"""Passes on how far a build has come, and stops it cleanly at Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from la_export.plan.api import IProgressMonitor
from la_export.plan.namespace import TensorRT
from la_export.plan.report import PlanReport

__all__ = ["Interruption", "PlanProgress", "SilentPlanProgress", "catch_interrupt", "make_monitor"]


class PlanProgress(Protocol):
    """Is told of each plan as it is built. `advance` may be called by another thread."""

    def note(self, text: str) -> None:
        """Something the user should know."""
        ...

    def start_plan(self, path: str) -> None:
        """A plan begins."""
        ...

    def advance(self, phase: str, step: int, num_steps: int) -> None:
        """A step of one of TensorRT's phases is done; phases lie within each other."""
        ...

    def finish_plan(self, plan: PlanReport) -> None:
        """A plan has been written."""
        ...


class SilentPlanProgress:
    """Tells nobody."""

    def note(self, text: str) -> None:
        """Nothing."""

    def start_plan(self, path: str) -> None:
        """Nothing."""

    def advance(self, phase: str, step: int, num_steps: int) -> None:
        """Nothing."""

    def finish_plan(self, plan: PlanReport) -> None:
        """Nothing."""


class Interruption:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.was_asked = False

    def ask(self, signum: int, frame: FrameType | None) -> None:
        """The signal's handler."""
        del signum, frame
        self.was_asked = True


@contextmanager
def catch_interrupt() -> Iterator[Interruption]:
    """Hold Ctrl-C back while TensorRT works, and raise it afterwards.

    Raised within one of TensorRT's callbacks it would be lost: those swallow exceptions.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed meanwhile.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption  # signals are none of this thread's
        return
    before = signal.signal(signal.SIGINT, interruption.ask)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if interruption.was_asked:
            raise KeyboardInterrupt


def make_monitor(
    trt: TensorRT, progress: PlanProgress, interruption: Interruption
) -> IProgressMonitor:
    """A progress monitor for one TensorRT; asks the build to stop once Ctrl-C was pressed."""

    class _Monitor(trt.IProgressMonitor):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._num_steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            del parent_phase
            self._num_steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            progress.advance(phase_name, step + 1, self._num_steps.get(phase_name, step + 1))
            return not interruption.was_asked

        def phase_finish(self, phase_name: str) -> None:
            self._num_steps.pop(phase_name, None)

    monitor: IProgressMonitor = _Monitor()
    return monitor
