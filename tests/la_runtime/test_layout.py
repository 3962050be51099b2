"""The rows of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from la_runtime.layout import DraftTree, Group, GroupMask, Layout, make_rows


@st.composite
def draft_parents(draw: st.DrawFn, max_drafts: int = 7) -> tuple[int, ...]:
    return tuple(draw(st.integers(0, index)) for index in range(draw(st.integers(0, max_drafts))))


def test_worked_example_of_the_full_layout():
    """k = 2, two drafts, root at position 4: rows at 4, 5, 6, slots at 5, 6 | 6, 7 | 7, 8."""
    rows = make_rows(1, (0, 1), Layout.FULL.groups(2, 2))

    assert (4 + rows.offsets).tolist() == [4, 5, 6, 5, 6, 6, 7, 7, 8]
    assert rows.slot_index.tolist() == [0, 0, 0, 1, 2, 1, 2, 1, 2]
    assert [list(rows.slot_rows(node)) for node in range(3)] == [[3, 4], [5, 6], [7, 8]]


@pytest.mark.parametrize(
    ("k", "root_only", "full"), [(0, 1, 1), (2, 5, 9), (4, 9, 25), (8, 17, 81)]
)
def test_widest_step_of_each_layout(k, root_only, full):
    assert Layout.ROOT_ONLY.max_rows(k) == root_only
    assert Layout.FULL.max_rows(k) == full


@given(parents=draft_parents(), num_known=st.integers(1, 5), data=st.data())
def test_visibility_is_ancestry(parents, num_known, data):
    """Against a slow truth that walks up from each row."""
    nodes = data.draw(st.lists(st.integers(0, len(parents)), unique=True))
    groups = tuple(Group(node, data.draw(st.integers(1, 3))) for node in nodes)
    group_mask = data.draw(st.sampled_from(GroupMask))

    rows = make_rows(num_known, parents, groups, group_mask=group_mask)

    def path_to(node: int) -> set[int]:
        seen = set(range(num_known))
        while node:
            seen.add(num_known - 1 + node)
            node = parents[node - 1]
        return seen

    for known in range(num_known - 1):
        assert set(np.flatnonzero(rows.visible[known])) == set(range(known + 1))
    for node in range(len(parents) + 1):
        row = rows.row(node)
        assert set(np.flatnonzero(rows.visible[row])) == path_to(node)
        assert rows.offsets[row] == len(path_to(node)) - 1
    for group in groups:
        slots = rows.slot_rows(group.node)
        assert len(slots) == group.num_slots
        for slot, row in enumerate(slots, 1):
            own = {row} if group_mask is GroupMask.STRICT else set(slots[:slot])
            assert set(np.flatnonzero(rows.visible[row])) == path_to(group.node) | own
            assert rows.offsets[row] == len(path_to(group.node)) - 1 + slot
            assert rows.slot_index[row] == slot
    assert rows.num_rows == num_known + len(parents) + sum(g.num_slots for g in groups)


@given(parents=draft_parents(), max_depth=st.integers(0, 8))
def test_what_is_kept_of_a_tree_is_a_tree(parents, max_depth):
    tree = DraftTree(token_ids=tuple(range(len(parents))), parents=parents)

    shallow = [draft for draft, depth in enumerate(tree.depths, 1) if depth <= max_depth]
    cut = tree.keep(shallow)

    assert tree.depth == max(tree.depths, default=0)
    kept = [t for t, depth in zip(tree.token_ids, tree.depths, strict=True) if depth <= max_depth]
    assert list(cut.token_ids) == kept
    for token, parent in zip(cut.token_ids, cut.parents, strict=True):
        old_parent = parents[token]
        assert (parent == 0) == (old_parent == 0)
        if parent:
            assert cut.token_ids[parent - 1] == old_parent - 1


def test_a_chain_is_a_tree():
    chain = DraftTree.chain((7, 8, 9))

    assert chain.parents == (0, 1, 2)
    assert chain.depths == (1, 2, 3)
    assert chain.child(1, 8) == 2
    assert chain.child(1, 9) is None


def test_long_prompts_lay_out_as_short_ones_do():
    rows = make_rows(300, (), (Group(0, 2),))

    assert np.array_equal(rows.visible[:300, :300], np.tri(300, dtype=bool))
    assert rows.offsets[-2:].tolist() == [300, 301]


@pytest.mark.parametrize(
    ("token_ids", "parents", "message"),
    [
        ((1, 2), (0,), "one parent per draft"),
        ((1,), (1,), "parents come first"),
        ((1, 2), (0, 2), "parents come first"),
        ((1,), (-1,), "parents come first"),
        ((1, 1), (0, 0), "siblings hold different tokens"),
    ],
)
def test_impossible_trees_are_refused(token_ids, parents, message):
    with pytest.raises(AssertionError, match=message):
        DraftTree(token_ids=token_ids, parents=parents)


def test_equal_tokens_behind_different_parents_are_no_siblings():
    assert DraftTree(token_ids=(1, 1, 1), parents=(0, 1, 2)).depths == (1, 2, 3)


@pytest.mark.parametrize("layout", Layout)
def test_without_lookaheads_there_are_no_groups(layout):
    assert layout.groups(3, 0) == ()


def test_an_absent_group_has_no_rows():
    rows = make_rows(1, (0, 1), (Group(1, 2),))

    assert rows.slot_rows(0) == range(0)
    assert rows.slot_rows(1) == range(3, 5)
    assert rows.slot_rows(2) == range(0)


@pytest.mark.parametrize("num_known", [0, -1])
def test_a_step_without_a_root_is_refused(num_known):
    with pytest.raises(AssertionError, match="a step has a root"):
        make_rows(num_known, (), ())


@pytest.mark.parametrize(
    ("num_known", "num_drafts", "are_shared"),
    [(1, 0, True), (128, 0, True), (129, 0, False), (100, 28, True), (100, 29, False)],
)
def test_short_steps_are_laid_out_once(num_known, num_drafts, are_shared):
    def make():
        return make_rows(num_known, tuple(range(num_drafts)), (Group(0, 2),))

    assert (make() is make()) == are_shared


@pytest.mark.parametrize("num_known", [3, 200])
def test_rows_that_may_be_shared_cannot_be_written(num_known):
    rows = make_rows(num_known, (0,), (Group(0, 2),))

    for array in (rows.offsets, rows.slot_index, rows.visible):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0
