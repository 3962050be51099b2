"""A verification in plain lines, for machines without rich."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import click

from la_export.verify.findings import RungResult, Status
from la_export.verify.ladder import LadderProgress, Rung
from la_export.verify.report import LadderReport, printable

__all__ = ["MARKS", "PlainOutput", "describe_rung"]

MARKS = {
    Status.PASSED: "passed",
    Status.FAILED: "FAILED",
    Status.SKIPPED: "skipped",
    Status.COULD_NOT_RUN: "could not run",
}


def describe_rung(result: RungResult) -> str:
    """A rung in one line; what it compared is said when it did not pass."""
    is_good = result.status is Status.PASSED
    why = "" if is_good else f"   {printable(result.detail)}"
    return (
        f"  {result.number:2} {result.name:<26} {MARKS[result.status]:<13} "
        f"{result.seconds:6.1f} s{why}"
    )


class PlainOutput:
    """See `output.Output`.

    Args:
        quiet: write nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._is_quiet = quiet

    def lines(self) -> AbstractContextManager[LadderProgress]:
        """See `Output.lines`."""
        return nullcontext(self)

    def start(self, rung: Rung) -> None:
        """See `LadderProgress.start`."""

    def finish(self, result: RungResult) -> None:
        """See `LadderProgress.finish`."""
        self.line(describe_rung(result))

    def ladder(self, report: LadderReport) -> None:
        """See `Output.ladder`; the rungs were said as they were climbed."""
        if report.departure:
            self.line(report.departure)

    def line(self, text: str) -> None:
        """See `Output.line`."""
        if not self._is_quiet:
            click.echo(text, err=True)
