from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from la_export.bench.prompts import GROUPS, BenchPrompt, load_prompts, pick_prompts
from la_runtime.errors import UsageError

GOOD = {"question_id": 1, "category": "qa", "turns": ["Who?"]}


def _make(question_id: int, category: str) -> BenchPrompt:
    return BenchPrompt(question_id=question_id, category=category, turns=("?",))


def test_the_shipped_file_holds_every_second_question_of_every_group() -> None:
    prompts = load_prompts()

    assert len({prompt.question_id for prompt in prompts}) == 240
    assert all(prompt.question_id % 2 for prompt in prompts)
    assert Counter(prompt.group for prompt in prompts) == dict.fromkeys(GROUPS, 40)


def test_picking_takes_the_categories_of_a_group_in_turn() -> None:
    prompts = [_make(1, "math"), _make(2, "writing"), _make(3, "writing"), _make(4, "qa")]

    picked = pick_prompts(prompts, per_group=3, groups=["writing"])

    assert [prompt.question_id for prompt in picked] == [2, 1, 3]


def test_eight_writing_prompts_come_from_the_eight_categories() -> None:
    picked = pick_prompts(load_prompts(), per_group=8)

    assert len(picked) == 48
    assert {prompt.category for prompt in picked[:8]} == set(GROUPS["writing"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("3", "line 2: expected a JSON object"),
        (json.dumps({"category": "qa", "turns": ["x"]}), "line 2: missing question_id"),
        (json.dumps({**GOOD, "extra": 1}), "line 2: unknown key extra"),
        (json.dumps({**GOOD, "question_id": "1"}), "question_id is '1', expected an integer"),
        (json.dumps({**GOOD, "category": "x"}), "category is 'x', expected one of coding, "),
        (json.dumps({**GOOD, "turns": []}), r"turns is \[\], expected a list of messages"),
        (json.dumps({**GOOD, "turns": [1]}), r"turns is \[1\], expected a list of messages"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")

    with pytest.raises(UsageError, match=message):
        load_prompts(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the prompts .*absent"):
        load_prompts(tmp_path / "absent")


def test_impossible_picks_are_refused() -> None:
    prompts = [_make(1, "qa")]

    with pytest.raises(UsageError, match="unknown prompt group 'poems'; expected one of writing"):
        pick_prompts(prompts, per_group=1, groups=["poems"])
    with pytest.raises(UsageError, match="group 'qa' has 1 prompts, 2 are wanted"):
        pick_prompts(prompts, per_group=2, groups=["qa"])
    with pytest.raises(UsageError, match="at least 1, got 0"):
        pick_prompts(prompts, per_group=0)
