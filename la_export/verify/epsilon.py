"""How far logits of the same position differ between a narrow pass and a wide one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from la_runtime.backends.base import Backend, CacheSizing, Outputs
from la_runtime.block import Part, make_step_inputs
from la_runtime.layout import make_rows

__all__ = ["EPSILON_FACTOR", "measure_epsilon", "read_logits"]

EPSILON_FACTOR = 4


def read_logits(
    backend: Backend, token_ids: Sequence[int], *, width: int, context: int
) -> Iterator[NDArray[np.float32]]:
    """Logits of a text, read `width` rows a pass, or as many as the backend can.

    Yields:
        [rows, vocab_size] per pass; a view, valid until the next one.
    """
    limits = backend.limits
    width = min(width, limits.block or width, limits.rows or width)
    state = backend.allocate(1, CacheSizing.STEPPED)
    for start in range(0, len(token_ids), width):
        part = tuple(token_ids[start : start + width])
        inputs = make_step_inputs(
            [Part(rows=make_rows(len(part), (), ()), token_ids=part, scored_from=0)],
            state,
            backend.contract,
            context=context,
            widths=backend.widths,
            outputs=Outputs.LOGITS,
        )
        yield backend.forward(state, inputs).logits()[0]
        backend.commit(state, [range(len(part))])
    state.close()


def measure_epsilon(
    backend: Backend, token_ids: Sequence[int], *, widths: Sequence[int], context: int
) -> float:
    """Margin below which two tokens are a near-tie for this backend.

    `EPSILON_FACTOR` times the largest difference of a logit between one-row passes and passes of
    any of `widths` rows, over all positions of the text.

    Args:
        backend: what runs the graph.
        token_ids: a text, best of 1,000 tokens or more.
        widths: row counts to compare with one row.
        context: number of positions the model has.
    """
    wide = [
        _rows_one_by_one(read_logits(backend, token_ids, width=width, context=context))
        for width in widths
    ]
    largest = 0.0
    for narrow in read_logits(backend, token_ids, width=1, context=context):
        for rows in wide:
            largest = max(largest, float(np.abs(next(rows) - narrow[0]).max()))
    return EPSILON_FACTOR * largest


def _rows_one_by_one(passes: Iterator[NDArray[np.float32]]) -> Iterator[NDArray[np.float32]]:
    for logits in passes:
        yield from logits
