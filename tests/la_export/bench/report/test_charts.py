from __future__ import annotations

from la_export.bench.report.charts import (
    BarChart,
    Chart,
    Estimate,
    LineChart,
    LineKind,
    fastest_lossless,
    make_charts,
)
from la_export.bench.speed.record import OVERALL, PeerMode, Selection, SpeedRecord
from tests.la_export.bench.report.records import (
    make_answers,
    make_bundle,
    make_empty_record,
    make_interval,
    make_peer,
    make_record,
    make_run,
    make_step,
)


def _find(record: SpeedRecord, name: str) -> Chart:
    (chart,) = (chart for chart in make_charts(record) if chart.name == name)
    return chart


def _fast(k: int, rate: float, *, lossless: bool = True, speedup: float = 1.5) -> object:
    answers = make_answers(decode_tokens_per_s=rate, speedup=make_interval(speedup, spread=0.1))
    selection = Selection.EXACT if lossless else Selection.THRESHOLD
    tau = None if lossless else 0.5
    return make_run(k, answers=(answers,), lossless=lossless, selection=selection, tau=tau)


def test_fastest_way_is_the_fastest_that_loses_nothing() -> None:
    ways = (make_run(0), _fast(2, 70.0), _fast(4, 90.0), _fast(8, 200.0, lossless=False))

    found = fastest_lossless(make_bundle(decoding=ways))

    assert found is ways[2]
    assert fastest_lossless(make_bundle(decoding=ways[:1])) is None


def test_speedups_are_those_of_the_fastest_way_with_the_whole_last() -> None:
    slow, fast = _fast(2, 70.0), _fast(4, 90.0, speedup=2.0)
    record = make_record(
        make_bundle("a"), make_bundle("b", decoding=(make_run(0), slow, fast)), peers=()
    )

    chart = _find(record, "speedup")

    assert isinstance(chart, BarChart)
    assert chart.groups == ("writing", "math <&>", OVERALL)
    assert chart.reference == 1.0
    first, second = chart.bars
    assert (first.label, second.label) == ("a, k=2 root-only", "b, k=4 root-only")
    assert [value and value.value for value in first.values] == [1.25, 1.75, 1.5]
    assert second.values == (None, None, Estimate(value=2.0, low=1.8, high=2.2))


def test_step_times_have_every_row_scored_and_the_higher_of_both_ceilings() -> None:
    steps = (
        make_step(1, 10.0, weights_ms=8.0, operations_ms=2.0),
        make_step(9, 12.0, weights_ms=8.0, operations_ms=18.0),
        make_step(9, 11.0, scored_rows=5),
    )
    record = make_record(make_bundle("a", step_times=steps))

    chart = _find(record, "step-times")

    assert isinstance(chart, LineChart)
    measured, bound = chart.lines
    assert [(point.x, point.y.value) for point in measured.points] == [(1, 10.0), (9, 12.0)]
    assert measured.points[0].y == Estimate(value=10.0, low=9.8, high=10.2)
    assert [(point.x, point.y.value) for point in bound.points] == [(1, 8.0), (9, 18.0)]
    assert (measured.kind, bound.kind) == (LineKind.MEASURED, LineKind.BOUND)
    assert measured.color == bound.color


def test_step_times_without_measured_rates_have_no_ceiling() -> None:
    steps = (make_step(1, 10.0, weights_ms=None, operations_ms=None),)

    chart = _find(make_record(make_bundle(step_times=steps)), "step-times")

    assert isinstance(chart, LineChart)
    assert [line.kind for line in chart.lines] == [LineKind.MEASURED]


def test_acceptance_is_the_share_of_tested_drafts_at_each_position_of_the_longest_chain() -> None:
    chart = _find(make_record(), "acceptance")

    assert isinstance(chart, LineChart)
    (line,) = chart.lines
    assert line.label == "tiny-int8, k=4 full"
    assert [(point.x, point.y.value) for point in line.points] == [(1, 0.5), (2, 0.125)]


def test_growth_leaves_out_what_could_not_be_measured() -> None:
    chart = _find(make_record(), "growth-tiny-int8")

    assert isinstance(chart, LineChart)
    (line,) = chart.lines
    assert line.label == "batch 1, T = 1"
    assert [(point.x, point.y.value) for point in line.points] == [(0, 9.75), (512, 11.25)]


def test_programs_stand_side_by_side_plainly_and_at_their_best() -> None:
    best = make_peer(mode=PeerMode.BEST, figures=(make_answers(decode_tokens_per_s=43.0),))
    record = make_record(make_bundle("a"), peers=(make_peer(), best, make_peer(figures=())))

    chart = _find(record, "programs")

    assert isinstance(chart, BarChart)
    assert chart.groups == ("a", "other Q4_0")
    plain, fastest = chart.bars
    assert [value and value.value for value in plain.values] == [54.125, 41.75]
    assert [value and value.value for value in fastest.values] == [81.25, 43.0]


def test_nothing_measured_is_no_chart() -> None:
    assert make_charts(make_empty_record()) == ()
