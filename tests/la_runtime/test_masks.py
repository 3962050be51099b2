"""The additive mask of a block."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from la_runtime.layout import Group, Layout, StepRows, make_rows
from la_runtime.masks import (
    advance_attention_mask,
    make_attention_mask,
    make_sliding_mask,
    place_keys,
)

MASKED = np.float32(-1e9)


def _seen(rows: list[StepRows | None], lengths: list[int], past_len: int, block_len: int):
    """What is seen in cache form `concat`."""
    return _seen_at(rows, lengths, [past_len] * len(rows), past_len + block_len, block_len)


def _seen_at(rows, lengths, block_columns, num_keys, block_len):
    mask = make_attention_mask(
        rows,
        np.asarray(lengths),
        block_columns=np.asarray(block_columns),
        num_keys=num_keys,
        block_len=block_len,
        masked=MASKED,
    )
    assert mask.dtype == MASKED.dtype
    assert set(np.unique(mask)) <= {0.0, MASKED}
    return mask[:, 0] == 0


def _paper_mask(num_tokens: int, k: int) -> np.ndarray:
    """The paper's section 3.1, M = [[causal, ones(n, k)], [zeros(k, n), diagonal]].

    The text says that lookaheads see every original and that originals never see a lookahead. The
    off-diagonal blocks say so when columns are queries; with rows as queries, as everywhere in
    this project, they are transposed. The causal block is lower triangular.
    """
    return np.block(
        [
            [np.tri(num_tokens), np.zeros((k, num_tokens)).T],
            [np.ones((num_tokens, k)).T, np.eye(k)],
        ]
    ).astype(bool)


def test_prefill_mask_is_the_papers_with_its_off_diagonal_blocks_transposed():
    for num_tokens in (1, 4, 9):
        for k in (1, 3, 8):
            rows = make_rows(num_tokens, (), (Group(0, k),))
            seen = _seen([rows], [0], 0, num_tokens + k)
            assert np.array_equal(seen[0], _paper_mask(num_tokens, k))


@given(cached=st.integers(0, 9), num_known=st.integers(1, 4), k=st.integers(0, 4))
def test_the_papers_mask_continues_over_the_cache(cached, num_known, k):
    """The last rows of the whole sequence's mask, split into cache and block columns."""
    rows = make_rows(num_known, (), Layout.ROOT_ONLY.groups(0, k))
    spare = 5

    seen = _seen([rows], [cached], cached + spare, num_known + k)[0]

    whole = _paper_mask(cached + num_known, k)[cached:]
    assert np.array_equal(seen[:, :cached], whole[:, :cached])
    assert not seen[:, cached : cached + spare].any()
    assert np.array_equal(seen[:, cached + spare :], whole[:, cached:])


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    data=st.data(),
)
def test_padding_sees_itself_alone_and_is_seen_by_none(lengths, data):
    rows = [
        data.draw(st.sampled_from([None, make_rows(1, (0, 1), Layout.FULL.groups(2, 1))]))
        for _ in lengths
    ]
    past_len, block_len = max(lengths) + 2, 8

    seen = _seen(rows, lengths, past_len, block_len)

    for sequence, (step_rows, length) in enumerate(zip(rows, lengths, strict=True)):
        num_rows = 0 if step_rows is None else step_rows.num_rows
        own = seen[sequence, :, past_len:]
        padding = slice(num_rows, block_len)
        assert np.array_equal(own[padding], np.eye(block_len, dtype=bool)[padding])
        assert not own[:num_rows, padding].any()
        assert not seen[sequence, padding, :past_len].any()
        assert seen[sequence, :num_rows, :length].all()
        assert not seen[sequence, :num_rows, length:past_len].any()


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4), spare=st.integers(0, 3))
def test_a_scattered_block_sees_what_a_concatenated_one_sees_at_other_columns(lengths, spare):
    """The block's columns come right behind the committed places instead of behind them all."""
    rows = [make_rows(1, (0, 1), Layout.FULL.groups(2, 1)) for _ in lengths]
    block_len = rows[0].num_rows
    past_len = max(lengths)
    capacity = past_len + block_len + spare

    scattered = _seen_at(rows, lengths, lengths, capacity, block_len)

    concatenated = _seen(rows, lengths, past_len, block_len)
    for sequence, length in enumerate(lengths):
        stop = length + block_len
        found = scattered[sequence, :, length:stop]
        assert np.array_equal(found, concatenated[sequence, :, past_len:])
        assert scattered[sequence, :, :length].all()
        assert not scattered[sequence, :, stop:].any()


