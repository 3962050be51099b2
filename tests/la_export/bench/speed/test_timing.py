from __future__ import annotations

from collections import Counter

import pytest

from la_export.bench.speed.timing import Rounds, Samples, summarize

NOTHING = lambda done, total: None  # noqa: E731


def test_median_and_quartiles_are_those_of_the_samples() -> None:
    timing = summarize([0.005, 0.001, 0.004, 0.002, 0.003])

    assert (timing.low_ms, timing.median_ms, timing.high_ms) == pytest.approx((2.0, 3.0, 4.0))
    assert timing.samples == 5


def test_every_work_is_timed_once_a_round_and_the_first_of_a_group_runs_once_more() -> None:
    calls: Counter[str] = Counter()
    samples: Samples[str] = Samples()

    def work(name: str) -> float:
        calls[name] += 1
        return float(calls[name])

    groups = [{"a": lambda: work("a"), "b": lambda: work("b")}, {"c": lambda: work("c")}]
    samples.time_in_turn(groups, Rounds(least=4, most=4), report=NOTHING)

    assert [samples.timing(name).samples for name in "abc"] == [4, 4, 4]
    assert calls == {"a": 8, "b": 4, "c": 8}


def test_what_was_timed_before_an_interruption_stays() -> None:
    samples: Samples[str] = Samples()
    calls = iter(range(10))

    def work() -> float:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return 0.25

    with pytest.raises(KeyboardInterrupt):
        samples.time_in_turn([{"a": work}], Rounds(least=9, most=9), report=NOTHING)

    # Each round runs the work once untimed: of five calls two were timed.
    assert samples.timing("a").samples == 2
    assert samples.timing("a").median_ms == 250.0


def test_what_was_never_timed_has_no_timing() -> None:
    assert Samples().timing("a") is None


@pytest.mark.parametrize(
    ("done", "now", "goes_on"),
    [
        (2, 99.0, True),  # the least is due whatever the time
        (3, 99.0, False),
        (3, 4.0, True),
        (9, 4.0, False),
    ],
)
def test_rounds_end_with_the_time_but_not_before_the_least(
    done: int, now: float, goes_on: bool
) -> None:
    rounds = Rounds(least=3, most=9, deadline=5.0, clock=lambda: now)

    assert rounds.goes_on(done) is goes_on
