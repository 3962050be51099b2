"""What `la-export bench` makes of a finished run: the paper's tables, a report, a comparison."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from la_runtime.errors import ExitCode, HostError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from la_export.bench.report.tables import Table
    from la_export.bench.speed.record import SpeedRecord

__all__ = ["RunReport", "report_options", "show_record"]

_DRAWS: Final = "matplotlib"

_OPTIONS: Final = (
    click.option(
        "--report",
        "page",
        type=click.Path(path_type=Path),
        metavar="FILE.html",
        help="Write a page with tables and charts, and the charts as .svg and .png beside it.",
    ),
    click.option(
        "--compare",
        "older",
        type=click.Path(path_type=Path),
        metavar="OLD.json",
        help="Show what became better or worse since the run that wrote this; exit 1 if anything "
        "became worse by more than --tolerance.",
    ),
    click.option(
        "--tolerance",
        type=click.FloatRange(min=0),
        default=10,
        show_default=True,
        metavar="PERCENT",
        help="By how much a ratio or a count of tokens may be worse in --compare.",
    ),
    click.option(
        "--from",
        "result",
        type=click.Path(path_type=Path),
        metavar="RESULT.json",
        help="Show what an earlier run wrote instead of measuring BUNDLES.",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What is to be made of a run.

    Args:
        page: where the report is written, if anywhere.
        older: the run to compare with, if any.
        tolerance: see `comparison.compare`.
    """

    page: Path | None
    older: SpeedRecord | None
    tolerance: float

    def make(self, record: SpeedRecord, *, as_json: bool) -> None:
        """Print and write what was asked for; ends the command with 1 if figures regressed.

        Args:
            record: of the run.
            as_json: whether stdout has an object already, so that tables go to stderr.
        """
        from la_export.bench.report.comparison import compare
        from la_export.bench.report.paper import beside_the_paper
        from la_export.cli.console import make_console, make_output_console

        console = make_console(quiet=False) if as_json else make_output_console()
        if not as_json and any(bundle.decoding for bundle in record.bundles):
            _print_tables(beside_the_paper(record), console)
        comparison = None
        if self.older is not None:
            comparison = compare(self.older, record, tolerance=self.tolerance)
            _print_tables([comparison.table()], console)
        if self.page is not None:
            from la_export.bench.report.page import write_report

            write_report(self.page, record, comparison)
        if comparison is not None and comparison.regressed:
            click.get_current_context().exit(int(ExitCode.FAILED))


def report_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give the command the options of reports; they arrive as one argument, `report`.

    What cannot work is refused before the command runs. With ``--from`` it does not run at all.
    """

    @functools.wraps(command)
    def run(
        *,
        page: Path | None,
        older: Path | None,
        tolerance: float,
        result: Path | None,
        **given: Any,
    ) -> None:
        if page is not None:
            _check_page(page)
        if bool(given["bundles"]) is (result is not None):
            raise click.UsageError("Give either BUNDLES to measure or --from RESULT.json.")
        report = RunReport(
            page=page,
            older=None if older is None else _read(older),
            tolerance=tolerance / 100,
        )
        if result is None:
            command(report=report, **given)
            return
        record = _read(result)
        show_record(record, as_json=given["as_json"])
        report.make(record, as_json=given["as_json"])

    decorated: Callable[..., None] = run
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


def show_record(record: SpeedRecord, *, as_json: bool) -> None:
    """Print a record to stdout."""
    from la_export.cli.bench_tables import print_record
    from la_export.cli.console import make_output_console

    if as_json:
        click.echo(record.model_dump_json(indent=2))
    else:
        print_record(record, make_output_console())


def _read(path: Path) -> SpeedRecord:
    from la_export.bench.speed.record import read_record

    return read_record(path)


def _check_page(page: Path) -> None:
    """Refuse a report that could not be written, before the long work."""
    if importlib.util.find_spec(_DRAWS) is None:
        raise HostError(
            f"the package {_DRAWS}, which draws reports, is not installed; run: "
            "pip install 'lookahead-attention[report]'"
        )
    folder = page.absolute().parent
    if page.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"--report {page} cannot be written; give a file in a writable folder")


def _print_tables(tables: Iterable[Table], console: Console) -> None:
    from rich.table import Table as RichTable

    for table in tables:
        shown = RichTable(*table.columns, title=table.title)
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
        if table.note:
            console.print(table.note)
