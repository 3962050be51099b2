"""The two selection rules."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from la_runtime.acceptance import accept_exact, accept_threshold
from la_runtime.drafting.slots import proposing_rows
from la_runtime.layout import NO_DRAFTS, DraftTree, Group, Layout, make_rows


@given(
    drafts=st.lists(st.integers(0, 2), max_size=6),
    choices=st.lists(st.integers(0, 2), min_size=7, max_size=7),
)
def test_a_chain_is_accepted_up_to_its_first_difference(drafts, choices):
    path = accept_exact(DraftTree.chain(tuple(drafts)), choices.__getitem__)

    equal = [d == c for d, c in zip(drafts, choices, strict=False)]
    length = equal.index(False) if False in equal else len(equal)
    assert path == tuple(range(1, length + 1))


def test_a_tree_is_followed_where_the_model_goes():
    """Root -> 5 or 6; 6 -> 7 or 8; 8 -> 9. The model says 6, 8, then something else."""
    tree = DraftTree(token_ids=(5, 6, 7, 8, 9), parents=(0, 0, 2, 2, 4))

    asked = []

    def choose(node):
        asked.append(node)
        return [6, 0, 8, 0, 1, 0][node]

    assert accept_exact(tree, choose) == (2, 4)
    assert asked == [0, 2, 4], "no other row is looked at"


def test_without_drafts_nothing_is_accepted():
    assert accept_exact(NO_DRAFTS, lambda node: 3) == ()


@pytest.mark.parametrize(
    ("tau", "count"), [(0.0, 4), (0.1, 4), (0.5, 3), (0.6, 1), (0.9, 1), (0.91, 0), (1.0, 0)]
)
def test_threshold_takes_the_longest_probable_prefix(tau, count):
    assert accept_threshold([0.9, 0.5, 0.9, 0.1], tau) == count


def test_what_is_no_number_is_not_probable():
    assert accept_threshold([0.9, math.nan, 0.9], 0.0) == 1


def test_proposals_come_from_the_group_behind_the_accepted_prefix():
    rows = make_rows(1, (0, 1), Layout.FULL.groups(2, 2))

    assert list(proposing_rows(rows, ())) == [3, 4]
    assert list(proposing_rows(rows, (1,))) == [5, 6]
    assert list(proposing_rows(rows, (1, 2))) == [7, 8]


def test_an_absent_group_is_replaced_by_the_nearest_one_less_its_known_slots():
    rows = make_rows(1, (0, 1, 2), (Group(0, 3), Group(1, 3)))

    assert list(proposing_rows(rows, (1, 2))) == [8, 9]
    assert list(proposing_rows(rows, (1, 2, 3))) == [9]
    assert list(proposing_rows(make_rows(1, (0, 1), (Group(0, 2),)), (1, 2))) == []
    assert list(proposing_rows(make_rows(1, (), ()), ())) == []


def test_off_the_path_groups_do_not_propose():
    """Two children of the root, a group behind each: only the accepted one's counts."""
    rows = make_rows(1, (0, 0), (Group(1, 1), Group(2, 1)))

    assert list(proposing_rows(rows, (2,))) == [4]
    assert list(proposing_rows(rows, ())) == []
