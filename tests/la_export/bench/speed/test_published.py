from __future__ import annotations

from pathlib import Path

from la_export.bench.results import write_result
from la_export.bench.speed.published import make_tables
from la_export.bench.speed.record import Section
from la_export.bench.tables import render_table
from tests.la_export.bench.speed.records import make_record


def _rows(name: str):
    (table,) = (table for table in make_tables(make_record()) if table.name == name)
    return table.rows


def test_every_table_can_be_written_and_shown(tmp_path: Path) -> None:
    for table in make_tables(make_record()):
        result = write_result(
            tmp_path / f"{table.name}.json",
            command="scripts/bench_speed engines/tiny",
            columns=table.columns,
            rows=table.rows,
        )

        assert "| tiny |" in render_table(result)


def test_step_times_stand_beside_their_ratio_and_the_verified_rows_alone() -> None:
    one, five = _rows("speed_steps")

    assert (one["median_ms"], one["relative"]) == (10.0, 1.0)
    assert (five["median_ms"], five["relative"], five["verified_ms"]) == (15.0, 1.5, 14.0)


def test_decoding_rows_are_the_overall_figures() -> None:
    plain, ahead = _rows("speed")

    assert (plain["way"], plain["speedup"]) == ("plain", None)
    assert (ahead["way"], ahead["speedup"], ahead["tokens_per_pass"]) == ("k=2 root-only", 2.0, 2.0)


def test_a_point_that_was_not_measured_says_why() -> None:
    measured, absent = _rows("speed_growth")

    assert (measured["median_ms"], measured["absent"]) == (9.0, None)
    assert (absent["median_ms"], absent["absent"]) == (None, "the context is 256")


def test_shared_memory_is_that_of_each_process() -> None:
    figures = {row["figure"]: row["value"] for row in _rows("speed_bundles")}

    assert figures["PSS of a process"] == 5.0
    assert figures["PSS of each of 2 at the same time"] == 3.5


def test_tables_of_what_was_not_measured_are_left_out() -> None:
    names = {table.name for table in make_tables(make_record())}

    assert "speed_transient" not in names


def test_a_run_without_memory_leaves_the_table_of_bundles_alone() -> None:
    record = make_record()
    settings = record.settings.model_copy(update={"sections": (Section.DECODING,)})

    names = {table.name for table in make_tables(record.model_copy(update={"settings": settings}))}

    assert "speed" in names
    assert "speed_bundles" not in names
