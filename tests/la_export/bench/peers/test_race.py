from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from la_export.bench.peers.race import Contestant, Outcome, Report, Texts, measure_alone, run_laps
from la_export.bench.speed.record import PeerMode
from la_export.perplexity import Window
from tests.la_export.bench.peers.stands import fake_contestant, prompt

NO_TEXTS = Texts(own=(), pages=())
PROMPTS = (prompt(1, name="a"), prompt(2, name="b", category="math"))


def race(
    contestants: Sequence[Contestant],
    tmp_path: Path,
    *,
    rounds: int = 1,
    goes_on: Callable[[], bool] = lambda: True,
    report: Report = lambda _: None,
) -> Outcome:
    return run_laps(
        contestants,
        PROMPTS,
        rounds=rounds,
        new_tokens=4,
        logs=tmp_path,
        goes_on=goes_on,
        report=report,
    )


def turns(outcome: Outcome, name: str) -> list[tuple[int, str]]:
    return [(lap.round_index, lap.prompt.name) for lap in outcome.laps if lap.contestant == name]


def test_everyone_answers_every_prompt_in_every_round(tmp_path: Path) -> None:
    both = (fake_contestant("first"), fake_contestant("second"))

    outcome = race(both, tmp_path, rounds=2)

    for contestant in both:
        assert turns(outcome, contestant.name) == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert not outcome.failed


def test_peers_take_turns_within_a_prompt(tmp_path: Path) -> None:
    both = (fake_contestant("first"), fake_contestant("second"))

    outcome = race(both, tmp_path, rounds=2)

    order = [(lap.round_index, lap.prompt.name) for lap in outcome.laps]
    assert order == sorted(order)


def test_all_answer_the_same_prompts_when_time_is_up(tmp_path: Path) -> None:
    both = (fake_contestant("first"), fake_contestant("second"))
    lines: list[str] = []

    outcome = race(both, tmp_path, rounds=2, goes_on=lambda: False, report=lines.append)

    assert [turns(outcome, one.name) for one in both] == [[(0, "a")], [(0, "a")]]
    assert lines[-1] == "out of time after 1 of 4 prompts"


@pytest.mark.parametrize("options", [{"refuses": True}, {"fails_at": 3}])
def test_who_fails_drops_out_with_the_reason_and_the_others_go_on(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    good, bad = fake_contestant("good"), fake_contestant("bad", **options)

    outcome = race((bad, good), tmp_path, rounds=2)

    assert set(outcome.failed) == {bad.name}
    assert "fake_driver failed" in outcome.failed[bad.name]
    assert turns(outcome, bad.name) == []
    assert len(turns(outcome, good.name)) == 4


def test_a_contestant_alone_has_memory_and_perplexity(tmp_path: Path) -> None:
    window = Window(token_ids=(1, 2, 3), scored_from=1)

    found = measure_alone(
        fake_contestant("one"),
        PROMPTS[0],
        Texts(own=(window,), pages=()),
        new_tokens=4,
        logs=tmp_path,
    )

    assert found.version == "1.2"
    assert 0 < found.pss_bytes <= found.peak_rss_bytes
    assert found.perplexity_own == pytest.approx(2.0, rel=1e-6)
    assert found.perplexity_pages is None


def test_perplexity_is_taken_in_plain_mode_only(tmp_path: Path) -> None:
    texts = Texts(own=(Window(token_ids=(1, 2), scored_from=1),), pages=())
    contestant = fake_contestant("one", PeerMode.BEST)

    found = measure_alone(contestant, PROMPTS[0], texts, new_tokens=4, logs=tmp_path)

    assert found.perplexity_own is None
