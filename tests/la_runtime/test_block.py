"""One forward pass's inputs."""

from __future__ import annotations

import numpy as np
import pytest

from la_runtime.backends.base import CacheSizing, Outputs
from la_runtime.backends.fake import FakeBackend
from la_runtime.block import Part, block_width, make_step_inputs
from la_runtime.layout import Group, make_rows

VOCAB_SIZE = 10
CONTEXT = 9


@pytest.fixture
def backend():
    return FakeBackend(vocab_size=VOCAB_SIZE, k_max=3)


def state_of(backend, lengths):
    """A cache with these many committed places per sequence."""
    state = backend.allocate(len(lengths), CacheSizing.EXACT)
    parts = [
        Part(rows=make_rows(n, (), ()), token_ids=(1,) * n, scored_from=0) if n else None
        for n in lengths
    ]
    inputs = make_step_inputs(
        parts, state, backend.contract, context=CONTEXT, widths=(), outputs=Outputs.TOP
    )
    backend.forward(state, inputs)
    backend.commit(state, [range(n) for n in lengths])
    return state


def test_a_ragged_block_written_out(backend):
    """Two sequences at lengths 4 and 1: root, draft and two slots; root alone; both padded."""
    state = state_of(backend, [4, 1])
    parts = [
        Part(rows=make_rows(1, (0,), (Group(1, 2),)), token_ids=(7, 8), scored_from=0),
        Part(rows=make_rows(1, (), ()), token_ids=(9,), scored_from=0),
    ]

    inputs = make_step_inputs(
        parts, state, backend.contract, context=CONTEXT, widths=(5,), outputs=Outputs.TOP
    )

    assert inputs.input_ids.tolist() == [[7, 8, 10, 11, 0], [9, 0, 0, 0, 0]]
    assert inputs.position_ids.tolist() == [[4, 5, 6, 7, 4], [1, 1, 1, 1, 1]]
    assert inputs.logits_rows.tolist() == [[0, 1, 2, 3], [0, 0, 0, 0]]
    assert inputs.attention_mask.shape == (2, 1, 5, 9)


def test_slots_past_the_context_keep_their_row_and_take_the_last_position(backend):
    state = state_of(backend, [6])
    part = Part(
        rows=make_rows(1, (0,), (Group(0, 3), Group(1, 3))), token_ids=(1, 2), scored_from=0
    )

    inputs = make_step_inputs(
        [part], state, backend.contract, context=CONTEXT, widths=(), outputs=Outputs.TOP
    )

    assert inputs.position_ids.tolist() == [[6, 7, 7, 8, 8, 8, 8, 8]]


def test_a_sequence_that_rides_as_padding_has_padding_rows_only(backend):
    state = state_of(backend, [2, 3])
    part = Part(rows=make_rows(2, (), ()), token_ids=(5, 6), scored_from=2)

    inputs = make_step_inputs(
        [None, part], state, backend.contract, context=CONTEXT, widths=(), outputs=Outputs.NONE
    )

    assert inputs.input_ids.tolist() == [[0, 0], [5, 6]]
    assert inputs.position_ids.tolist() == [[2, 2], [3, 4]]
    seen = inputs.attention_mask[0, 0] == 0
    assert np.array_equal(seen, np.hstack([np.zeros((2, 3), bool), np.eye(2, dtype=bool)]))


@pytest.mark.parametrize(
    ("rows", "widths", "width"), [(3, (), 3), (3, (2, 4, 8), 4), (4, (8, 4), 4), (9, (2, 4), 9)]
)
def test_blocks_take_the_narrowest_width_that_holds_them(rows, widths, width):
    assert block_width(rows, widths) == width


def test_a_full_sequence_that_rides_along_stays_within_the_context(backend):
    """Nine committed places of nine: its padding rows take the last position."""
    state = state_of(backend, [9, 3])
    part = Part(rows=make_rows(1, (), ()), token_ids=(5,), scored_from=0)

    inputs = make_step_inputs(
        [None, part], state, backend.contract, context=CONTEXT, widths=(2,), outputs=Outputs.TOP
    )

    assert inputs.position_ids.tolist() == [[8, 8], [3, 3]]


def test_only_wanted_rows_are_scored(backend):
    """Of three known rows the last, of one draft the row itself; slots always."""
    state = state_of(backend, [2, 4])
    parts = [
        Part(rows=make_rows(3, (), (Group(0, 1),)), token_ids=(1, 2, 3), scored_from=2),
        Part(rows=make_rows(1, (0,), ()), token_ids=(4, 5), scored_from=1),
    ]

    inputs = make_step_inputs(
        parts, state, backend.contract, context=CONTEXT, widths=(), outputs=Outputs.TOP
    )

    assert [part.num_scored for part in parts] == [2, 1]
    assert inputs.logits_rows.tolist() == [[2, 3], [1, 0]]


def test_a_pass_without_scores_names_one_row(backend):
    state = state_of(backend, [2, 4])
    part = Part(rows=make_rows(3, (), ()), token_ids=(1, 2, 3), scored_from=0)

    inputs = make_step_inputs(
        [part, None], state, backend.contract, context=CONTEXT, widths=(), outputs=Outputs.NONE
    )

    assert inputs.logits_rows.tolist() == [[0], [0]]


@pytest.mark.parametrize(("least", "expected"), [(1, 3), (3, 3), (7, 7)])
def test_more_rows_can_be_scored_than_are_wanted(least, expected):
    """Those that nobody asked for repeat row 0, behind the wanted ones."""
    backend = FakeBackend(vocab_size=13, k_max=2)
    part = Part(rows=make_rows(4, (), ()), token_ids=(1, 2, 3, 4), scored_from=1)

    inputs = make_step_inputs(
        [part],
        backend.allocate(1, CacheSizing.STEPPED),
        backend.contract,
        context=50,
        widths=(8,),
        outputs=Outputs.TOP,
        least_scored=least,
    )

    assert inputs.logits_rows.tolist() == [[1, 2, 3] + [0] * (expected - 3)]
