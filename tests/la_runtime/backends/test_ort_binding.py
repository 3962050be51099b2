"""What is bound for a pass: every array as it is, none made known twice, no more held than used."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from la_runtime.backends.base import CacheSizing, Outputs
from la_runtime.backends.ort import OrtBackend
from la_runtime.block import BlockWriter, Part
from la_runtime.bundle import open_bundle
from la_runtime.contract import Name
from la_runtime.layout import make_rows
from tests.la_runtime.backends.conformance import CONTEXT

ALL = Outputs.TOP | Outputs.LOGITS | Outputs.LOGSUMEXP
BLOCK_INPUTS = (Name.INPUT_IDS, Name.POSITION_IDS, Name.ATTENTION_MASK, Name.LOGITS_ROWS)


@pytest.fixture
def backend(tiny_bundle) -> Iterator[OrtBackend]:
    backend = OrtBackend.open(open_bundle(tiny_bundle), threads=1)
    yield backend
    backend.close()


class RecordedBinding:
    """Remembers the values that are bound."""

    def __init__(self, io_binding: Any) -> None:
        self._io_binding = io_binding
        self.values: dict[str, list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._io_binding, name)

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self.values.setdefault(name, []).append(value)
        self._io_binding.bind_ortvalue_input(name, value)

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        self.values.setdefault(name, []).append(value)
        self._io_binding.bind_ortvalue_output(name, value)


def part_of(token_ids: tuple[int, ...]) -> Part:
    return Part(rows=make_rows(len(token_ids), (), ()), token_ids=token_ids, scored_from=0)


def passes(
    backend: OrtBackend, widths: list[int], *, record: list[RecordedBinding] | None = None
) -> list[np.ndarray]:
    """The logits of passes of these widths over one cache; each commits its first row."""
    state = backend.allocate(1, CacheSizing.STEPPED)
    if record is not None:
        record.append(RecordedBinding(state.binding.io_binding))
        state.binding.io_binding = record[0]
    writer = BlockWriter(backend.contract, context=CONTEXT, widths=())
    found = []
    for start, width in enumerate(widths):
        part = part_of(tuple(range(start, start + width)))
        scores = backend.forward(state, writer.write([part], state, ALL))
        found.append(scores.logits().copy())
        backend.commit(state, [(0,)])
    state.close()
    return found


def test_blocks_that_take_turns_are_made_known_once(backend):
    """Two widths, ten turns: two values of every input and output that differ in shape."""
    record: list[RecordedBinding] = []

    passes(backend, [3, 2] * 10, record=record)

    known = record[0].values
    for name in (*BLOCK_INPUTS, Name.TOP_IDS, Name.TOP_LOGITS, Name.LOGITS):
        assert len(known[name]) == 20
        assert len(set(map(id, known[name]))) == 2


def test_a_pass_reads_its_own_block_whatever_was_bound_before(backend):
    """More widths in turn than are remembered; a pass over a cache read anew gives the same."""
    widths = [2, 5, 3, 2, 7, 4, 5, 2, 6, 8, 9, 10, 11, 12, 2, 13, 3, 5, 2]

    found = passes(backend, widths)

    for start in (7, 14, 18):
        state = backend.allocate(1, CacheSizing.STEPPED)
        for token in range(start):
            writer = BlockWriter(backend.contract, context=CONTEXT, widths=())
            backend.forward(state, writer.write([part_of((token,))], state, ALL))
            backend.commit(state, [(0,)])
        part = part_of(tuple(range(start, start + widths[start])))
        writer = BlockWriter(backend.contract, context=CONTEXT, widths=())
        alone = backend.forward(state, writer.write([part], state, ALL)).logits()
        np.testing.assert_array_equal(found[start], alone)


def test_arrays_that_come_once_are_not_held_for_ever(backend):
    state = backend.allocate(1, CacheSizing.STEPPED)
    blocks = []
    for token in range(60):
        writer = BlockWriter(backend.contract, context=CONTEXT, widths=())
        inputs = writer.write([part_of((token,))], state, ALL)
        blocks.append(weakref.ref(inputs.attention_mask))
        backend.forward(state, inputs)
        backend.commit(state, [(0,)])
    del inputs, writer
    gc.collect()

    assert blocks[-1]() is not None
    assert all(block() is None for block in blocks[:20])


def test_scores_of_another_shape_lie_in_the_same_memory_until_it_is_too_small(backend):
    state = backend.allocate(1, CacheSizing.STEPPED)
    addresses = []
    for width in (9, 2, 5, 9, 12, 2):
        writer = BlockWriter(backend.contract, context=CONTEXT, widths=())
        part = part_of(tuple(range(width)))
        logits = backend.forward(state, writer.write([part], state, ALL)).logits()
        assert logits.shape[:2] == (1, width)
        addresses.append(logits.ctypes.data)

    assert len(set(addresses[:4])) == 1
    assert len(set(addresses[4:])) == 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_pass_for_which_memory_ran_out_can_be_made_again(backend, monkeypatch, place):
    """Of one output or another: none of them may be left bound to another shape."""
    state = backend.allocate(1, CacheSizing.STEPPED)
    writer = BlockWriter(backend.contract, context=CONTEXT, widths=())
    narrow, wide = part_of((1,)), part_of((1, 2, 3))
    backend.forward(state, writer.write([narrow], state, ALL))
    memory = list(state.binding._score_memory.values())[place]
    shaped, calls = type(memory).shaped, []

    def run_out(self, rows):
        if self is memory and not calls:
            calls.append(rows)
            raise MemoryError
        return shaped(self, rows)

    monkeypatch.setattr(type(memory), "shaped", run_out)
    with pytest.raises(MemoryError):
        backend.forward(state, writer.write([wide], state, ALL))

    found = backend.forward(state, writer.write([wide], state, ALL)).logits().copy()

    fresh = backend.allocate(1, CacheSizing.STEPPED)
    writer = BlockWriter(backend.contract, context=CONTEXT, widths=())
    alone = backend.forward(fresh, writer.write([wide], fresh, ALL)).logits()
    np.testing.assert_array_equal(found, alone)
