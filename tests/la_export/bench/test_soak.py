"""The mix of requests of the soak, and what is published of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from la_export.bench.soak import KINDS, Resident, make_prompt, soak
from la_runtime.generation import Engine

ROOT = Path(__file__).parents[3]


@pytest.fixture
def observed(documented_bundle):
    """An engine, and how many sequences each of its passes had."""
    sizes = []
    with Engine.open(documented_bundle, threads=1, observer=sizes.append) as engine:
        yield engine, sizes


@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_kind_of_request_runs_and_memory_is_looked_at_between(observed, num_threads):
    engine, passes = observed
    told: list[Resident] = []

    found = soak(
        engine,
        num_requests=3 * len(KINDS),
        num_threads=num_threads,
        every=len(KINDS),
        report=told.append,
    )

    assert [one.num_requests for one in found] == [8, 16, 24]
    assert found == told
    assert all(one.resident_bytes > 10e6 for one in found)
    assert len(passes) > 3 * len(KINDS)
    assert (engine.num_running, engine.num_waiting) == (0, 0)


def test_a_request_that_fails_ends_the_soak(observed, monkeypatch):
    engine, _ = observed

    def fail(*_):
        raise RuntimeError("a request failed")

    monkeypatch.setattr("la_export.bench.soak.KINDS", (fail,))

    with pytest.raises(RuntimeError, match="a request failed"):
        soak(engine, num_requests=2, num_threads=2, every=2, report=print)


def test_prompts_differ_in_length_and_fit_the_context(observed):
    engine, _ = observed
    longest = min(150, engine.bundle.manifest.model.context // 2)

    prompts = [make_prompt(engine, index) for index in range(6)]

    assert [len(prompt) for prompt in prompts] == [3, 90, 17, longest, 45, 8]
    assert prompts == [make_prompt(engine, index) for index in range(6)]


def test_the_script_publishes_the_growth_for_each_number_of_callers(documented_bundle, tmp_path):
    out = tmp_path / "soak.json"
    command = [
        *(sys.executable, "scripts/soak.py", documented_bundle),
        *("--requests", "48", "--every", "24", "--out", out),
    ]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    rows = json.loads(out.read_text())["rows"]
    assert [row["threads"] for row in rows] == [1, 8]
    for row in rows:
        assert row["grown_mb"] == row["late_mb"] - row["early_mb"]
        assert row["bound_mb"] == 5.0
    has_grown = max(row["grown_mb"] for row in rows) >= 5.0
    assert done.returncode == int(has_grown), done.stderr


def test_the_script_refuses_looks_that_do_not_divide_the_requests(documented_bundle):
    command = [sys.executable, "scripts/soak.py", documented_bundle, "--requests", "5"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "--requests must be a multiple of --every, got 5" in done.stderr
