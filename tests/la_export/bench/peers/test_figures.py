from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from la_export.bench.peers.contest import Standing
from la_export.bench.peers.entries import Field
from la_export.bench.peers.figures import (
    lap_rows,
    make_columns,
    make_rows,
    make_runs,
    paired_ratio,
    quartiles,
)
from la_export.bench.peers.process import PeerAnswer
from la_export.bench.peers.race import Alone, Lap
from la_export.bench.results import write_result
from la_export.bench.speed.record import OVERALL, PeerMode
from tests.la_export.bench.peers.stands import fake_contestant, prompt


def lap(
    contestant: str,
    *,
    decode_s: float,
    tokens: int = 11,
    name: str = "a",
    category: str = "qa",
    round_index: int = 0,
) -> Lap:
    answer = PeerAnswer(
        token_ids=tuple(range(tokens)),
        first_tokens=1,
        ttft_s=0.5,
        decode_s=decode_s,
        total_s=0.5 + decode_s,
        pss_bytes=2_000_000,
        peak_rss_bytes=3_000_000,
    )
    asked = prompt(1, name=name, category=category)
    return Lap(contestant=contestant, round_index=round_index, prompt=asked, answer=answer)


def standing_of() -> Standing:
    ours, theirs, gone = (fake_contestant(name) for name in ("ours", "theirs", "gone"))
    alone = Alone(
        version="1",
        build="none",
        open_s=1.0,
        pss_bytes=2_000_000,
        peak_rss_bytes=3_000_000,
        perplexity_own=7.5,
        perplexity_pages=None,
    )
    return Standing(
        field=Field(
            entries=(ours.entry, theirs.entry, gone.entry), contestants=(ours, theirs), absent={}
        ),
        alone={ours.name: alone, theirs.name: alone},
        laps={
            ours.name: (
                lap(ours.name, decode_s=1.0),
                lap(ours.name, decode_s=1.0, name="b", category="math"),
            ),
            theirs.name: (
                lap(theirs.name, decode_s=2.0),
                lap(theirs.name, decode_s=4.0, name="b", category="math"),
            ),
            gone.name: (),
        },
        absent={gone.name: "it has no wheel"},
    )


def test_quartiles_of_one_value_are_that_value() -> None:
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([]) is None
    assert quartiles([5.0, 1.0, 4.0, 2.0, 3.0]) == (2.0, 3.0, 4.0)


def test_decoding_speed_leaves_out_the_first_tokens() -> None:
    assert lap("x", decode_s=2.0, tokens=11).decode_tokens_per_s == 5.0
    assert lap("x", decode_s=0.0, tokens=1).decode_tokens_per_s is None


def test_ratios_are_over_the_same_prompt_in_the_same_round() -> None:
    ours = [lap("x", decode_s=1.0), lap("x", decode_s=1.0, round_index=1)]
    theirs = [lap("y", decode_s=3.0, round_index=1), lap("y", decode_s=2.0, name="other")]

    assert paired_ratio(ours, theirs) == pytest.approx(3.0)
    assert paired_ratio(ours, []) is None


def test_rows_hold_medians_and_name_the_absent() -> None:
    standing = standing_of()
    reference = {PeerMode.PLAIN: standing.field.entries[0].name}

    ours, theirs, gone = make_rows(standing, reference)

    assert (ours["decode"], ours["ours_over_this"]) == (10.0, 1.0)
    assert (theirs["decode"], theirs["ours_over_this"]) == (3.75, 3.0)
    assert (theirs["decode_low"], theirs["decode_high"]) == (3.125, 4.375)
    assert (theirs["ttft_ms"], theirs["pss_mb"], theirs["perplexity_own"]) == (500.0, 2.0, 7.5)
    assert gone["decode"] is None
    assert gone["absent"] == "it has no wheel"


def test_rows_fill_every_column_of_the_result(tmp_path: Path) -> None:
    standing = standing_of()
    rows = make_rows(standing, {PeerMode.PLAIN: standing.field.entries[0].name})

    result = write_result(
        tmp_path / "peers.json",
        command="scripts/bench_peers",
        columns=make_columns(standing),
        rows=rows,
    )

    assert len(result.rows) == 3


def test_reasons_have_a_column_only_if_somebody_is_absent() -> None:
    standing = standing_of()

    assert make_columns(standing)[-1].key == "absent"
    assert "absent" not in {column.key for column in make_columns(replace(standing, absent={}))}


def test_records_have_each_category_and_all_together() -> None:
    ours, theirs, gone = make_runs(standing_of(), threads=2)

    assert [one.category for one in theirs.figures] == ["qa", "math", OVERALL]
    assert [one.decode_tokens_per_s for one in theirs.figures] == [5.0, 2.5, pytest.approx(20 / 6)]
    assert theirs.figures[-1].tokens == 22
    assert (ours.perplexity, ours.pss_bytes, ours.threads) == (7.5, 2_000_000, 2)
    assert (gone.absent, gone.version, gone.figures) == ("it has no wheel", None, ())


def test_every_answer_is_kept() -> None:
    (row,) = lap_rows([lap("x", decode_s=2.0)])

    assert (row["contestant"], row["round"], row["tokens"]) == ("x", 1, 11)
