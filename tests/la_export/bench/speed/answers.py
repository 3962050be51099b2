"""Answers made by hand."""

from __future__ import annotations

from la_export.bench.speed.ways import Answer
from la_runtime.stats import GenerationStats

__all__ = ["make_answer"]


def make_answer(
    question: str,
    token_ids: tuple[int, ...],
    *,
    decode_s: float,
    category: str = "qa",
    k: int = 0,
    passes: int | None = None,
    accepted: tuple[int, ...] = (),
    ttft_s: float = 0.5,
) -> Answer:
    """An answer to a prompt of 10 tokens, read in one pass; each pass has 1 + 2k rows."""
    decode_passes = len(token_ids) - 1 if passes is None else passes
    return Answer(
        question=question,
        category=category,
        token_ids=token_ids,
        stats=GenerationStats(
            k=k,
            prompt_tokens=10,
            new_tokens=len(token_ids),
            passes=1 + decode_passes,
            prefill_passes=1,
            prefill_tokens=1,
            drafted=(decode_passes,) * k,
            accepted=accepted or (0,) * k,
            reread=0,
            agreed=0,
            rows=10 + k + decode_passes * (1 + 2 * k),
            prefill_rows=10 + k,
            ttft_s=ttft_s,
            decode_s=decode_s,
        ),
    )
