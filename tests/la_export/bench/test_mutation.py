"""A mutation run over a toy project, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from la_export.bench.mutation import load_plan
from la_runtime.errors import UsageError

ROOT = Path(__file__).parents[3]
MODULE = """
def clamp(value, top):
    if value > top:
        return top
    return value
"""
ENDLESS = """

def first(values):
    for value in values:
        while True:
            break
        return value
"""
TESTS = """
from toy.numbers import clamp


def test_clamp():
    assert clamp(1, 5) == 1
    assert clamp(9, 5) == 5
"""
PLAN = """
preload = ["hypothesis", "pytest"]
fresh = ["toy"]

[[modules]]
path = "toy/numbers.py"
tests = ["test_numbers.py"]
"""
EQUIVALENT = """
[modules.equivalent]
"clamp: if value > top: => if value >= top:" = "a value at the top is the top"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "__init__.py").touch()
    (tmp_path / "toy" / "numbers.py").write_text(MODULE)
    (tmp_path / "test_numbers.py").write_text(TESTS)
    (tmp_path / "plan.toml").write_text(PLAN + EQUIVALENT)
    return tmp_path


def mutate(project: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run the command; what it did, and the result file if there is one."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "la_export.bench.mutation"),
            *("--plan", "plan.toml", "--out", "out.json", "--known", "fates.jsonl"),
            *("--least-cpu-s", "1"),
        ],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    out = project / "out.json"
    return done, json.loads(out.read_text()) if out.exists() else {}


def fates(project: Path) -> dict[str, str]:
    records = [json.loads(line) for line in (project / "fates.jsonl").read_text().splitlines()]
    return {record["mutant"]: record["fate"] for record in records}


def test_mutants_are_killed_or_survive_and_survivors_are_reported(project: Path) -> None:
    """One of four mutants survives: less than 90 % are killed."""
    done, result = mutate(project)

    assert done.returncode == 1
    assert fates(project) == {
        "clamp: if value > top: => if value >= top:": "survived",
        "clamp: if value > top: => if value <= top:": "killed",
        "clamp: return top => return None": "killed",
        "clamp: return value => return None": "killed",
    }
    counts = {"mutants": 4, "killed": 3, "timed_out": 0, "survived": 1, "share_killed": 0.75}
    assert result["rows"] == [{"module": "toy/numbers.py"} | counts, {"module": "all"} | counts]
    assert result["facts"]["survivors"] == [
        {
            "where": "toy/numbers.py:3",
            "change": "clamp: if value > top: => if value >= top:",
            "reason": "a value at the top is the top",
        }
    ]
    assert (project / "toy" / "numbers.py").read_text() == MODULE


def test_a_mutant_that_does_not_end_is_stopped(project: Path) -> None:
    (project / "toy" / "numbers.py").write_text(ENDLESS)
    (project / "test_numbers.py").write_text(
        "from toy.numbers import first\n\n\ndef test():\n    assert first([3]) == 3\n"
    )

    _, result = mutate(project)

    assert fates(project)["first: break => continue"] == "timed-out"
    assert result["rows"][0]["timed_out"] == 1


def test_a_run_passes_whose_survivors_are_few_and_explained(project: Path) -> None:
    """One of eleven survives."""
    more = "\n\ndef six(): return [1, 2, 3]\n"
    (project / "toy" / "numbers.py").write_text(MODULE + more)
    (project / "test_numbers.py").write_text(
        TESTS + "\n\ndef test_six():\n    from toy.numbers import six\n"
        "    assert six() == [1, 2, 3]\n"
    )

    done, result = mutate(project)

    assert done.returncode == 0, done.stderr
    assert result["rows"][-1]["mutants"] == 11


def test_a_survivor_without_a_reason_fails_the_run(project: Path) -> None:
    (project / "plan.toml").write_text(PLAN)

    done, result = mutate(project)

    assert done.returncode == 1
    assert "no reason: toy/numbers.py:3 clamp: if value > top: => if value >= top:" in done.stderr
    assert [survivor["reason"] for survivor in result["facts"]["survivors"]] == [""]


def test_a_reason_without_its_survivor_fails_the_run(project: Path) -> None:
    stale = '"clamp: return top => return None" = "never"\n'
    (project / "plan.toml").write_text(PLAN + EQUIVALENT + stale)

    done, _ = mutate(project)

    assert done.returncode == 1
    assert (
        "a reason without its survivor: toy/numbers.py: clamp: return top => return None"
        in done.stderr
    )


def test_a_run_is_resumed_where_it_ended_until_a_test_changes(project: Path) -> None:
    mutate(project)
    lines = (project / "fates.jsonl").read_text().splitlines(keepends=True)
    killed_while_writing = "".join(lines)[:-10]
    (project / "fates.jsonl").write_text(killed_while_writing)

    resumed, _ = mutate(project)

    assert f"toy/numbers.py: {len(lines)} mutants, 1 to test" in resumed.stderr
    assert (project / "fates.jsonl").read_text() == "".join(lines)
    with (project / "test_numbers.py").open("a") as stream:
        stream.write("\n\ndef test_top():\n    assert clamp(5, 5) == 5\n")
    again, _ = mutate(project)
    assert f"toy/numbers.py: {len(lines)} mutants, {len(lines)} to test" in again.stderr


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (
            TESTS.replace("== 1", "== 2"),
            "the tests of toy/numbers.py fail without a mutant; run them: pytest test_numbers.py",
        ),
        ("", "test_numbers.py holds no test of toy/numbers.py"),
    ],
)
def test_tests_that_prove_nothing_are_refused(project: Path, tests: str, message: str) -> None:
    (project / "test_numbers.py").write_text(tests)

    done, result = mutate(project)

    assert done.returncode == 1
    assert message in done.stderr
    assert not result


@pytest.mark.parametrize("text", ["modules = 5", "not toml", None])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "plan.toml"
    if text is not None:
        path.write_text(text)

    with pytest.raises(UsageError, match=r"plan\.toml is no plan of a mutation run: "):
        load_plan(path)
