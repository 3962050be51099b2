"""Where the time of a step goes outside its pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from la_export.bench import phases
from la_export.bench.phases import Phase, time_phases
from la_export.pipeline import BuildReport
from la_runtime import batch
from la_runtime.generation import DecodeState, Engine
from la_runtime.sampling import SamplingParams

PARAMS = SamplingParams(max_new_tokens=6, k=2, ignore_eos=True)


@pytest.fixture
def engine(report_of: Callable[..., BuildReport]) -> Iterator[Engine]:
    bundle: Path = report_of(("llama", False)).bundle
    with Engine.open(bundle, threads=1) as opened:
        yield opened


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> phases._Clock:
    """Of a time at which every look is a second after the one before."""
    ticks = iter(range(1000))
    monkeypatch.setattr("la_export.bench.phases.time.perf_counter", lambda: float(next(ticks)))
    return phases._Clock()


def test_time_inside_another_phase_is_not_counted_twice(clock: phases._Clock) -> None:
    """Two calls of two looks each inside one: 5 seconds in all, of which 2 are theirs."""
    inner = clock.timed(lambda: None, Phase.TEXT)
    outer = clock.timed(lambda: [inner(), inner()], Phase.SELECT)

    outer()

    assert clock.take() == {Phase.SELECT: 3.0, Phase.TEXT: 2.0}
    assert clock.take() == {}


def test_what_fails_is_timed_all_the_same(clock: phases._Clock) -> None:
    def fail() -> None:
        raise ValueError

    outer = clock.timed(clock.timed(fail, Phase.TEXT), Phase.SELECT)

    with pytest.raises(ValueError, match=r"^$"):
        outer()

    assert clock.take() == {Phase.SELECT: 2.0, Phase.TEXT: 1.0}


def test_every_phase_of_real_steps_is_timed(engine: Engine) -> None:
    prompts = [list(range(5, 12)), [7]]
    num_steps = 0
    for prompt in prompts:
        with engine.prefill(prompt, PARAMS) as state:
            while state.finish_reason is None:
                state.step()
                num_steps += 1

    found = time_phases(engine, prompts, PARAMS)

    assert set(found.phases_us) == set(Phase)
    assert min(found.phases_us.values()) > 0
    assert found.num_steps == num_steps


def test_afterwards_nothing_is_timed(engine: Engine) -> None:
    step, read_best, session = DecodeState.step, batch.read_best, engine.backend.session

    time_phases(engine, [[7]], PARAMS)

    assert (DecodeState.step, batch.read_best, engine.backend.session) == (step, read_best, session)
