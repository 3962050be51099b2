from __future__ import annotations

from typing import Any

import pytest

from la_export.bench.report.comparison import Comparison, Verdict, compare
from la_export.bench.speed.record import SpeedRecord
from tests.la_export.bench.report.records import (
    make_answers,
    make_bundle,
    make_interval,
    make_record,
    make_run,
    make_step,
)

SPEEDUP = "b, k=2 root-only: speedup"
PER_PASS = "b, k=2 root-only: tokens per pass"
YIELD = "b, k=2 root-only: yield"


def _record(*, nine: float = 12.0, one: float = 10.0, **answers: Any) -> SpeedRecord:
    steps = (make_step(1, one), make_step(9, nine))
    run = make_run(2, answers=(make_answers(**answers),))
    return make_record(make_bundle("b", step_times=steps, decoding=(make_run(0), run)))


def _verdicts(comparison: Comparison) -> dict[str, Verdict]:
    return {change.name: change.verdict for change in comparison.changes}


def test_a_run_is_as_good_as_itself() -> None:
    comparison = compare(_record(), _record())

    assert set(_verdicts(comparison).values()) == {Verdict.STEADY, Verdict.NOT_JUDGED}
    assert comparison.regressed == ()
    assert comparison.missing == comparison.added == comparison.notes == ()


@pytest.mark.parametrize(
    ("value", "spread", "verdict"),
    [
        (1.3, 0.02, Verdict.REGRESSED),
        (1.7, 0.02, Verdict.IMPROVED),
        (1.4, 0.02, Verdict.STEADY),
        (1.6, 0.02, Verdict.STEADY),
        (1.3, 0.2, Verdict.NOISE),
    ],
)
def test_speedup_has_to_leave_both_tolerance_and_interval(
    value: float, spread: float, verdict: Verdict
) -> None:
    new = _record(speedup=make_interval(value, spread))

    comparison = compare(_record(speedup=make_interval(1.5, 0.02)), new)

    assert _verdicts(comparison)[SPEEDUP] is verdict
    assert [change.name for change in comparison.regressed] == (
        [SPEEDUP] if verdict is Verdict.REGRESSED else []
    )


def test_tolerance_decides() -> None:
    old = _record(speedup=make_interval(1.5, 0.02))
    new = _record(speedup=make_interval(1.4, 0.02))

    assert compare(old, new, tolerance=0.05).regressed
    assert not compare(old, new, tolerance=0.1).regressed


@pytest.mark.parametrize(
    ("nine", "verdict"),
    [(15.0, Verdict.REGRESSED), (9.0, Verdict.IMPROVED), (12.5, Verdict.STEADY)],
)
def test_a_wide_step_is_better_the_less_it_costs_over_a_narrow_one(
    nine: float, verdict: Verdict
) -> None:
    assert _verdicts(compare(_record(), _record(nine=nine)))["b: L(9)/L(1)"] is verdict


def test_a_machine_that_is_slower_in_everything_is_no_regression() -> None:
    slower = _record(one=30.0, nine=36.0, decode_tokens_per_s=27.0, ttft_s=0.5)

    comparison = compare(_record(), slower)

    assert comparison.regressed == ()
    changes = {change.name: change for change in comparison.changes}
    assert changes["b: L(1), ms"].relative == pytest.approx(2.0)
    assert changes["b: L(1), ms"].verdict is Verdict.NOT_JUDGED
    assert changes["b: k=2 root-only, decode tokens/s"].verdict is Verdict.NOT_JUDGED


def test_tokens_per_pass_have_no_noise() -> None:
    comparison = compare(_record(tokens_per_pass=2.0), _record(tokens_per_pass=1.7))

    assert _verdicts(comparison)[PER_PASS] is Verdict.REGRESSED


def test_yield_is_as_unsure_as_the_step_times_are() -> None:
    # Quartiles 2 % from their median leave a ratio of times 4 % unsure on either side.
    within = compare(_record(yielded=1.5), _record(yielded=1.4), tolerance=0.05)
    beyond = compare(_record(yielded=1.5), _record(yielded=1.3), tolerance=0.05)

    assert _verdicts(within)[YIELD] is Verdict.NOISE
    assert _verdicts(beyond)[YIELD] is Verdict.REGRESSED


@pytest.mark.parametrize(
    ("setting", "value", "judged"),
    [
        ("prompts_sha256", "ef" * 32, {"b: L(9)/L(1)"}),
        ("new_tokens", 64, {"b: L(9)/L(1)"}),
        ("threads", 1, set()),
    ],
)
def test_figures_of_something_else_are_not_judged(
    setting: str, value: object, judged: set[str]
) -> None:
    new = _record(speedup=make_interval(0.5), tokens_per_pass=1.0)
    settings = new.settings.model_copy(update={setting: value})

    comparison = compare(_record(), new.model_copy(update={"settings": settings}))

    assert comparison.regressed == ()
    verdicts = _verdicts(comparison)
    assert {name for name, found in verdicts.items() if found is not Verdict.NOT_JUDGED} == judged
    assert len(comparison.notes) == 1
    assert comparison.notes[0] in comparison.table().note


def test_what_only_one_run_has_is_named() -> None:
    old = make_record(make_bundle("a", decoding=(), memory=None, step_times=(make_step(1, 9.0),)))

    comparison = compare(old, _record())

    assert comparison.changes == ()
    assert comparison.missing == ("a: L(1), ms",)
    assert SPEEDUP in comparison.added
    assert "missing now: a: L(1), ms" in comparison.table().note


def test_table_begins_with_what_regressed() -> None:
    old, new = _record(tokens_per_pass=1.0), _record(nine=15.0, tokens_per_pass=2.0)

    rows = compare(old, new).table().rows

    assert rows[0] == (
        *("b: L(9)/L(1)", "lower", "1.200 (1.153–1.249)", "1.500 (1.441–1.561)", "+25.0%"),
        "regressed",
    )
    assert (rows[1][0], rows[1][-2:]) == (PER_PASS, ("+100.0%", "improved"))
