from __future__ import annotations

import signal
import threading

import pytest

from la_export.plan.namespace import Installation
from la_export.plan.progress import (
    Interruption,
    SilentPlanProgress,
    catch_interrupt,
    make_monitor,
)


class _Steps(SilentPlanProgress):
    def __init__(self) -> None:
        self.steps: list[tuple[str, int, int]] = []

    def advance(self, phase: str, step: int, num_steps: int) -> None:
        self.steps.append((phase, step, num_steps))


def test_steps_are_passed_on_with_how_many_there_are(installation: Installation) -> None:
    progress = _Steps()
    monitor = make_monitor(installation.trt, progress, Interruption())

    monitor.phase_start("outer", None, 2)
    monitor.phase_start("inner", "outer", 1)
    assert monitor.step_complete("inner", 0)
    monitor.phase_finish("inner")
    assert monitor.step_complete("outer", 0)

    assert progress.steps == [("inner", 1, 1), ("outer", 1, 2)]


def test_interruption_asks_the_build_to_stop(installation: Installation) -> None:
    interruption = Interruption()
    monitor = make_monitor(installation.trt, SilentPlanProgress(), interruption)
    monitor.phase_start("phase", None, 3)

    assert monitor.step_complete("phase", 0)
    interruption.was_asked = True
    assert not monitor.step_complete("phase", 1)


def test_ctrl_c_is_held_back_until_the_end() -> None:
    reached = []
    before = signal.getsignal(signal.SIGINT)

    def build() -> None:
        with catch_interrupt() as interruption:
            signal.raise_signal(signal.SIGINT)
            reached.append(interruption.was_asked)

    with pytest.raises(KeyboardInterrupt):
        build()

    assert reached == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_goes_before_the_error_of_a_stopped_build() -> None:
    def build() -> None:
        with catch_interrupt() as interruption:
            interruption.was_asked = True
            raise ValueError("build canceled")

    with pytest.raises(KeyboardInterrupt):
        build()


def test_thread_that_gets_no_signals_builds_all_the_same() -> None:
    found = []

    def build() -> None:
        with catch_interrupt() as interruption:
            found.append(interruption.was_asked)

    thread = threading.Thread(target=build)
    thread.start()
    thread.join()

    assert found == [False]
