"""The stages of a build: their order, how long each took, and who is told of them."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from la_export.plan import PlanProgress, SilentPlanProgress

__all__ = ["Clock", "Progress", "SilentProgress", "Stage", "StageReport"]


class Stage(StrEnum):
    """The stages of a build, in order; ``calibrate`` and ``plans`` only where asked for."""

    RESOLVE = "resolve"
    TRACE = "trace"
    CALIBRATE = "calibrate"
    OPTIMIZE = "optimize"
    WEIGHTS = "weights"
    TOKENIZER = "tokenizer"
    CHECK = "check"
    PLANS = "plans"
    SEAL = "seal"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """What one stage took.

    Args:
        stage: which.
        seconds: wall time.
        peak_rss_bytes: the process's peak resident memory when it ended.
    """

    stage: Stage
    seconds: float
    peak_rss_bytes: int


class Progress(PlanProgress, Protocol):
    """Is told of each stage as it begins and ends, and of each plan.

    `note` may also tell something of the model, before the long work.
    """

    def start(self, stage: Stage) -> None:
        """A stage begins."""
        ...

    def advance_bytes(self, done: int, total: int) -> None:
        """So much of the running stage's reading or writing is done."""
        ...

    def finish(self, report: StageReport) -> None:
        """A stage has ended well."""
        ...


class SilentProgress(SilentPlanProgress):
    """Tells nobody."""

    def start(self, stage: Stage) -> None:
        """Nothing."""

    def advance_bytes(self, done: int, total: int) -> None:
        """Nothing."""

    def finish(self, report: StageReport) -> None:
        """Nothing."""


@dataclass(slots=True)
class Clock:
    """Times the stages and passes the news on.

    Args:
        progress: is told of each stage.
        began: when the build did, by `time.perf_counter`.
        reports: of the stages that have ended well.
    """

    progress: Progress
    began: float
    reports: list[StageReport] = field(default_factory=list)

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Run one; nothing is reported of a stage that fails."""
        self.progress.start(stage)
        began = time.perf_counter()
        yield
        report = StageReport(
            stage=stage,
            seconds=time.perf_counter() - began,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
        self.reports.append(report)
        self.progress.finish(report)
