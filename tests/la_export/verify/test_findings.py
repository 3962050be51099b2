"""What a rung finds, and what several ladders find together."""

from __future__ import annotations

import pytest

from la_export.verify.findings import Figure, RungResult, Status, join_results


def result(status: Status, detail: str = "", number: int = 3, value: float = 0.0) -> RungResult:
    return RungResult(
        number=number,
        name="epsilon",
        status=status,
        figures=(Figure(name="epsilon", value=value, bound=1.0),),
        detail=detail,
        seconds=1.5,
    )


def test_one_ladder_says_what_it_said():
    results = (result(Status.PASSED, "fine"), result(Status.SKIPPED, "no lookaheads", 4))

    assert join_results([("plan for k=2", results)]) == results


@pytest.mark.parametrize(
    ("statuses", "joined"),
    [
        ((Status.PASSED, Status.FAILED, Status.PASSED), Status.FAILED),
        ((Status.COULD_NOT_RUN, Status.FAILED, Status.PASSED), Status.FAILED),
        ((Status.PASSED, Status.COULD_NOT_RUN, Status.SKIPPED), Status.COULD_NOT_RUN),
        ((Status.SKIPPED, Status.PASSED, Status.SKIPPED), Status.PASSED),
        ((Status.SKIPPED, Status.SKIPPED, Status.SKIPPED), Status.SKIPPED),
    ],
)
def test_a_rung_ends_as_it_ended_worst(statuses, joined):
    climbed = [(f"plan for k={k}", (result(status),)) for k, status in enumerate(statuses)]

    assert join_results(climbed)[0].status is joined


def test_every_ladder_is_heard():
    climbed = [
        ("plan for k=2", (result(Status.PASSED, "fine", value=0.1),)),
        ("plan for k=4", (result(Status.FAILED, "a token differs", value=0.4),)),
    ]

    (joined,) = join_results(climbed)

    assert joined.detail == "plan for k=2: fine; plan for k=4: a token differs"
    assert [(f.name, f.value) for f in joined.figures] == [
        ("epsilon, plan for k=2", 0.1),
        ("epsilon, plan for k=4", 0.4),
    ]
    assert joined.seconds == 3.0
