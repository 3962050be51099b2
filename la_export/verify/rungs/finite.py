"""Rung 15: weights, vectors and logits are finite, also on prompts that nobody writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from la_export.verify.epsilon import read_logits
from la_export.verify.findings import Figure, Finding
from la_export.verify.ladder import Ladder

__all__ = ["check_finite"]

_REPEATS: Final = 64
_CHUNK: Final = 256


def check_finite(ladder: Ladder) -> Finding:
    """Weights (with a checkpoint's tools), vectors, and logits on odd prompts."""
    problems: list[str] = []
    if not np.isfinite(ladder.own_vectors).all():
        problems.append("the lookahead vectors hold NaN or infinity")
    if ladder.source is not None:
        graph = ladder.bundle.path(ladder.manifest.graph)
        weight = ladder.source.find_nonfinite_weight(graph)
        if weight is not None:
            problems.append(f"weight {weight} holds NaN or infinity")
    largest, rows = 0.0, 0
    for name, token_ids in _odd_prompts(ladder):
        for logits in read_logits(ladder.backend, token_ids, width=_CHUNK, context=ladder.context):
            rows += len(logits)
            largest = max(largest, float(np.abs(logits).max()))
            bad = np.flatnonzero(~np.isfinite(logits).all(axis=-1))
            if len(bad):
                problems.append(f"{name}: a logit at row {bad[0]} of a pass is not finite")
                break
    weights = "weights, " if ladder.source is not None else ""
    return Finding(
        figures=(
            Figure(name="rows", value=rows),
            Figure(name="largest logit", value=largest),
        ),
        problems=tuple(problems),
        detail=f"{weights}vectors and the logits of {rows} rows",
    )


def _odd_prompts(ladder: Ladder) -> Iterator[tuple[str, tuple[int, ...]]]:
    """One token, one token over and over, every special token, all of them, and a long text."""
    token_id = ladder.prompts[0].token_ids[-1]
    yield "a single token", (token_id,)
    yield "a repeated token", (token_id,) * min(_REPEATS, ladder.context)
    vocab_size = ladder.manifest.contract.vocab_size
    special = sorted(
        token_id
        for token_id, token in ladder.engine.tokenizer.backend.get_added_tokens_decoder().items()
        if token.special and token_id < vocab_size
    )
    for token_id in special[:_REPEATS]:
        yield f"special token {token_id}", (token_id,)
    if special:
        yield "every special token", tuple(special[: ladder.context])
    yield "the first and the last token", (0, vocab_size - 1)
    yield "a long text", ladder.long_text[: ladder.settings.long_prompt]
