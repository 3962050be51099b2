from __future__ import annotations

import pytest

from la_export.bench.report.tables import NOTHING, Table, make_tables
from tests.la_export.bench.report.records import make_empty_record, make_record

TABLES = {table.title: table for table in make_tables(make_record())}


def _rows(title: str) -> list[tuple[str, ...]]:
    return list(TABLES[title].rows)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
def test_every_row_has_a_cell_for_every_column(table: Table) -> None:
    assert {len(row) for row in table.rows} == {len(table.columns)}


def test_decoding_shows_the_whole_of_every_way_and_the_same_without_loops() -> None:
    plain, first, second = _rows("Decoding, all answers")

    assert first == (
        *("tiny-int8", "k=2 root-only", "81.2", "77.5", "0.125", "123.5", "1.75", "8.5"),
        *("1.50x (1.42–1.58)", "1.62", "7 of 8", "1 of 8"),
    )
    assert plain[1:3] == ("plain", "54.1")
    assert plain[8] == NOTHING
    assert second[1] == "k=4 full"
    steady = _rows("Decoding, answers that do not loop")
    assert {(row[2], row[-1]) for row in steady} == {("79.8", "0 of 8")}


def test_categories_stand_apart() -> None:
    found = [row[2] for row in _rows("Decoding by category")]

    assert found == ["writing", "math <&>"] * 3


def test_step_times_are_told_with_their_ratio_and_their_ceilings() -> None:
    first, second, _ = _rows("L(T): one exact step of T rows")

    assert first == ("tiny-int8", "1", "10.25 (10.04–10.46)", "1.00", NOTHING, "7.25", "0.50")
    assert second == (
        *("tiny-int8", "9", "12.25 (12.00–12.50)", "1.20", "11.50 (11.27–11.73)", "7.25", "4.50"),
    )


def test_absent_peers_and_points_are_named_with_the_reason() -> None:
    present, absent = _rows("Other programs on the same prompts")
    growth = _rows("A step as cache and batch grow")

    assert present == (
        *("other", "4.5.6", "Q4_0", "greedy", "2", "41.8", "39.2", "0.375", NOTHING, "105.5"),
        *("-O3", ""),
    )
    assert (absent[0], absent[-1]) == ("gone", "it is not installed")
    assert growth[-1] == ("tiny-int8", "16", "1", "512", NOTHING, "no memory is free")


def test_memory_and_thrown_away_rows_are_shown_in_full() -> None:
    assert _rows("A process with the bundle open") == [
        ("tiny-int8", "0.62", "301.5", "402.5", "201.5 + 202.5")
    ]
    assert _rows("K/V that a step throws away, at most, of the cache") == [
        ("tiny-int8", "2", "root-only", "4", "2", "0.1", "1.6%", "201 tokens")
    ]


def test_nothing_measured_leaves_the_bundles_alone() -> None:
    assert [table.title for table in make_tables(make_empty_record())] == ["Bundles"]