@given(
    rows=st.sampled_from(
        [None, make_rows(1, (0, 1), Layout.FULL.groups(2, 1)), make_rows(2, (), ())]
    ),
    length=st.integers(0, 6),
    growth=st.integers(0, 9),
    is_scatter=st.booleans(),
)
def test_an_advanced_mask_equals_one_made_anew(rows, length, growth, is_scatter):
    """By less than the block's rows and by more: old columns of the block become committed ones."""
    block_len, num_keys = 7, 30

    def make(places):
        return make_attention_mask(
            [rows],
            np.asarray([places]),
            block_columns=np.asarray([places if is_scatter else num_keys - block_len]),
            num_keys=num_keys,
            block_len=block_len,
            masked=MASKED,
        )

    mask = make(length)
    column = num_keys - block_len
    columns = (length, length + growth) if is_scatter else (column, column)
    advance_attention_mask(
        mask[0, 0], rows, committed=(length, length + growth), columns=columns, masked=MASKED
    )

    assert np.array_equal(mask, make(length + growth))


@given(
    cached=st.integers(0, 9),
    gap=st.integers(0, 3),
    num_drafts=st.integers(0, 3),
    k=st.integers(0, 3),
    window=st.integers(1, 14),
)
def test_a_window_shows_of_what_is_seen_the_positions_that_are_near(
    cached, gap, num_drafts, k, window
):
    """Whatever column a key stands in; a slot's position is not its column."""
    drafts = tuple(range(num_drafts))
    rows = make_rows(1, drafts, Layout.FULL.groups(num_drafts, k))
    first = cached + gap
    positions = cached + rows.offsets[np.newaxis]
    mask = make_attention_mask(
        [rows],
        np.array([cached]),
        block_columns=np.array([first]),
        num_keys=first + rows.num_rows,
        block_len=rows.num_rows,
        masked=MASKED,
    )
    keys = place_keys(
        positions,
        rows.columns[np.newaxis],
        block_columns=np.array([first]),
        num_keys=mask.shape[3],
    )

    found = make_sliding_mask(mask, positions, keys, window=window, masked=MASKED)

    stands_at = dict(enumerate(range(cached))) | {
        first + int(column): int(position)
        for column, position in zip(rows.columns, positions[0], strict=True)
    }
    for row, position in enumerate(positions[0]):
        near = {column for column, p in stands_at.items() if position - p < window}
        seen = set(np.flatnonzero(mask[0, 0, row] == 0))
        assert set(np.flatnonzero(found[0, 0, row] == 0)) == seen & near


def test_a_window_as_long_as_the_text_hides_nothing():
    rows = make_rows(5, (), (Group(0, 2),))
    mask = make_attention_mask(
        [rows],
        np.zeros(1, np.int64),
        block_columns=np.zeros(1, np.int64),
        num_keys=7,
        block_len=7,
        masked=MASKED,
    )
    positions = rows.offsets[np.newaxis]
    keys = place_keys(
        positions, rows.columns[np.newaxis], block_columns=np.zeros(1, np.int64), num_keys=7
    )

    found = make_sliding_mask(mask, positions, keys, window=7, masked=MASKED)

    assert np.array_equal(found, mask)
