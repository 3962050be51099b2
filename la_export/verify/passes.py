"""Single passes of a backend, prepared by the runtime's own code, for rungs that look at logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from la_export.verify.epsilon import read_logits
from la_export.verify.ladder import Ladder
from la_runtime.backends.base import Backend, CacheState, Outputs
from la_runtime.block import Part, make_step_inputs
from la_runtime.layout import StepRows

__all__ = ["lookahead_vectors", "random_vectors", "read_text", "score_batch", "score_rows"]

_VECTOR_SCALE = 10.0


def score_batch(
    backend: Backend,
    state: CacheState,
    parts: Sequence[Part],
    *,
    context: int,
    widths: tuple[int, ...] = (),
) -> NDArray[np.float32]:
    """[batch, rows, vocab_size] logits of one pass; a view, valid until the state's next one."""
    inputs = make_step_inputs(
        parts,
        state,
        backend.contract,
        context=context,
        widths=widths,
        outputs=Outputs.LOGITS,
    )
    return backend.forward(state, inputs).logits()


def score_rows(
    backend: Backend,
    state: CacheState,
    token_ids: Sequence[int],
    rows: StepRows,
    *,
    context: int,
    widths: tuple[int, ...] = (),
) -> NDArray[np.float32]:
    """[rows, vocab_size] logits of one sequence's pass; see `score_batch`."""
    part = Part(rows=rows, token_ids=tuple(token_ids), scored_from=0)
    logits: NDArray[np.float32] = score_batch(
        backend, state, [part], context=context, widths=widths
    )[0]
    return logits


def read_text(
    backend: Backend, token_ids: Sequence[int], *, width: int, context: int
) -> NDArray[np.float32]:
    """[tokens, vocab_size] logits of a text that the runtime reads `width` rows a pass."""
    passes = read_logits(backend, token_ids, width=width, context=context)
    return np.concatenate([logits.copy() for logits in passes])


@contextmanager
def lookahead_vectors(ladder: Ladder, vectors: NDArray[np.float32]) -> Iterator[None]:
    """Other lookahead vectors for a while; the bundle's own afterwards."""
    own = ladder.own_vectors
    ladder.backend.set_lookahead_embeddings(vectors)
    try:
        yield
    finally:
        ladder.backend.set_lookahead_embeddings(own)


def random_vectors(ladder: Ladder, *, seed: int) -> NDArray[np.float32]:
    """Vectors that differ from slot to slot, of ten times the size of the bundle's."""
    own = ladder.own_vectors
    size = float(np.sqrt(np.mean(np.square(own)))) or 1.0
    noise = np.random.default_rng(seed).normal(0.0, _VECTOR_SCALE * size, own.shape)
    return noise.astype(own.dtype)
