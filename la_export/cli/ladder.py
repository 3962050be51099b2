"""A verification as people see it: a line a rung, and a table at the end."""

from __future__ import annotations

from rich.console import Console
from rich.status import Status as Spinner
from rich.table import Table

from la_export.cli.console import make_console
from la_export.cli.plain_ladder import MARKS, describe_rung
from la_export.verify.findings import RungResult
from la_export.verify.ladder import Rung
from la_export.verify.report import LadderReport, printable

__all__ = ["RichOutput"]


class RichOutput:
    """See `output.Output`.

    Args:
        quiet: write nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._console = make_console(quiet=quiet)

    def lines(self) -> _RungLines:
        """See `Output.lines`; in a terminal, the running one is shown too."""
        return _RungLines(self._console)

    def ladder(self, report: LadderReport) -> None:
        """See `Output.ladder`."""
        title = f"bundle {printable(str(report.bundle))}"
        table = Table("", "rung", "", "measured", "found", title=title)
        for result in report.results:
            table.add_row(
                str(result.number),
                result.name,
                MARKS[result.status],
                "\n".join(str(figure) for figure in result.figures),
                printable(result.detail),
            )
        self._console.print(table)
        if report.departure:
            self._console.print(report.departure)

    def line(self, text: str) -> None:
        """See `Output.line`."""
        self._console.print(text)


class _RungLines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._spinner: Spinner | None = None

    def __enter__(self) -> _RungLines:
        self._show("opening the bundle")
        return self

    def __exit__(self, *_: object) -> None:
        self._hide()

    def start(self, rung: Rung) -> None:
        self._show(f"{rung.number:2} {rung.name}")

    def finish(self, result: RungResult) -> None:
        self._hide()
        self._console.print(describe_rung(result))

    def _show(self, text: str) -> None:
        self._hide()
        if self._console.is_terminal and not self._console.quiet:
            self._spinner = self._console.status(text)
            self._spinner.start()

    def _hide(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None
