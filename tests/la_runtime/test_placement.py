"""Columns of drafts."""

from __future__ import annotations

import numpy as np
import pytest

from la_runtime.layout import DraftTree, Group, make_rows
from la_runtime.masks import advance_attention_mask, make_attention_mask
from la_runtime.placement import COLUMN_STRIDE, place_drafts, trim_to_runs


def draw_parents(rng, most=24):
    parents = []
    for draft in range(rng.integers(1, most)):
        parents.append(int(rng.integers(max(0, draft - 6), draft + 1)))
    return tuple(parents)


def depths_of(parents):
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths[1:]


def test_a_chain_stands_where_plain_decoding_puts_it():
    assert place_drafts((0, 1, 2, 3)) == (1, 2, 3, 4)


def test_a_side_branch_stands_a_stride_further_right():
    """Root -> a, b; a -> c; b -> d, e."""
    assert place_drafts((0, 0, 1, 2, 2)) == (1, 17, 2, 18, 34)


@pytest.mark.parametrize("seed", range(60))
def test_drafts_keep_their_lane_and_stand_to_the_right_of_their_ancestors(seed):
    parents = draw_parents(np.random.default_rng(seed))

    columns = place_drafts(parents)

    assert len({0, *columns}) == len(columns) + 1, "nobody stands on another"
    for column, depth, parent in zip(columns, depths_of(parents), parents, strict=True):
        assert (column - depth) % COLUMN_STRIDE == 0
        assert column > (columns[parent - 1] if parent else 0)


@pytest.mark.parametrize("seed", range(60))
def test_no_draft_that_is_kept_leaves_its_run_and_none_is_left_out_for_nothing(seed):
    rng = np.random.default_rng(seed)
    parents = draw_parents(rng)
    tree = DraftTree(token_ids=tuple(range(len(parents))), parents=parents)
    root = int(rng.integers(1, 400))

    kept = trim_to_runs(tree, root_column=root)

    small = tree.keep(kept)
    columns = place_drafts(small.parents)
    for column, depth in zip(columns, small.depths, strict=True):
        assert (root + column) // 128 == (root + depth) // 128
    for draft in set(range(1, len(parents) + 1)) - set(kept):
        parent = parents[draft - 1]
        if parent and parent not in kept:
            continue
        # Behind the others that are kept, it would stand in another run.
        again = [*kept, draft]
        moved = tree.keep(sorted(again))
        column = place_drafts(moved.parents)[sorted(again).index(draft)]
        depth = depths_of(parents)[draft - 1]
        assert (root + column) // 128 != (root + depth) // 128


def test_slots_stand_behind_all_drafts_and_rows_see_what_they_did():
    parents, groups = (0, 0, 1), (Group(0, 2), Group(2, 1))
    rows = make_rows(3, parents, groups, draft_columns=place_drafts(parents))
    plain = make_rows(3, parents, groups)

    assert rows.columns.tolist() == [0, 1, 2, 3, 19, 4, 20, 21, 22]
    assert rows.num_columns == 23
    assert np.array_equal(rows.visible, plain.visible)
    assert plain.columns.tolist() == list(range(9))


def slow_mask(rows, length, *, num_keys, block_len):
    """Row by row and key by key."""
    seen = np.zeros((block_len, num_keys), dtype=bool)
    for row in range(rows.num_rows):
        seen[row, :length] = True
        for other in range(rows.num_rows):
            if rows.visible[row, other]:
                seen[row, length + rows.columns[other]] = True
    for place in range(block_len - rows.num_rows):
        seen[rows.num_rows + place, length + rows.num_columns + place] = True
    return seen


def check_mask(parents, groups, *, padding):
    rows = make_rows(1, parents, groups, draft_columns=place_drafts(parents))
    for length in (1, 30):
        block_len = rows.num_rows + padding
        num_keys = length + 3 + rows.num_columns + padding
        mask = make_attention_mask(
            [rows],
            np.array([length]),
            block_columns=np.array([length]),
            num_keys=num_keys,
            block_len=block_len,
            masked=np.float32(-1e9),
        )
        expected = slow_mask(rows, length, num_keys=num_keys, block_len=block_len)
        np.testing.assert_array_equal(mask[0, 0] == 0, expected)
        advance_attention_mask(
            mask[0, 0],
            rows,
            committed=(length, length + 3),
            columns=(length, length + 3),
            masked=np.float32(-1e9),
        )
        expected = slow_mask(rows, length + 3, num_keys=num_keys, block_len=block_len)
        np.testing.assert_array_equal(mask[0, 0] == 0, expected)


@pytest.mark.parametrize("seed", range(40))
def test_rows_see_the_columns_where_their_ancestors_stand(seed):
    rng = np.random.default_rng(seed)
    parents = draw_parents(rng)
    groups = tuple(Group(int(node), 2) for node in range(int(rng.integers(3))))
    groups = tuple(group for group in groups if group.node <= len(parents))
    check_mask(parents, groups, padding=int(rng.integers(3)))


@pytest.mark.parametrize("rival", range(1, 17))
def test_a_rival_of_a_long_copy_fills_the_column_behind_it(rival):
    """Sixteen in a chain and one beside the first: columns 0 to 17 without a gap, out of order."""
    parents = [0, *range(1, 16)]
    parents = [parent + (parent > rival) for parent in parents]
    parents.insert(rival, 0)
    columns = place_drafts(parents)
    assert sorted(columns) == list(range(1, 18))

    check_mask(tuple(parents), (), padding=0)
