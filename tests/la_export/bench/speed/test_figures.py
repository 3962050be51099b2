from __future__ import annotations

import pytest

from la_export.bench.speed.figures import StepCurve, does_loop, make_decode_run, speedup
from la_export.bench.speed.record import OVERALL, Selection
from la_export.bench.speed.ways import PLAINLY, Way
from la_runtime.layout import Layout
from tests.la_export.bench.speed.answers import make_answer

STEADY = tuple(range(20))
LOOPING = (1, 2, 3, 4) * 4
K2 = Way(selection=Selection.EXACT, k=2, layout=Layout.ROOT_ONLY)
CURVE = StepCurve(milliseconds={1: 10.0, 3: 12.0, 7: 20.0})


@pytest.mark.parametrize(
    ("token_ids", "loops"),
    [
        (LOOPING, True),
        ((1, 2, 3, 4) * 3, False),
        ((1, 2, 3, 4, 9) * 4, True),
        ((7,) * 7, True),  # the same four tokens at four places
        ((7,) * 6, False),
        (STEADY, False),
        ((), False),
    ],
)
def test_an_answer_loops_when_four_tokens_come_up_four_times(
    token_ids: tuple[int, ...], loops: bool
) -> None:
    assert does_loop(token_ids) is loops


def test_speedup_is_the_ratio_of_summed_rates_within_its_interval() -> None:
    base = [make_answer(str(i), STEADY, decode_s=2.0) for i in range(8)]
    ours = [make_answer(str(i), STEADY, decode_s=1.0 + 0.1 * i) for i in range(8)]

    found = speedup(ours, base)

    assert found.value == pytest.approx(16.0 / sum(1.0 + 0.1 * i for i in range(8)))
    assert 2.0 / 1.7 < found.low < found.value < found.high < 2.0
    assert found.samples == 8


def test_a_prompt_keeps_its_answer_of_either_side_in_every_draw() -> None:
    base = [make_answer(str(i), STEADY, decode_s=1.0 + i) for i in range(8)]
    ours = [make_answer(str(i), STEADY, decode_s=(1.0 + i) / 3) for i in range(8)]

    found = speedup(ours, base)

    assert (found.low, found.value, found.high) == pytest.approx((3.0, 3.0, 3.0))


def test_there_is_no_speedup_without_tokens_behind_the_first() -> None:
    single = [make_answer("0", (5,), decode_s=0.0)]

    assert speedup(single, single) is None


@pytest.mark.parametrize(
    ("rows", "relative"), [(1, 1.0), (2, 1.1), (3, 1.2), (5, 1.6), (7, 2.0), (7.5, None)]
)
def test_the_curve_is_straight_between_what_was_measured_and_ends_there(
    rows: float, relative: float | None
) -> None:
    assert CURVE.relative(rows) == (None if relative is None else pytest.approx(relative))


def _answers():
    plain = {
        "a": make_answer("a", STEADY, decode_s=1.9),
        "b": make_answer("b", LOOPING, decode_s=1.5, category="rag"),
    }
    ahead = {
        "a": make_answer("a", STEADY, decode_s=1.0, k=2, passes=10, accepted=(6, 3)),
        "b": make_answer(
            "b", LOOPING, decode_s=0.5, category="rag", k=2, passes=5, accepted=(5, 5)
        ),
    }
    return plain, ahead


def test_figures_of_one_way_by_hand() -> None:
    plain, ahead = _answers()

    run = make_decode_run(K2, answers=ahead, plain=plain, base=plain, curve=CURVE, ceiling=None)

    qa, rag, overall = run.answers
    assert [qa.category, rag.category, overall.category] == ["qa", "rag", OVERALL]
    assert qa.decode_tokens_per_s == pytest.approx(19 / 1.0)
    assert qa.speedup.value == pytest.approx(1.9)
    assert rag.tokens_per_pass == pytest.approx(15 / 5)
    assert overall.samples == 2
    assert overall.tokens == 36
    assert overall.end_to_end_tokens_per_s == pytest.approx(36 / (0.5 + 1.0 + 0.5 + 0.5))
    assert overall.tokens_per_pass == pytest.approx(34 / 15)
    assert overall.rows_per_pass == pytest.approx(5.0)
    assert overall.yielded == pytest.approx(34 / 15 / 1.6)
    assert [p.share for p in overall.accepted] == pytest.approx([11 / 15, 8 / 15])
    assert (overall.equal, overall.looping) == (2, 1)


def test_figures_without_loops_leave_the_looping_prompt_out_on_both_sides() -> None:
    plain, ahead = _answers()

    run = make_decode_run(K2, answers=ahead, plain=plain, base=plain, curve=CURVE, ceiling=None)

    qa, overall = run.without_loops
    assert qa.model_copy(update={"category": OVERALL}) == overall
    assert (overall.samples, overall.looping) == (1, 0)
    assert overall.speedup.value == pytest.approx(1.9)


def test_an_answer_that_differs_from_plain_is_not_counted_as_equal() -> None:
    plain, ahead = _answers()
    ahead["a"] = make_answer("a", (*STEADY[:-1], 999), decode_s=1.0, k=2)

    run = make_decode_run(K2, answers=ahead, plain=plain, base=plain, curve=CURVE, ceiling=None)

    assert run.overall.equal == 1


def test_only_questions_that_every_side_has_answered_are_compared() -> None:
    plain, ahead = _answers()
    del ahead["b"]

    run = make_decode_run(K2, answers=ahead, plain=plain, base=plain, curve=CURVE, ceiling=None)

    assert run.overall.samples == 1
    assert run.overall.speedup.value == pytest.approx(1.9)


def test_a_slower_plain_decoding_has_a_speedup_and_the_fastest_has_none() -> None:
    plain, _ = _answers()
    slower = {name: make_answer(name, STEADY, decode_s=3.8) for name in plain}

    def run(answers):
        return make_decode_run(
            PLAINLY, answers=answers, plain=answers, base=plain, curve=CURVE, ceiling=None
        )

    assert run(plain).overall.speedup is None
    assert run(slower).overall.speedup.value < 1


def test_the_ceiling_is_tokens_per_pass_over_the_least_time_of_a_pass() -> None:
    plain, ahead = _answers()
    asked = []

    def ceiling(rows: float, past: float) -> float:
        asked.append((rows, past))
        return 0.01

    run = make_decode_run(K2, answers=ahead, plain=plain, base=plain, curve=CURVE, ceiling=ceiling)

    assert run.overall.ceiling_tokens_per_s == pytest.approx(34 / 15 / 0.01)
    assert asked[2] == pytest.approx((5.0, 10 + 36 / 2 / 2))
