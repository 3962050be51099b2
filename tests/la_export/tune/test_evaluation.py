"""What is counted of proposals."""

from __future__ import annotations

import numpy as np
import pytest

from la_export.tune.evaluation import Acceptance, chain_tokens_per_pass, measure, spread_anchors
from la_export.tune.groups import pack_groups
from la_export.tune.library import TextLibrary
from la_export.tune.texts import OwnText

TEXTS = [
    OwnText(token_ids=tuple(range(10)), answered_from=2),
    OwnText(token_ids=tuple(range(20, 27)), answered_from=1),
]


def library():
    return TextLibrary(model=None, texts=TEXTS, memory_bytes=0)


def propose_where(is_right):
    """Slots that are right where a function of anchor and slot says so."""

    def propose(texts, indices, anchors):
        block = pack_groups([texts.texts[index] for index in indices], anchors)
        right = np.vectorize(is_right)(block.anchors, block.slots)
        return np.where(right, block.targets, -7)

    return propose


def test_acceptance_is_counted_by_slot_and_until_the_first_that_fails():
    acceptance = Acceptance(
        right=np.array([[1, 1, 0], [0, 1, 1], [1, 0, 0]], bool),
        known=np.array([[1, 1, 1], [1, 1, 1], [1, 1, 0]], bool),
    )

    assert acceptance.by_slot == pytest.approx((2 / 3, 2 / 3, 1 / 2))
    assert acceptance.accepted == pytest.approx((2 + 0 + 1) / 3)


def test_measured_groups_are_those_of_the_anchors():
    anchors = [[(1, 2), (5, 2)], [(0, 2)]]

    found = measure(library(), anchors, 2, propose_where(lambda anchor, slot: anchor > 0))

    assert found.right.tolist() == [[True, True], [True, True], [False, False]]
    assert found.known.all()


def test_what_stands_behind_the_end_is_unknown_and_never_right():
    found = measure(library(), [[(7, 2)]], 2, propose_where(lambda *_: True))

    assert found.known.tolist() == [[True, False]]
    assert found.by_slot == (1.0, 0.0)


@pytest.mark.parametrize(
    ("is_right", "num_slots", "expected"),
    [
        # Answers of 8 and 6 tokens: 7 and 5 anchors, whose first tokens come from the prefill.
        (lambda *_: False, 2, (7 + 5) / 12),
        (lambda *_: True, 1, (8 + 6) / 7),
        (lambda anchor, slot: slot == 0, 2, (8 + 6) / 7),
    ],
)
def test_a_replay_counts_passes(is_right, num_slots, expected):
    found, passes = chain_tokens_per_pass(library(), num_slots, propose_where(is_right))

    assert passes == (12 if expected == 1 else 7)
    assert found == pytest.approx(expected)


def test_spread_anchors_keep_both_ends():
    assert spread_anchors(TEXTS[0], 2, 3) == [(1, 2), (4, 2), (7, 2)]
    assert spread_anchors(TEXTS[1], 1, 99) == [(anchor, 1) for anchor in range(5)]
