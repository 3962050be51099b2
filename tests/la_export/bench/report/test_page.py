from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from la_export.bench.report.charts import make_charts
from la_export.bench.report.comparison import compare
from la_export.bench.report.page import render_page, write_report
from la_export.bench.report.paper import beside_the_paper
from la_export.bench.report.tables import make_tables
from la_runtime.errors import HostError
from tests.la_export.bench.report.records import make_bundle, make_empty_record, make_record

RECORD = make_record()


class _Page(HTMLParser):
    """What a browser finds: headings, rows of cells, links, identifiers, open elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.rows: list[list[str]] = []
        self.links: list[str] = []
        self.svgs = 0
        self._text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._text = ""
        self.svgs += tag == "svg"
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "td":
            self.rows[-1].append(self._text)
        elif tag in ("h1", "h2"):
            self.headings.append(self._text)


@pytest.fixture(scope="module")
def text() -> str:
    return render_page(RECORD)


def test_page_shows_the_figures_of_the_record_and_no_other(text: str) -> None:
    page = _Page(text)

    tables = (*beside_the_paper(RECORD), *make_tables(RECORD))
    assert [row for row in page.rows if row] == [
        list(row) for table in tables for row in table.rows
    ]
    assert page.headings == ["la-export bench", *(table.title for table in tables)]
    assert page.svgs == len(make_charts(RECORD))


def test_page_needs_no_other_file(text: str) -> None:
    assert all(link.startswith("#") for link in _Page(text).links)
    assert "<script" not in text
    assert "@import" not in text


def test_page_begins_with_the_comparison() -> None:
    record = make_empty_record()
    comparison = compare(RECORD, RECORD)

    page = _Page(render_page(record, comparison))

    assert page.headings[1] == comparison.table().title
    assert page.rows[1] == list(comparison.table().rows[0])


def test_names_are_shown_as_they_are() -> None:
    bundle = make_bundle("<b>&", decoding=(), growth=())

    text = render_page(make_record(bundle, peers=()))

    assert "<b>" not in text
    assert {row[0] for row in _Page(text).rows if row} == {"<b>&"}


def test_page_of_a_run_that_ended_early_says_so(text: str) -> None:
    assert "The run ended early" in render_page(make_empty_record())
    assert "The run ended early" not in text


def test_charts_lie_beside_the_page(tmp_path: Path) -> None:
    write_report(tmp_path / "speed.html", RECORD)

    names = {chart.name for chart in make_charts(RECORD)}
    expected = {f"speed-{name}.{kind}" for name in names for kind in ("svg", "png")}
    assert {path.name for path in tmp_path.iterdir()} == {"speed.html", *expected}
    assert (tmp_path / "speed-speedup.svg").read_text() in (tmp_path / "speed.html").read_text()


def test_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"could not write the report .*No such file.*--report"):
        write_report(tmp_path / "none" / "speed.html", make_empty_record())
