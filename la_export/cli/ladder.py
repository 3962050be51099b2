"""A verification as people see it: a line a rung, and a table at the end."""

from __future__ import annotations

from rich.console import Console
from rich.status import Status as Spinner
from rich.table import Table

from la_export.verify.findings import RungResult, Status
from la_export.verify.ladder import Rung
from la_export.verify.report import LadderReport

__all__ = ["RungLines", "print_ladder"]

_MARKS = {
    Status.PASSED: "passed",
    Status.FAILED: "FAILED",
    Status.SKIPPED: "skipped",
    Status.COULD_NOT_RUN: "could not run",
}


class RungLines:
    """Progress as one line a rung; in a terminal, the running one is shown too.

    Args:
        console: where to write.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._spinner: Spinner | None = None

    def __enter__(self) -> RungLines:
        self._show("opening the bundle")
        return self

    def __exit__(self, *_: object) -> None:
        self._hide()

    def start(self, rung: Rung) -> None:
        self._show(f"{rung.number:2} {rung.name}")

    def finish(self, result: RungResult) -> None:
        self._hide()
        is_good = result.status is Status.PASSED
        why = "" if is_good else f"   {result.detail}"
        self._console.print(
            f"  {result.number:2} {result.name:<26} {_MARKS[result.status]:<13} "
            f"{result.seconds:6.1f} s{why}"
        )

    def _show(self, text: str) -> None:
        self._hide()
        if self._console.is_terminal and not self._console.quiet:
            self._spinner = self._console.status(text)
            self._spinner.start()

    def _hide(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None


def print_ladder(report: LadderReport, console: Console) -> None:
    """Print the table: what each rung measured, against what, and what it compared."""
    table = Table("", "rung", "", "measured", "found", title=f"bundle {report.bundle}")
    for result in report.results:
        table.add_row(
            str(result.number),
            result.name,
            _MARKS[result.status],
            "\n".join(str(figure) for figure in result.figures),
            result.detail,
        )
    console.print(table)
    if report.departure:
        console.print(report.departure)
