"""One forward pass's inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from la_runtime.backends.base import CacheSizing, Outputs
from la_runtime.backends.fake import FakeBackend
from la_runtime.block import BlockWriter, Part, block_width, make_step_inputs
from la_runtime.contract import CacheForm
from la_runtime.layout import Group, make_rows

VOCAB_SIZE = 10
CONTEXT = 9


@pytest.fixture
def backend():
    return FakeBackend(vocab_size=VOCAB_SIZE, k_max=3)


def state_of(backend, lengths, sizing=CacheSizing.EXACT):
    """A cache with these many committed places per sequence."""
    state = backend.allocate(len(lengths), sizing)
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


# A sequence that rides along, plain steps, drafts and prompts.
_ROWS = (
    None,
    make_rows(1, (), ()),
    make_rows(1, (), (Group(0, 2),)),
    make_rows(1, (0, 1), (Group(0, 2), Group(2, 1))),
    make_rows(3, (0,), (Group(1, 2),)),
)


@dataclass
class _Lengths:
    """As much of a cache as a block is written for."""

    lengths: np.ndarray
    past_len: int
    is_scatter: bool

    def num_keys(self, num_columns: int) -> int:
        return self.past_len + (0 if self.is_scatter else num_columns)


@given(data=st.data(), is_scatter=st.booleans(), widths=st.sampled_from([(), (8,)]))
def test_a_pass_written_over_earlier_ones_equals_one_written_alone(data, is_scatter, widths):
    """Whatever the passes before it were: rows come back, caches grow and now and then shrink."""
    contract = FakeBackend(
        vocab_size=VOCAB_SIZE,
        k_max=2,
        cache_form=CacheForm.SCATTER if is_scatter else CacheForm.CONCAT,
        window=data.draw(st.sampled_from([None, 1, 4])),
    ).contract
    options = {"context": 20, "widths": widths, "least_scored": data.draw(st.integers(1, 3))}
    writer = BlockWriter(contract, **options)
    batch = data.draw(st.integers(1, 2))
    kinds = st.lists(st.sampled_from(_ROWS), min_size=batch, max_size=batch).filter(any)
    rows_of_passes = data.draw(st.lists(kinds, min_size=1, max_size=2))
    lengths = np.zeros(batch, dtype=np.int64)
    for _ in range(data.draw(st.integers(2, 12))):
        rows = data.draw(st.sampled_from(rows_of_passes))
        growth = data.draw(st.lists(st.integers(-1, 4), min_size=batch, max_size=batch))
        lengths = np.clip(lengths + growth, 0, 20)
        parts = [
            r
            and Part(
                rows=r,
                token_ids=tuple(data.draw(st.integers(0, 9)) for _ in range(r.num_verified)),
                scored_from=data.draw(st.integers(0, r.num_known - 1)),
            )
            for r in rows
        ]
        state = _Lengths(
            lengths=lengths,
            past_len=32 if lengths.max() < 15 else 40,
            is_scatter=is_scatter,
        )
        outputs = data.draw(st.sampled_from([Outputs.TOP, Outputs.NONE]))

        found = writer.write(parts, state, outputs)

        alone = make_step_inputs(parts, state, contract, outputs=outputs, **options)
        assert found.outputs is alone.outputs
        assert (found.sliding_attention_mask is None) == (contract.window is None)
        for name in (
            "input_ids",
            "position_ids",
            "attention_mask",
            "sliding_attention_mask",
            "logits_rows",
        ):
            np.testing.assert_array_equal(getattr(found, name), getattr(alone, name), name)


def _steps(backend, rows, num_passes):
    """The inputs of passes of one sequence; each commits its first row."""
    writer = BlockWriter(backend.contract, context=CONTEXT, widths=())
    state = state_of(backend, [2], CacheSizing.STEPPED)
    for token in range(num_passes):
        tokens = (token,) * rows.num_verified
        part = Part(rows=rows, token_ids=tokens, scored_from=0)
        inputs = writer.write([part], state, Outputs.TOP)
        yield inputs
        backend.forward(state, inputs)
        backend.commit(state, [(0,)])


def test_passes_with_the_same_rows_share_their_arrays():
    """So that whoever has bound them has nothing to bind again."""
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=2)

    first, *others = _steps(backend, make_rows(1, (), (Group(0, 2),)), 4)

    assert all(inputs is first for inputs in others)


def test_wide_masks_are_not_kept():
    """A prompt's mask would stay in memory while its answer is decoded."""
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=2)

    first, second = _steps(backend, make_rows(600, (), ()), 2)

    assert first.attention_mask is not second.attention_mask


def test_only_so_many_blocks_are_kept():
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=2)
    writer = BlockWriter(backend.contract, context=CONTEXT, widths=())
    state = state_of(backend, [2])
    parts = [
        Part(rows=make_rows(n, (), ()), token_ids=(1,) * n, scored_from=0) for n in range(1, 10)
    ]

    first, *_, last = [writer.write([part], state, Outputs.TOP) for part in parts]

    assert writer.write([parts[-1]], state, Outputs.TOP) is last
    assert writer.write([parts[0]], state, Outputs.TOP) is not first
