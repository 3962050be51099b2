from __future__ import annotations

import pytest

from la_export.bench.gpu.steps import Outcome, Progress, Status, Step, StepError, run_steps


class Clock:
    """Goes on only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def run(steps: list[Step], clock: Clock, *, deadline: float | None = None) -> Progress:
    return run_steps(steps, clock=clock, deadline=deadline, report=lambda *_: None)


def step(name: str, *, clock: Clock | None = None, takes: float = 0.0, **options) -> Step:
    """A step that takes a time by the clock and finds its own name."""

    def work(_: Progress, __: float) -> dict[str, str]:
        if clock is not None:
            clock.now += takes
        return {"is": name}

    return Step(name=name, **({"usual_s": takes, "run": work} | options))


def statuses(progress: Progress) -> dict[str, str]:
    return {name: outcome.status.value for name, outcome in progress.outcomes.items()}


def test_each_step_is_run_in_order_and_leaves_what_it_found(clock) -> None:
    progress = run([step("a", clock=clock, takes=3.0), step("b")], clock)

    assert list(progress.outcomes) == ["a", "b"]
    assert progress.found("a") == {"is": "a"}
    assert progress.outcomes["a"].seconds == 3.0
    assert progress.is_done("b")


def test_a_step_that_fails_stops_only_those_that_need_it(clock) -> None:
    def fail(_: Progress, __: float) -> dict[str, object]:
        clock.now += 2.0
        raise StepError("it broke", {"half": 1})

    progress = run(
        [step("a", run=fail), step("b", needs=("a",)), step("c", needs=("b",)), step("d")], clock
    )

    assert statuses(progress) == {"a": "failed", "b": "not_run", "c": "not_run", "d": "done"}
    assert progress.outcomes["a"] == Outcome(
        name="a", status=Status.FAILED, why="it broke", seconds=2.0, found={"half": 1}
    )
    assert progress.outcomes["b"].why == "it needs 'a': it broke"
    assert progress.outcomes["c"].why == "it needs 'b': it needs 'a': it broke"


def test_an_obstacle_is_asked_of_what_is_known_then(clock) -> None:
    def obstacle(progress: Progress) -> str:
        return "no GPU" if progress.found("look") == {"is": "look"} else ""

    progress = run(
        [step("early", obstacle=obstacle), step("look"), step("late", obstacle=obstacle)], clock
    )

    assert statuses(progress) == {"early": "done", "look": "done", "late": "not_run"}
    assert progress.outcomes["late"].why == "no GPU"


def test_what_no_longer_fits_is_left_out_and_said_and_what_does_is_run(clock) -> None:
    steps = [
        step("a", clock=clock, takes=50.0),
        step("long", clock=clock, takes=20.0),
        step("short", clock=clock, takes=5.0),
    ]

    progress = run(steps, clock, deadline=160.0)

    assert statuses(progress) == {"a": "done", "long": "not_run", "short": "done"}
    assert progress.outcomes["long"].why == "it takes about 20 s, and 10 s are left"


def test_a_step_may_take_what_is_left_and_no_more_than_three_times_what_is_usual(clock) -> None:
    limits = []

    def note(_: Progress, limit_s: float) -> dict[str, object]:
        limits.append(limit_s)
        return {}

    for deadline in (None, 130.0, 1000.0):
        run([step("a", run=note, usual_s=20.0)], clock, deadline=deadline)

    assert limits == [60.0, 30.0, 60.0]

    run([step("short", run=note, usual_s=1.0)], clock)
    assert limits.pop() == 60.0, "its libraries may take as long to load"


@pytest.mark.parametrize(
    ("later", "limit"),
    [
        ([], 60.0),
        ([{"usual_s": 45.0}], 55.0),
        ([{"usual_s": 40.0}, {"usual_s": 40.0}], 50.0),
        ([{"usual_s": 500.0}], 50.0),
        ([{"usual_s": 50.0, "obstacle": lambda _: "no GPU"}], 60.0),
        ([{"usual_s": 50.0, "needs": ("failed",)}], 60.0),
    ],
)
def test_a_step_leaves_to_later_ones_that_may_run_what_they_need_or_half_of_the_time(
    clock, later: list[dict], limit: float
) -> None:
    limits = []

    def note(_: Progress, limit_s: float) -> dict[str, object]:
        limits.append(limit_s)
        return {}

    def fail(_: Progress, __: float) -> dict[str, object]:
        raise StepError("it broke")

    steps = [step("failed", run=fail), step("a", run=note, usual_s=20.0)]
    steps += [step(str(index), **options) for index, options in enumerate(later)]
    run(steps, clock, deadline=200.0)

    assert limits == [limit]


def test_whoever_watches_is_told_before_and_after_what_is_run_and_after_what_is_not(clock) -> None:
    told = []

    def report(progress: Progress, outcome: Outcome | None, about: Step) -> None:
        status = None if outcome is None else outcome.status.value
        told.append((about.name, status, list(progress.outcomes)))

    run_steps(
        [step("a"), step("b", obstacle=lambda _: "no")],
        clock=clock,
        deadline=None,
        report=report,
    )

    assert told == [("a", None, []), ("a", "done", ["a"]), ("b", "not_run", ["a", "b"])]


def test_any_exception_is_how_its_step_ended_and_the_rest_goes_on(clock) -> None:
    def full(_: Progress, __: float) -> dict[str, object]:
        raise OSError(28, "No space left on device")

    progress = run([step("a", run=full), step("b")], clock)

    assert statuses(progress) == {"a": "failed", "b": "done"}
    assert progress.outcomes["a"].why == "OSError: [Errno 28] No space left on device"


def test_a_step_that_finds_out_that_it_cannot_be_run_has_not_failed(clock) -> None:
    def refuse(_: Progress, __: float) -> dict[str, object]:
        raise StepError("no GPU", status=Status.NOT_RUN)

    progress = run([step("a", run=refuse)], clock)

    assert statuses(progress) == {"a": "not_run"}
