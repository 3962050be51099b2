"""Drafts from slots: the chain of the paper, and the tree of what else they find likely."""

from __future__ import annotations

import math

from la_runtime.drafting.slots import SlotChain, SlotTree
from la_runtime.layout import Group
from tests.la_runtime.drafting.news import make_news

GROUP = (Group(0, 2),)


def test_a_chain_is_the_best_of_each_slot_up_to_one_that_fails():
    chain = SlotChain()
    chain.learn(make_news([5], groups=GROUP, best={1: {7: 1.0}, 2: {8: 1.0}}))
    assert chain.propose().token_ids == (7, 8)

    chain.learn(make_news([5], groups=GROUP, best={1: {7: 1.0}}))
    assert chain.propose().token_ids == (7,)

    chain.learn(make_news([5], groups=GROUP, best={1: {7: 1.0}}, goes_on=False))
    assert chain.propose().token_ids == ()


def test_a_tree_has_the_likely_of_each_slot_in_turn():
    tree = SlotTree(2)
    tree.learn(make_news([5], groups=GROUP, best={1: {7: 2.0, 3: 1.5}, 2: {8: 3.0, 9: 0.0}}))

    found = tree.propose()

    edges = [
        (found.token_ids[parent - 1] if parent else None, token_id)
        for token_id, parent in zip(found.token_ids, found.parents, strict=True)
    ]
    assert set(edges) <= {(None, 7), (None, 3), (7, 8), (7, 9), (3, 8), (3, 9)}
    assert edges[0] == (None, 7)
    assert (7, 8) in edges


def test_a_probability_is_worth_what_came_of_it():
    """Slot 1 is sure of 7; it comes in the first run and never in the second."""
    chances = []
    for came in (7, 6):
        tree = SlotTree(1)
        for _ in range(40):
            tree.learn(make_news([came], groups=(Group(0, 1),), best={1: {7: 9.0, 3: 0.0}}))
        chances.append(tree.propose().chances[0] if tree.propose().chances else 0.0)

    assert chances[0] > 0.85
    assert chances[1] < 0.1


def test_slots_without_a_finite_score_propose_nothing():
    tree = SlotTree(2)
    tree.learn(make_news([5], groups=GROUP, best={1: {7: math.nan, 3: 1.0}, 2: {8: 1.0}}))

    assert tree.propose().token_ids == ()
