from __future__ import annotations

import pytest

from la_export.bench.gpu.steps import Outcome, Progress, Status
from la_export.bench.gpu.summary import exit_code, find_bandwidth, list_decoding, list_steps
from la_runtime.errors import ExitCode

GPU = {"section": "GPU", "name": "NVIDIA H200", "verdict": "ok", "found": "SM90"}
TIMED = {
    "read_bytes": 4_000_000,
    "decoding": [
        {
            "k": 0,
            "tokens_per_s": 100.0,
            "tokens_per_pass": 1.0,
            "ms_per_pass": 10.0,
            "past": 100,
            "read_bytes": 4_000_000,
            "same_tokens_as_plain": True,
        },
        {
            "k": 4,
            "tokens_per_s": 150.0,
            "tokens_per_pass": 2.0,
            "ms_per_pass": 13.0,
            "past": 100,
            "read_bytes": 5_000_000,
            "same_tokens_as_plain": True,
        },
    ],
    "steps": [
        {"k": 0, "layout": "root-only", "rows": 1, "best_ms": 8.0, "median_ms": 9.0},
        {"k": 4, "layout": "full", "rows": 25, "best_ms": 12.0, "median_ms": 13.0},
    ],
}


def progress(**outcomes: Outcome | dict) -> Progress:
    found = Progress()
    for key, outcome in outcomes.items():
        name = key.replace("_", " ")
        if isinstance(outcome, dict):
            outcome = Outcome(name=name, status=Status.DONE, found=outcome)
        found.outcomes[name] = outcome
    return found


def ended(status: Status) -> Outcome:
    return Outcome(name="x", status=status, why="for some reason")


def test_a_measured_bandwidth_goes_before_a_listed_one() -> None:
    doctor = {"findings": [GPU]}

    assert find_bandwidth(progress(doctor=doctor)) == (4.8e12, "listed by NVIDIA")
    measured = {"bytes_per_s": 4e12, "through": "torch"}
    assert find_bandwidth(progress(doctor=doctor, bandwidth=measured)) == (
        4e12,
        "measured by copies (torch)",
    )
    assert find_bandwidth(progress(doctor={"findings": []})) is None


def test_lookahead_decoding_is_put_beside_plain_decoding_and_the_ceiling() -> None:
    bandwidth = {"bytes_per_s": 1e9, "through": "numpy"}

    plain, ahead = list_decoding(progress(bandwidth=bandwidth, time_tiny=TIMED))

    assert (plain["what"], plain["speedup"]) == ("tiny", 1.0)
    assert ahead["speedup"] == 1.5
    assert (plain["ceiling_ms_per_pass"], plain["ceiling_tokens_per_s"]) == (4.0, 250.0)
    assert (ahead["ceiling_ms_per_pass"], ahead["ceiling_tokens_per_s"]) == (5.0, 400.0)


def test_steps_say_how_many_tokens_they_must_give_and_how_near_the_ceiling_they_are() -> None:
    bandwidth = {"bytes_per_s": 1e9, "through": "numpy"}

    one, wide = list_steps(progress(bandwidth=bandwidth, time_tiny=TIMED))

    assert (one["break_even"], one["share_of_ceiling"]) == (1.0, 0.5)
    assert wide["break_even"] == 1.5
    assert wide["share_of_ceiling"] == pytest.approx(1 / 3)


def test_steps_started_as_graphs_are_compared_with_each_other() -> None:
    steps = [
        {"k": 0, "layout": "root-only", "rows": 1, "launch": launch, "best_ms": ms, "median_ms": ms}
        for launch, ms in (("eager", 9.0), ("graph", 2.0))
    ]
    steps.append({**steps[1], "k": 2, "rows": 5, "best_ms": 3.0})

    rows = list_steps(progress(torch_steps_tiny={"read_bytes": 1, "steps": steps}))

    assert [row["break_even"] for row in rows] == [1.0, 1.0, 1.5]
    assert [row["share_of_ceiling"] for row in rows] == [None] * 3


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ({"doctor": {"findings": [GPU]}, "time_a": TIMED}, ExitCode.DONE),
        ({"doctor": {"findings": [GPU]}, "torch_steps_a": TIMED}, ExitCode.DONE),
        (
            {"doctor": {"findings": [GPU]}, "time_a": TIMED, "verify_a": ended(Status.FAILED)},
            ExitCode.FAILED,
        ),
        (
            {"doctor": {"findings": [GPU]}, "time_a": ended(Status.NOT_RUN)},
            ExitCode.COULD_NOT_RUN,
        ),
        (
            {"doctor": {"findings": [{**GPU, "verdict": "not needed"}]}},
            ExitCode.ENVIRONMENT,
        ),
        ({"doctor": ended(Status.FAILED)}, ExitCode.FAILED),
    ],
)
def test_the_exit_code_says_the_worst_that_is_known(outcomes, expected: ExitCode) -> None:
    assert exit_code(progress(**outcomes), needs_gpu=True) is expected


def test_without_a_gpu_the_cpu_alone_may_be_checked() -> None:
    found = progress(doctor={"findings": [{**GPU, "verdict": "not needed"}]}, time_a=TIMED)

    assert exit_code(found, needs_gpu=False) is ExitCode.DONE
