"""Figures of this process's memory, and what a prompt takes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from la_export.bench.memory import (
    PrefillMemory,
    measure_prefill,
    peak_bytes,
    reset_peak,
    resident_bytes,
)

ROOT = Path(__file__).parents[3]
MEGABYTES = 64
# What the interpreter itself may take or give back meanwhile.
SLACK_BYTES = 8e6


def test_the_peak_is_what_was_held_since_the_reset():
    reset_peak()  # whatever other tests held before
    before = resident_bytes()
    held = np.ones(MEGABYTES * 1_000_000, dtype=np.uint8)
    assert resident_bytes() - before == pytest.approx(held.nbytes, abs=SLACK_BYTES)
    del held
    assert peak_bytes() - before == pytest.approx(MEGABYTES * 1e6, abs=SLACK_BYTES)

    reset_peak()

    assert peak_bytes() == pytest.approx(resident_bytes(), abs=SLACK_BYTES)
    assert peak_bytes() - before < MEGABYTES * 1e6 / 2


def test_beyond_the_cache_leaves_out_the_cache_and_what_was_there_before():
    memory = PrefillMemory(num_tokens=500, opened_bytes=700, peak_bytes=1000, cache_bytes=60)

    assert memory.beyond_cache_bytes == 240
    assert memory.process_beyond_cache_bytes == 940


def test_the_cache_of_a_prompt_is_counted_in_places(documented_bundle):
    """2 layers, K and V, 2 heads, 16 components of 4 bytes; places grow by 128 at most."""
    memory = measure_prefill(documented_bundle, 130, threads=1)

    places, rest = divmod(memory.cache_bytes, 2 * 2 * 2 * 16 * 4)
    assert rest == 0
    assert 130 <= places <= 256
    assert memory.opened_bytes <= memory.peak_bytes


def test_the_script_publishes_both_prompts_and_their_ratio(documented_bundle, tmp_path):
    out = tmp_path / "prefill_memory.json"
    command = [
        *(sys.executable, "scripts/prefill_memory.py", documented_bundle),
        *("--short", "20", "--long", "140", "--out", out),
    ]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    result = json.loads(out.read_text())
    short, long = result["rows"]
    facts = result["facts"]
    assert (short["prompt_tokens"], long["prompt_tokens"]) == (20, 140)
    assert facts["ratio"] == pytest.approx(long["beyond_mb"] / short["beyond_mb"])
    assert facts["process_ratio"] == pytest.approx(long["process_mb"] / short["process_mb"])
    # Of a model as small as this one, what passes take is lost in what the process takes anyway.
    exceeds = max(facts["ratio"], facts["process_ratio"]) > facts["bound"]
    assert (done.returncode, facts["bound"]) == (int(exceeds), 1.2), done.stderr
