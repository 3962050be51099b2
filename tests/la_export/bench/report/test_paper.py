from __future__ import annotations

from la_export.bench.report.paper import SOURCE, beside_the_paper
from la_export.bench.speed.record import Selection
from tests.la_export.bench.report.records import make_bundle, make_record, make_run


def test_the_papers_figures_stand_above_ours_and_are_marked() -> None:
    speedups, acceptance = beside_the_paper(make_record())

    assert speedups.rows == (
        ("the paper's", "LLaMA-7B", "1.6x", "2.1x", "2.4x"),
        ("the paper's", "Qwen-7B", "1.5x", "2.0x", "2.3x"),
        ("the paper's", "DeepSeek-7B", "1.4x", "1.9x", "2.2x"),
        ("measured here", "tiny-int8, exact root-only", "1.50x (1.42–1.58)", "–", "–"),
        ("measured here", "tiny-int8, exact full", "–", "1.50x (1.42–1.58)", "–"),
    )
    assert acceptance.rows == (
        ("the paper's", "LLaMA-7B", "94.2%", "89.7%", "83.1%"),
        ("the paper's", "Qwen-7B", "93.1%", "88.3%", "81.4%"),
        # 250 of the 800 drafts that were tested.
        ("measured here", "tiny-int8, exact root-only", "31.2%", "–", "–"),
        ("measured here", "tiny-int8, exact full", "–", "31.2%", "–"),
    )
    assert speedups.columns == acceptance.columns == ("", "model", "k=2", "k=4", "k=8")
    assert SOURCE in speedups.note


def test_ways_of_selecting_have_rows_of_their_own() -> None:
    lossy = {"selection": Selection.THRESHOLD, "layout": None, "tau": 0.5, "lossless": False}
    runs = (make_run(2), make_run(8), make_run(2, **lossy), make_run(12))

    speedups, _ = beside_the_paper(make_record(make_bundle("a", decoding=runs)))

    cell = "1.50x (1.42–1.58)"
    assert speedups.rows[3:] == (
        ("measured here", "a, exact root-only", cell, "–", cell),
        ("measured here", "a, threshold", cell, "–", "–"),
    )
