from __future__ import annotations

import re
from typing import Any

import pytest

from la_export.bench.demo import describe_build, describe_generations, is_identical


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
