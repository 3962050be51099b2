"""Successors that the model has found likely before."""

from __future__ import annotations

from la_runtime.drafting.successors import RecycledSource
from tests.la_runtime.drafting.news import make_news


def test_the_best_tokens_of_every_verified_row_are_proposed_behind_its_token():
    """Rows: the root 1 (best 2, 3), a rejected draft 4 (best 5). What follows is 3, then 4."""
    source = RecycledSource((8, 1))
    news = make_news([3], root=1, drafts=[4], best={0: {2: 9.0, 3: 8.0}, 1: {5: 9.0, 1: 1.0}})
    source.learn(news)
    source.learn(make_news([4], root=3, best={0: {4: 5.0}}))

    found = source.propose()

    by_parent = [
        (0 if not parent else found.token_ids[parent - 1], token_id)
        for token_id, parent in zip(found.token_ids, found.parents, strict=True)
    ]
    assert by_parent[0] == (0, 5), "4 is the root now, and its best was 5"
    assert (0, 1) in by_parent
    assert (1, 2) in by_parent, "behind 1 there may be 2"


def test_the_list_of_two_tokens_counts_before_that_of_one():
    """Behind 4 came 5 after a 1, and 6 after a 2."""
    lists = {(1, 4): 5, (2, 4): 6}
    for before, expected in ((1, 5), (2, 6), (3, 6)):  # behind 3 4 the latest list of 4
        source = RecycledSource((0, 0))
        for (first, second), follower in lists.items():
            source.learn(make_news([first], root=0, best={0: {0: 1.0}}))
            source.learn(make_news([second], root=first, best={0: {0: 1.0}}))
            source.learn(make_news([0], root=second, best={0: {follower: 1.0}}))
        source.learn(make_news([before, 4], root=0, drafts=[before], best={0: {0: 1}, 1: {0: 1}}))
        assert source.propose().token_ids[0] == expected


def test_the_latest_list_of_a_token_counts():
    source = RecycledSource((0, 1))
    source.learn(make_news([1], root=1, best={0: {2: 1.0}}))
    source.learn(make_news([1], root=1, best={0: {7: 1.0}}))

    assert source.propose().token_ids[0] == 7


def test_ranks_that_came_true_are_trusted_more():
    source = RecycledSource((0, 1))
    before = None
    for _ in range(40):  # the second of the list comes, always
        source.learn(make_news([1], root=1, best={0: {2: 1.0, 1: 0.5}}))
        before = before or source.propose()
    after = source.propose()

    assert before.token_ids[0] == 2
    assert after.token_ids[0] == 1
    assert after.chances[0] > 0.6


def test_nothing_is_proposed_behind_an_unknown_token():
    assert RecycledSource((0, 1)).propose().token_ids == ()
