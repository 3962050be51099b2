"""Rung 16: lookaheads beside a text leave its perplexity where it is."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_export.verify.findings import Figure, Finding
from la_export.verify.ladder import Ladder
from la_export.verify.passes import score_rows
from la_runtime.backends.base import CacheSizing
from la_runtime.layout import Group, make_rows

__all__ = ["check_perplexity"]

_LOOKAHEADS: Final = 8
_CHUNK: Final = 32
_LEAST_TEXT: Final = 2
_CLAIMED_PERCENT: Final = 0.3


def check_perplexity(ladder: Ladder) -> Finding:
    """Perplexity with 0 and with 8 lookaheads in every pass, at equal widths and as it comes."""
    k = min(_LOOKAHEADS, ladder.manifest.contract.k_max, ladder.context - _LEAST_TEXT)
    if k < 1:
        return Finding(skipped="the context leaves no room for a text and a lookahead")
    text = ladder.long_text[: min(ladder.settings.perplexity_tokens, ladder.context - k)]
    chunk = min(_CHUNK, ladder.most_scored - k)
    narrow = _perplexity(ladder, text, chunk=chunk, num_slots=0, widths=())
    padded = _perplexity(ladder, text, chunk=chunk, num_slots=0, widths=(chunk + k,))
    present = _perplexity(ladder, text, chunk=chunk, num_slots=k, widths=(chunk + k,))
    change = abs(present - narrow) / narrow
    return Finding(
        figures=(
            Figure(name="perplexity with 0", value=narrow),
            Figure(name=f"perplexity with {k}", value=present),
            Figure(name="relative change", value=change, bound=ladder.tolerance.perplexity),
            Figure(name="change at equal widths", value=abs(present - padded), bound=0.0),
        ),
        detail=f"{len(text) - 1} tokens: {narrow:.6g} with 0 lookaheads, {present:.6g} with {k}, "
        f"a change of {100 * change:.1g} % where the paper claims +{_CLAIMED_PERCENT} %",
    )


def _perplexity(
    ladder: Ladder,
    text: tuple[int, ...],
    *,
    chunk: int,
    num_slots: int,
    widths: tuple[int, ...],
) -> float:
    """Exponential of the mean negative log-probability of each token after those before it."""
    groups = (Group(0, num_slots),) if num_slots else ()
    state = ladder.backend.allocate(1, CacheSizing.STEPPED)
    losses: list[float] = []
    for start in range(0, len(text) - 1, chunk):
        read = text[start : min(start + chunk, len(text) - 1)]
        rows = make_rows(len(read), (), groups, group_mask=ladder.manifest.lookahead.group_mask)
        logits = score_rows(
            ladder.backend, state, read, rows, context=ladder.context, widths=widths
        )
        targets = text[start + 1 : start + 1 + len(read)]
        losses += _losses(logits[: len(read)], targets)
        ladder.backend.commit(state, [range(len(read))])
    state.close()
    return float(np.exp(np.mean(losses)))


def _losses(logits: NDArray[np.float32], targets: tuple[int, ...]) -> list[float]:
    wide = logits.astype(np.float64)
    peak = wide.max(axis=-1)
    total = peak + np.log(np.exp(wide - peak[:, None]).sum(axis=-1))
    losses: list[float] = (total - wide[np.arange(len(targets)), targets]).tolist()
    return losses
