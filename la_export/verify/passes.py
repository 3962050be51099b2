"""Single passes of a backend, prepared by the runtime's own code, for rungs that look at logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_export.verify.epsilon import read_logits
from la_export.verify.ladder import Ladder
from la_runtime.backends.base import Backend, CacheSizing, CacheState, Outputs
from la_runtime.block import Part, make_step_inputs
from la_runtime.layout import StepRows, make_rows
from la_runtime.storage import round_to

__all__ = [
    "describe_scores",
    "lookahead_vectors",
    "random_vectors",
    "read_text",
    "score_batch",
    "score_rows",
]

_VECTOR_SCALE: Final = 10.0
# Float32 sums over a vocabulary: probabilities are off by up to this share of themselves.
_SUM_BOUND: Final = 1e-3


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
    scored_from: int = 0,
) -> NDArray[np.float32]:
    """[rows, vocab_size] logits of one sequence's pass; see `score_batch` and `Part`."""
    part = Part(rows=rows, token_ids=tuple(token_ids), scored_from=scored_from)
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


def describe_scores(backend: Backend, token_ids: Sequence[int], *, context: int) -> list[str]:
    """What a graph says of its best scores that its logits do not say; a line each.

    Best ids and their logits must be equal, the sums of exponentials all but equal.
    """
    state = backend.allocate(1, CacheSizing.STEPPED)
    inputs = make_step_inputs(
        [Part(rows=make_rows(len(token_ids), (), ()), token_ids=tuple(token_ids), scored_from=0)],
        state,
        backend.contract,
        context=context,
        widths=(),
        outputs=Outputs.TOP | Outputs.LOGSUMEXP | Outputs.LOGITS,
    )
    scores = backend.forward(state, inputs)
    logits = scores.logits()[0]
    best_ids, best_logits = (array[0] for array in scores.top())
    sums = scores.logsumexp()[0]
    state.close()
    order = np.argsort(-logits, axis=-1, kind="stable")[:, : best_ids.shape[-1]]
    wide = logits.astype(np.float64)
    peak = wide.max(axis=-1)
    expected = peak + np.log(np.exp(wide - peak[:, None]).sum(axis=-1))
    is_like = np.abs(sums - expected) <= _SUM_BOUND  # not NaN
    wrong = {
        "the best tokens": (best_ids != order).any(axis=-1),
        "the best tokens' logits": (best_logits != np.take_along_axis(logits, order, axis=-1)).any(
            axis=-1
        ),
        "the sums of exponentials": ~is_like,
    }
    return [
        f"{what} at position {int(np.argmax(rows))} are not those of the logits"
        for what, rows in wrong.items()
        if rows.any()
    ]


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
    return round_to(noise, ladder.manifest.contract.compute_dtype)
