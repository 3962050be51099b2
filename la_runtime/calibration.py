"""How long passes take here and now, measured on an open backend.

A bundle's manifest may record that of another machine, another day or another number of threads.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Final

import numpy as np

from la_runtime.backends.base import Backend, CacheSizing, CacheState, Outputs
from la_runtime.block import Part, block_width, make_step_inputs
from la_runtime.layout import Group, StepRows, make_rows
from la_runtime.step_costs import StepCosts

__all__ = ["measure_costs"]

_ROWS: Final = (1, 2, 3, 5, 9, 13, 17, 25, 32)
# Where it is seen what slots take beside as many rows of tokens.
_ROWS_WITH_SLOTS: Final = 5
_PAST: Final = 256
_ROUNDS: Final = 9
_SEED: Final = 1


def measure_costs(backend: Backend, *, context: int) -> StepCosts:
    """Median time of a pass by its rows, behind 256 tokens or half of the context.

    Args:
        backend: nothing else may run on it meanwhile.
        context: number of positions the model has.
    """
    limits = backend.limits
    most = min(limits.block or _ROWS[-1], limits.rows or _ROWS[-1], max(1, context // 2))
    rows = [count for count in _ROWS if count <= most]
    state = backend.allocate(1, CacheSizing.STEPPED)
    try:
        _read(backend, state, min(_PAST, context // 2), chunk=most, context=context)
        samples: dict[int, list[float]] = {count: [] for count in rows}
        with_slots: list[float] = []
        for _ in range(1 + _ROUNDS):
            for count in rows:
                samples[count].append(_time(backend, state, _tokens(count), context=context))
            if _ROWS_WITH_SLOTS in samples:
                with_slots.append(_time(backend, state, _slots(_ROWS_WITH_SLOTS), context=context))
    finally:
        state.close()
    # The first of each makes buffers.
    times = {count: 1000 * median(seconds[1:]) for count, seconds in samples.items()}
    slots_ms = 0.0
    if with_slots:
        slots_ms = max(0.0, 1000 * median(with_slots[1:]) - times[_ROWS_WITH_SLOTS])
    return StepCosts.measured(list(times.items()), widths=backend.widths, slots_ms=slots_ms)


def _read(
    backend: Backend, state: CacheState, num_tokens: int, *, chunk: int, context: int
) -> None:
    """Fill a cache with any tokens."""
    for start in range(0, num_tokens, chunk):
        count = min(chunk, num_tokens - start)
        _run(backend, state, _tokens(count), context=context, outputs=Outputs.NONE)
        backend.commit(state, [range(count)])


def _tokens(num_rows: int) -> StepRows:
    """Rows of tokens alone."""
    return make_rows(num_rows, (), ())


def _slots(num_rows: int) -> StepRows:
    """As many, of which one is a slot."""
    return make_rows(num_rows - 1, (), (Group(0, 1),))


def _time(backend: Backend, state: CacheState, rows: StepRows, *, context: int) -> float:
    """Seconds of one pass whose rows are all scored."""
    began = time.perf_counter()
    _run(backend, state, rows, context=context, outputs=Outputs.TOP)
    return time.perf_counter() - began


def _run(
    backend: Backend, state: CacheState, rows: StepRows, *, context: int, outputs: Outputs
) -> None:
    vocab_size, num_tokens = backend.contract.vocab_size, rows.num_verified
    token_ids = np.random.default_rng(_SEED).integers(vocab_size, size=num_tokens).tolist()
    part = Part(
        rows=rows,
        token_ids=tuple(token_ids),
        scored_from=rows.num_rows if outputs is Outputs.NONE else 0,
    )
    inputs = make_step_inputs(
        [part],
        state,
        backend.contract,
        context=context,
        widths=(block_width(rows.num_rows, backend.widths),),
        outputs=outputs,
    )
    backend.forward(state, inputs)
