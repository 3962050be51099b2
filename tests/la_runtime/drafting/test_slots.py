"""Drafts from slots: the chain of the paper, and the tree of what else they find likely."""

from __future__ import annotations

import math

from la_runtime.drafter import make_sources
from la_runtime.drafting.slots import SlotChain, SlotTree
from la_runtime.drafting.successors import Successors
from la_runtime.layout import Group
from la_runtime.source_names import SourceName
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


def test_tuned_slots_are_believed_from_the_start_and_found_out_all_the_same():
    chances = []
    for is_tuned in (False, True):
        tree = SlotTree(1, is_tuned=is_tuned)
        first = None
        for _ in range(60):
            tree.learn(make_news([6], groups=(Group(0, 1),), best={1: {7: 9.0, 3: 0.0}}))
            found = tree.propose().chances
            first = found[0] if first is None else first
        chances.append((first, found[0] if found else 0.0))

    (untuned, _), (tuned, at_last) = chances
    assert tuned > 2 * untuned > 0
    assert at_last < tuned / 4


def test_slots_without_a_finite_score_propose_nothing():
    tree = SlotTree(2)
    tree.learn(make_news([5], groups=GROUP, best={1: {7: math.nan, 3: 1.0}, 2: {8: 1.0}}))

    assert tree.propose().token_ids == ()


def test_what_followed_the_bonus_token_elsewhere_is_likelier_than_what_did_not():
    """Both proposals are as likely by themselves; 3 is known to follow the bonus token 5."""
    successors = Successors()
    successors.learn(make_news([5], best={0: {3: 2.0, 4: 1.0}}), (1, 5))
    tree = SlotTree(1, (0, 5), successors)
    # The slot behind the root 5 proposes what comes behind the next bonus token, which is 5 again.
    tree.learn(make_news([5], groups=(Group(0, 1),), best={1: {7: 1.0, 3: 1.0}}))

    found = tree.propose()

    assert found.token_ids == (3, 7)
    assert found.chances[0] > found.chances[1]


def test_proposals_are_judged_by_what_stood_in_the_lists_before_the_pass():
    """A list that a pass brings always has the token that came at its head."""
    names = tuple(SourceName)
    for order in (names, names[::-1]):
        sources = make_sources(order, prompt=[1, 2], k=2)
        assert tuple(sources) == names
