from __future__ import annotations

from pathlib import Path

import pytest

from la_export.bench.results import Cell, Column, Machine, Result, read_result, write_result
from la_export.bench.tables import fill_tables, render_table
from la_runtime.errors import UsageError

COLUMNS = (
    Column(key="what", title="What"),
    Column(key="count", title="Count"),
    Column(key="ratio", title="Ratio", digits=1),
    Column(key="equal", title="Equal"),
)
ROW: dict[str, Cell] = {"what": "a|b", "count": 12345, "ratio": 2.25, "equal": True, "hidden": 1}
TABLE = """\
| What | Count | Ratio | Equal |
| --- | ---: | ---: | ---: |
| a\\|b | 12,345 | 2.2 | yes |
| c | – | 0.0 | no |

<sub>`scripts/x --all`, 2026-01-02, A CPU, 2 cores</sub>"""


def _make_result() -> Result:
    return Result(
        command="scripts/x --all",
        utc="2026-01-02T03:04:05Z",
        machine=Machine(cpu="A CPU", cores=2),
        versions={"python": "3.11.7"},
        columns=COLUMNS,
        rows=(ROW, {"what": "c", "count": None, "ratio": 0.0, "equal": False}),
    )


def test_a_table_shows_the_columns_in_order_and_its_source() -> None:
    assert render_table(_make_result()) == TABLE


def test_only_what_stands_between_markers_is_replaced() -> None:
    text = "before\n<!-- table:x -->\nstale\n<!-- /table:x -->\nafter <!-- other -->\n"

    filled = fill_tables(text, {"x": _make_result()})

    assert filled == (
        f"before\n<!-- table:x -->\n{TABLE}\n<!-- /table:x -->\nafter <!-- other -->\n"
    )
    assert fill_tables(filled, {"x": _make_result()}) == filled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table:x -->", "table 'x' is not closed"),
        ("<!-- /table:x -->", "marker <!-- /table:x --> stands alone"),
        ("<!-- table:x --><!-- table:y -->", "marker <!-- table:y --> stands alone"),
        ("<!-- table:x --><!-- /table:y -->", "marker <!-- /table:y --> stands alone"),
        ("<!-- table:y --><!-- /table:y -->", "no result file for table 'y' .* there are: x"),
    ],
)
def test_a_marker_without_its_pair_or_its_result_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fill_tables(text, {"x": _make_result()})


def test_a_written_result_reads_back_with_machine_and_versions(tmp_path: Path) -> None:
    path = tmp_path / "results" / "x.json"

    written = write_result(
        path, command="scripts/x", columns=COLUMNS, rows=[ROW], facts={"prompts": 48}
    )

    assert read_result(path) == written
    assert written.rows == (ROW,)
    assert written.machine.cores >= 1
    assert {"python", "torch"} <= written.versions.keys()
    assert [entry.name for entry in path.parent.iterdir()] == ["x.json"]


def test_a_row_without_a_column_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a row of x\.json lacks the column 'ratio'"):
        write_result(
            tmp_path / "x.json",
            command="scripts/x",
            columns=COLUMNS,
            rows=[{"what": "", "count": 1}],
        )

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["{", "{}", '{"surprise": 1}'])
def test_a_file_in_another_format_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)

    with pytest.raises(UsageError, match=r"x\.json is no result file"):
        read_result(path)
