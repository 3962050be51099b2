from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from la_export.bench.demo import (
    can_reuse,
    describe_build,
    describe_generations,
    describe_reuse,
    is_identical,
)

DISTRIBUTION = "lookahead-attention"
VERSION = importlib.metadata.version(DISTRIBUTION)


def _make(token_ids: list[int], *, passes: int, finish_reason: str = "length") -> dict[str, Any]:
    return {
        "text": "".join(map(str, token_ids)),
        "token_ids": token_ids,
        "finish_reason": finish_reason,
        "stats": {
            "prompt_tokens": 9,
            "new_tokens": len(token_ids),
            "passes": passes,
            "prefill_passes": 1,
            "tokens_per_pass": 1.5,
            "tokens_per_s": None,
            "ttft_s": 0.25,
        },
    }


def test_equal_generations_are_called_identical_with_both_statistics() -> None:
    plain, lookahead = _make([1, 2, 3], passes=3), _make([1, 2, 3], passes=2)

    text = describe_generations(plain, lookahead)

    assert is_identical(plain, lookahead)
    assert text.endswith("\nidentical: yes")
    assert "passes                           3           2\n" in text
    assert "tokens/s                         -           -\n" in text


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (_make([1, 7, 3], passes=2), "identical: no, new token 1 is 2 plainly and 7 with"),
        (_make([1, 2], passes=2), "identical: no, one is longer"),
        (_make([1, 2, 3], passes=2, finish_reason="eos"), "identical: no, .* ended differently"),
    ],
)
def test_a_difference_is_named(other: dict[str, Any], message: str) -> None:
    plain = _make([1, 2, 3], passes=3)

    assert not is_identical(plain, other)
    assert re.search(message, describe_generations(plain, other))


def test_the_build_s_time_and_memory_are_one_line() -> None:
    report = {"bundle": "engines/x", "seconds": 61.26, "peak_rss_bytes": 2_500_000_000}

    assert describe_build(report) == "built engines/x in 61.3 s, peak memory 2.50 GB"


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        ({"lookahead_lengths": [2, 4], "built_with": {"lookahead-attention": "1.2"}}, True),
        ({"lookahead_lengths": [2], "built_with": {"lookahead-attention": "1.2"}}, False),
        ({"lookahead_lengths": [4], "built_with": {"lookahead-attention": "1.1"}}, False),
        ({"lookahead_lengths": [4]}, False),
        ({"lookahead_lengths": 4, "built_with": []}, False),
        ({}, False),
    ],
)
def test_only_a_bundle_of_this_version_with_the_demo_s_k_is_reused(
    manifest: dict[str, Any], expected: bool
) -> None:
    assert can_reuse(manifest, "1.2") is expected


def test_reuse_repeats_what_the_build_took_only_for_the_same_bundle() -> None:
    manifest = {"created_utc": "2026-01-02T03:04:05+00:00"}
    report = {
        "bundle": "engines/x",
        "seconds": 61.26,
        "peak_rss_bytes": 2_500_000_000,
        "manifest": manifest,
    }
    start = "reused the bundle of 2026-01-02T03:04:05+00:00; --rebuild builds it again"

    assert describe_reuse(report, manifest) == (
        f"{start}; at that time: built engines/x in 61.3 s, peak memory 2.50 GB"
    )
    for other in (None, report | {"manifest": {"created_utc": "another"}}):
        assert describe_reuse(other, manifest) == f"{start} (no report of its build)"


def _run(module_arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "la_export.bench.demo", *module_arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_bundle_that_cannot_be_read_must_be_built(tmp_path: Path) -> None:
    assert _run(["check", str(tmp_path)]).returncode == 1
    (tmp_path / "manifest.json").write_text("{")
    assert _run(["check", str(tmp_path)]).returncode == 1
    manifest = {"lookahead_lengths": [4], "built_with": {DISTRIBUTION: VERSION}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert _run(["check", str(tmp_path)]).returncode == 0


@pytest.mark.parametrize(("options", "shown"), [([], "built x in"), (["--reused"], "at that time")])
def test_what_the_build_took_is_shown_also_on_reuse(
    tmp_path: Path, options: list[str], shown: str
) -> None:
    bundle = tmp_path / "x"
    bundle.mkdir()
    manifest = {"created_utc": "2026-01-02"}
    report = {"bundle": "x", "seconds": 1.0, "peak_rss_bytes": 10**9, "manifest": manifest}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "x.build.json").write_text(json.dumps(report))
    for k in (0, 4):
        (tmp_path / f"k{k}.json").write_text(json.dumps(_make([1, 2], passes=2)))
    done = _run(["show", str(tmp_path), str(bundle), *options])
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
    assert "built x in 1.0 s, peak memory 1.00 GB" in done.stdout
    assert done.stdout.endswith("identical: yes\n")
