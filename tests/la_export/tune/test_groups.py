"""Groups behind prefixes: who sees whom, what is wanted of each slot."""

from __future__ import annotations

import numpy as np
import pytest

from la_export.tune.groups import NO_TARGET, draw_anchors, every_anchor, pack_groups
from la_export.tune.texts import OwnText
from la_runtime.layout import Group, GroupMask, make_rows

TEXT = OwnText(token_ids=(10, 11, 12, 13, 14, 15), answered_from=3)
SHORT = OwnText(token_ids=(20, 21, 22), answered_from=1)


def test_a_slot_is_to_propose_the_token_behind_the_models_next():
    block = pack_groups([TEXT], [[(2, 3), (3, 2)]])

    assert block.anchors.tolist() == [[2, 2, 2, 3, 3]]
    assert block.slots.tolist() == [[0, 1, 2, 0, 1]]
    assert block.positions.tolist() == [[3, 4, 5, 4, 5]]
    assert block.targets.tolist() == [[14, 15, NO_TARGET, 15, NO_TARGET]]


def test_texts_with_fewer_rows_are_padded_with_what_proposes_nothing():
    block = pack_groups([TEXT, SHORT], [[(2, 2), (3, 1)], [(0, 1)]])

    assert block.targets.tolist() == [[14, 15, 15], [22, NO_TARGET, NO_TARGET]]


def test_every_anchor_has_a_token_of_the_models_own_before_its_target():
    assert every_anchor(TEXT, 2) == [(2, 2), (3, 2)]
    assert every_anchor(SHORT, 1) == [(0, 1)]


@pytest.mark.parametrize("group_mask", list(GroupMask))
@pytest.mark.parametrize("anchor", [2, 3])
def test_slots_see_what_the_runtimes_slots_see(group_mask, anchor):
    num_slots, width = 3, len(TEXT.token_ids)
    block = pack_groups([TEXT], [[(2, num_slots), (3, num_slots)]])
    rows = make_rows(anchor + 1, (), (Group(0, num_slots),), group_mask=group_mask)

    sees = ~block.hidden(width, group_mask)[0]  # [rows, width + rows]

    first = 0 if anchor == 2 else num_slots
    for slot in range(num_slots):
        row = sees[first + slot]
        assert row[:width].tolist() == [column <= anchor for column in range(width)]
        among = row[width + first : width + first + num_slots]
        assert among.tolist() == rows.visible[anchor + 1 + slot, anchor + 1 :].tolist()
        assert row[width:].sum() == among.sum()


@pytest.mark.parametrize("seed", range(20))
def test_drawn_groups_differ_and_fill_the_rows(seed):
    rng = np.random.default_rng(seed)
    text = OwnText(token_ids=tuple(range(60)), answered_from=int(rng.integers(1, 50)))
    num_rows, num_slots = int(rng.integers(1, 80)), int(rng.integers(1, 9))

    (drawn,) = draw_anchors([text], num_slots=num_slots, num_rows=num_rows, rng=rng)

    anchors, lengths = [a for a, _ in drawn], [length for _, length in drawn]
    possible = [anchor for anchor, _ in every_anchor(text, 1)]
    assert len(set(anchors)) == len(anchors)
    assert set(anchors) <= set(possible)
    assert all(1 <= length <= num_slots for length in lengths)
    assert sum(lengths) <= num_rows
    assert sum(lengths) == num_rows or len(drawn) == len(possible)


def test_first_slots_are_drawn_more_often_than_later_ones():
    text = OwnText(token_ids=tuple(range(3000)), answered_from=1)

    (drawn,) = draw_anchors([text], num_slots=4, num_rows=4000, rng=np.random.default_rng(0))

    reached = [sum(length > slot for _, length in drawn) for slot in range(4)]
    assert reached == sorted(reached, reverse=True)
    assert reached[3] < 0.5 * reached[0]
