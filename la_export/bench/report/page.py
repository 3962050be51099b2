"""The report of a run: one HTML file that needs no other, and its charts as files beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import jinja2
from markupsafe import Markup

from la_export.bench.report.charts import make_charts
from la_export.bench.report.comparison import Comparison
from la_export.bench.report.drawing import draw_png, draw_svg
from la_export.bench.report.paper import beside_the_paper
from la_export.bench.report.tables import make_tables
from la_export.bench.speed.record import SpeedRecord
from la_runtime.errors import HostError

__all__ = ["render_page", "write_report"]

_TEMPLATE: Final = "page.html"


def render_page(record: SpeedRecord, comparison: Comparison | None = None) -> str:
    """The page of a run.

    Args:
        record: of the run.
        comparison: with an older one, if it is to be shown.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    paper = beside_the_paper(record) if any(bundle.decoding for bundle in record.bundles) else ()
    return environment.get_template(_TEMPLATE).render(
        record=record,
        charts=[(chart, Markup(draw_svg(chart))) for chart in make_charts(record)],
        comparison=[] if comparison is None else [comparison.table()],
        paper=paper,
        tables=make_tables(record),
    )


def write_report(path: Path, record: SpeedRecord, comparison: Comparison | None = None) -> None:
    """Write the page to `path`, and beside it each chart as ``<stem>-<chart>.svg`` and ``.png``.

    Raises:
        HostError: a file cannot be written.
    """
    try:
        for chart in make_charts(record):
            beside = path.with_name(f"{path.stem}-{chart.name}")
            _write(beside.with_name(f"{beside.name}.svg"), draw_svg(chart).encode())
            _write(beside.with_name(f"{beside.name}.png"), draw_png(chart))
        _write(path, render_page(record, comparison).encode())
    except OSError as error:
        raise HostError(
            f"could not write the report {path}: {error.strerror or error}; free some space or "
            "choose another --report"
        ) from error


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
