"""Single steps of any number of rows over caches of any length, through the backend's seam.

A step of T rows verifies T // 2 drafts behind the root; its other rows are slots. Of an odd T that
is the step of k = T // 2 in the root-only layout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import Final

import numpy as np

from la_runtime.backends.base import Backend, CacheSizing, CacheState, Outputs
from la_runtime.batch import DEFAULT_PREFILL_CHUNK
from la_runtime.block import Part, make_step_inputs
from la_runtime.layout import Group, make_rows

__all__ = ["Scored", "allocate_filled", "fill_cache", "make_step", "make_step_part"]

_SEED: Final = 0


class Scored(StrEnum):
    """Rows that the head is asked for.

    ``all``: the verified rows and every slot. ``verified``: the verified rows alone, as if no slot
    were needed.
    """

    ALL = "all"
    VERIFIED = "verified"

    def rows_of(self, num_rows: int) -> int:
        """How many those are in a step of so many rows."""
        return num_rows if self is Scored.ALL else 1 + num_rows // 2


def make_step_part(num_rows: int, *, vocab_size: int, k_max: int, has_slots: bool = True) -> Part:
    """The step of so many rows; its drafts are random tokens.

    Slots stand behind the root as far as there are lookahead vectors, then behind the drafts.
    Without any, all rows behind the root are drafts.
    """
    num_drafts = num_rows // 2 if has_slots else num_rows - 1
    num_slots = num_rows - 1 - num_drafts
    groups = tuple(
        Group(node, min(k_max, num_slots - node * k_max)) for node in range(-(-num_slots // k_max))
    )
    drawn = np.random.default_rng(_SEED).integers(vocab_size, size=1 + num_drafts)
    return Part(
        rows=make_rows(1, tuple(range(num_drafts)), groups),
        token_ids=tuple(drawn.tolist()),
        scored_from=0,
    )


def fill_cache(backend: Backend, state: CacheState, length: int, *, context: int) -> None:
    """Read random tokens until every sequence of a cache has `length` of them."""
    batch = len(state.lengths)
    rng = np.random.default_rng(_SEED)
    chunk = min(DEFAULT_PREFILL_CHUNK, backend.limits.block or DEFAULT_PREFILL_CHUNK)
    for start in range(int(state.lengths[0]), length, chunk):
        size = min(chunk, length - start)
        tokens = rng.integers(backend.contract.vocab_size, size=size)
        part = Part(
            rows=make_rows(size, (), ()), token_ids=tuple(tokens.tolist()), scored_from=size - 1
        )
        inputs = make_step_inputs(
            [part] * batch,
            state,
            backend.contract,
            context=context,
            widths=backend.widths,
            outputs=Outputs.NONE,
        )
        backend.forward(state, inputs)
        backend.commit(state, [range(size)] * batch)


def make_step(
    backend: Backend,
    state: CacheState,
    *,
    num_rows: int,
    scored: Scored,
    context: int,
    has_slots: bool = True,
) -> Callable[[], float]:
    """A step to be run any number of times over the same cache.

    Args:
        backend: runs it.
        state: the cache; every sequence runs the same step.
        num_rows: T.
        scored: rows that the head is asked for.
        context: number of positions the model has.
        has_slots: whether some of the rows are slots, where there are three or more.

    Returns:
        Runs the step once: makes its inputs, passes, reads the best tokens, commits the root.
        Gives the seconds that this took; the cache is then as it was before.
    """
    contract = backend.contract
    part = make_step_part(
        num_rows, vocab_size=contract.vocab_size, k_max=contract.k_max, has_slots=has_slots
    )
    lengths = [int(length) for length in state.lengths]
    parts, committed = [part] * len(lengths), [(0,)] * len(lengths)
    num_scored = scored.rows_of(num_rows)

    def step() -> float:
        start = time.perf_counter()
        inputs = make_step_inputs(
            parts,
            state,
            contract,
            context=context,
            widths=backend.widths,
            outputs=Outputs.TOP,
        )
        if num_scored < num_rows:
            rows = np.ascontiguousarray(inputs.logits_rows[:, :num_scored])
            inputs = replace(inputs, logits_rows=rows)
        backend.forward(state, inputs).top()
        backend.commit(state, committed)
        seconds = time.perf_counter() - start
        state.truncate(lengths)
        return seconds

    return step


def allocate_filled(
    backend: Backend, *, past: int, reserved: int, context: int, batch: int = 1
) -> CacheState:
    """A cache of random tokens.

    Args:
        backend: that owns it.
        past: tokens of every sequence.
        reserved: places to reserve.
        context: number of positions the model has.
        batch: sequences.
    """
    state = backend.allocate(batch, CacheSizing.STEPPED)
    state.reserve(reserved)
    fill_cache(backend, state, past, context=context)
    return state
