"""Tasks of the exactness measurement, what is kept of them, and the verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from la_export.bench.exactness import (
    Run,
    Sampling,
    Store,
    Task,
    decode,
    encode_prompts,
    judge,
    make_tasks,
)
from la_export.bench.prompts import BenchPrompt
from la_runtime.generation import Engine

ROOT = Path(__file__).parents[3]
KEY = {"sha256": {"onnx/model.onnx": "00"}, "new_tokens": 4}
GREEDY = Task(k=4, sampling=Sampling.GREEDY, num_prompts=3)


def make_run(*token_ids, margins=(), passes=2):
    return Run(
        token_ids=token_ids,
        margins=margins,
        decode_tokens=len(token_ids) - 1,
        decode_passes=passes,
        rechecked=1,
    )


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs" / "exactness.json", key=KEY)


@pytest.fixture(scope="module")
def engine(documented_bundle):
    with Engine.open(documented_bundle, threads=1) as engine:
        yield engine


def test_all_prompts_are_for_k_4_which_alone_is_strict():
    tasks = make_tasks((4, 2), many=200, few=40, strict_below=1e-3)

    assert [(task.name, task.num_prompts) for task in tasks] == [
        ("k4-greedy", 200),
        ("k4-sampled", 200),
        ("k2-greedy", 40),
        ("k2-sampled", 40),
        ("planned-greedy", 200),
        ("planned-sampled", 200),
        ("k4-greedy-strict", 200),
        ("k4-sampled-strict", 200),
    ]
    assert tasks[0].plain.name == "plain-greedy"
    assert tasks[-1].plain.name == "plain-sampled"


def test_nothing_is_strict_where_no_choice_would_be_made_again():
    tasks = make_tasks((4,), many=200, few=40, strict_below=0.0)

    assert [task.name for task in tasks] == [
        "k4-greedy",
        "k4-sampled",
        "planned-greedy",
        "planned-sampled",
    ]


def test_first_turns_come_first_group_by_group_and_long_ones_are_left_out(engine):
    prompts = [
        BenchPrompt(question_id=1, category="qa", turns=("Why?",)),
        BenchPrompt(question_id=2, category="qa", turns=("x" * 500,)),
        BenchPrompt(question_id=3, category="math", turns=("One?", "Two?")),
        BenchPrompt(question_id=4, category="qa", turns=("How?",)),
    ]

    encoded = encode_prompts(engine, prompts, longest=100)

    assert [one.name for one in encoded] == ["qa/1/1", "writing/3/1", "qa/4/1", "writing/3/2"]
    assert encoded[3].token_ids == engine.encode("Two?", chat=True)


def test_sampled_runs_depend_on_the_prompt_s_place_and_greedy_ones_do_not(engine):
    prompt = engine.encode("The cat", chat=True)

    def token_ids(sampling, index):
        task = Task(k=4, sampling=sampling, num_prompts=1)
        return decode(engine, task, prompt, index=index, new_tokens=8).token_ids

    assert token_ids(Sampling.GREEDY, 0) == token_ids(Sampling.GREEDY, 1)
    assert token_ids(Sampling.SAMPLED, 0) != token_ids(Sampling.SAMPLED, 1)


@pytest.mark.parametrize("sampling", Sampling)
@pytest.mark.parametrize("way", [{}, {"strict_below": 1e-3}, {"is_planned": True}])
def test_a_tiny_bundle_decodes_with_drafts_as_plainly(engine, store, sampling, way):
    task = Task(k=4, sampling=sampling, num_prompts=2, **way)
    prompts = {name: engine.encode(name, chat=True) for name in ("The cat", "A dog")}
    for one in (task, task.plain):
        runs = {
            name: decode(engine, one, prompt, index=index, new_tokens=12)
            for index, (name, prompt) in enumerate(prompts.items())
        }
        store.add(one, runs)

    row, unequal = judge(task, store, list(prompts), epsilon=1e-3)

    assert (row["equal"], row["different"], unequal) == (2, 0, [])
    assert row["tokens"] == sum(len(run.token_ids) for run in store.runs(task).values())


def test_the_verdict_names_each_difference_with_its_margin(store):
    """The first is equal, the second a near-tie, the third is not."""
    store.add(
        GREEDY.plain,
        {
            "a": make_run(1, 2, 3, margins=(1.0, 1.0, 1.0)),
            "b": make_run(1, 2, 3, margins=(1.0, 1e-4, 1.0)),
            "c": make_run(1, 2, 3, margins=(1.0, 1.0, 0.5)),
            "d": make_run(9, margins=(1.0,)),
        },
    )
    store.add(
        GREEDY, {"a": make_run(1, 2, 3), "b": make_run(1, 7, 3), "c": make_run(1, 2, 8, passes=1)}
    )

    row, unequal = judge(GREEDY, store, ["a", "b", "c", "d"], epsilon=1e-3)

    assert row == {
        "compared": "plain",
        "k": 4,
        "drafts": "k",
        "sampling": "greedy",
        "strict": "no",
        "prompts": 3,
        "tokens": 8,
        "equal": 1,
        "excused": 1,
        "different": 1,
        "tokens_per_pass": 6 / 5,
        "rechecked": 3,
    }
    assert unequal == [
        "excused: k4-greedy, prompt b, new token 1, margin 1.00e-04",
        "different: k4-greedy, prompt c, new token 2, margin 5.00e-01",
    ]


def test_a_store_is_resumed_and_filled_by_several(store):
    other = Store(store._path, key=KEY)

    store.add(GREEDY, {"a": make_run(1, 2)})
    other.add(GREEDY, {"b": make_run(3)})
    other.set_epsilon(0.25)
    store.set_epsilon(0.5)

    assert store.epsilon == other.epsilon == 0.25
    resumed = Store(store._path, key=KEY)
    assert resumed.runs(GREEDY) == {"a": make_run(1, 2), "b": make_run(3)}


def test_runs_of_other_settings_are_forgotten(store):
    store.add(GREEDY, {"a": make_run(1, 2)})
    store.set_epsilon(0.5)

    fresh = Store(store._path, key={**KEY, "new_tokens": 5})

    assert (fresh.runs(GREEDY), fresh.epsilon) == ({}, None)


def test_strict_runs_of_another_epsilon_are_others(store):
    strict = replace(GREEDY, strict_below=1e-3)

    store.add(strict, {"a": make_run(1, 2)})

    assert store.runs(strict)
    assert not store.runs(replace(GREEDY, strict_below=5e-4))
    assert not store.runs(GREEDY)


def _run_script(bundle: Path, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "scripts/exactness.py", str(bundle), "--k", "4", "--k", "2"),
        *("--prompts", "3", "--few", "1", "--longest", "150", "--new-tokens", "6"),
        *("--state", str(folder / "runs.json"), "--out", str(folder / "exactness.json")),
    ]
    return subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_script_shares_its_work_and_publishes_when_all_is_done(documented_bundle, tmp_path):
    part = _run_script(documented_bundle, tmp_path, "--only", "k4-greedy")

    assert part.returncode == 3, part.stderr
    assert "left to do: k4-sampled" in part.stderr
    assert not (tmp_path / "exactness.json").exists()

    done = _run_script(documented_bundle, tmp_path)

    assert done.returncode == 0, done.stderr
    assert "k4-greedy: 3 of 3" not in done.stderr, "decoded before"
    result = json.loads((tmp_path / "exactness.json").read_text())
    assert [
        (row["k"], row["drafts"], row["sampling"], row["strict"]) for row in result["rows"]
    ] == [
        (4, "k", "greedy", "no"),
        (4, "k", "sampled", "no"),
        (2, "k", "greedy", "no"),
        (2, "k", "sampled", "no"),
        (4, "planned", "greedy", "no"),
        (4, "planned", "sampled", "no"),
    ]
    assert all(row["equal"] == row["prompts"] for row in result["rows"])
    assert result["facts"]["not_equal"] == []
    assert result["facts"]["epsilon"] == 0, "so nothing is strict"


def test_the_script_refuses_unknown_tasks_and_too_few_prompts(documented_bundle, tmp_path):
    unknown = _run_script(documented_bundle, tmp_path, "--only", "k9")
    few = _run_script(documented_bundle, tmp_path, "--longest", "10")

    assert unknown.returncode == 2
    assert "no task k9; there are k4-greedy, k4-sampled, k2-greedy" in unknown.stderr
    assert few.returncode == 1
    assert "3 prompts are wanted, 0 have at most 10 tokens" in few.stderr
