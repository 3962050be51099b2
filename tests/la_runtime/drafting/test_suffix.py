"""Copies from the text."""

from __future__ import annotations

import numpy as np
import pytest

from la_runtime.drafting.suffix import SuffixSource
from tests.la_runtime.drafting.news import make_news


def read(text, *, at_once=3):
    """A source that has read a text in pieces."""
    source = SuffixSource(text[:1])
    for start in range(1, len(text), at_once):
        source.propose()
        source.learn(make_news(text[start : start + at_once]))
    return source


def longest_path(found):
    path, node = [], 0
    for draft, (token_id, parent) in enumerate(zip(found.token_ids, found.parents, strict=True), 1):
        if parent == node:
            path.append(token_id)
            node = draft
    return path


def test_what_followed_the_last_tokens_before_is_proposed():
    found = read([1, 2, 3, 4, 5, 9, 8, 1, 2, 3]).propose()

    assert longest_path(found)[:4] == [4, 5, 9, 8]


def test_the_longest_match_is_copied_and_a_shorter_one_beside_it():
    """After 2 3 came 4; later, after 7 3, came 5. Behind 2 3 both are likely, 4 more so."""
    found = read([1, 2, 3, 4, 0, 7, 3, 5, 6, 2, 3]).propose()

    first = {
        token_id: chance
        for token_id, parent, chance in zip(
            found.token_ids, found.parents, found.chances, strict=True
        )
        if parent == 0
    }
    assert list(first) == [4, 5]
    assert first[4] > first[5]


def test_a_new_text_has_nothing_to_copy():
    assert read([1, 2, 3, 4, 5]).propose().token_ids == ()


@pytest.mark.parametrize("seed", range(40))
def test_every_copy_continues_an_earlier_occurrence_of_what_was_last(seed):
    """By a slower truth: the last n tokens, n at most 4, and what followed where they last were."""
    rng = np.random.default_rng(seed)
    text = rng.integers(3, size=rng.integers(2, 60)).tolist()

    found = read(text, at_once=int(rng.integers(1, 6))).propose()

    followers = set()
    for size in range(1, 5):
        places = [i for i in range(size, len(text)) if text[i - size : i] == text[-size:]]
        if places and len(text) >= size:
            followers.add(text[places[-1]])
    proposed = {
        token_id
        for token_id, parent in zip(found.token_ids, found.parents, strict=True)
        if not parent
    }
    assert proposed == followers
    assert all(
        chance <= (found.chances[parent - 1] if parent else 1.0)
        for parent, chance in zip(found.parents, found.chances, strict=True)
    )
    edges = list(zip(found.parents, found.token_ids, strict=True))
    assert len(set(edges)) == len(edges), "siblings hold different tokens"


def test_what_came_true_is_trusted_more_and_what_did_not_less():
    """Two texts that end in 1 2; in one of them copies held, in the other not."""
    held = read([1, 2, 3] * 12, at_once=1)
    rng = np.random.default_rng(0)
    failed = read(
        [*rng.integers(3, 90, size=30).tolist(), 1, 2, 3, 1, 2, 5, 1, 2, 6, 1, 2], at_once=1
    )

    def first_chance(source):
        return source.propose().chances[0]

    assert first_chance(held) > 0.9
    assert first_chance(failed) < 0.45


def test_it_keeps_at_most_four_positions_a_token():
    source = read(np.random.default_rng(1).integers(50, size=400).tolist())

    assert len(source._latest) <= 4 * len(source._token_ids)
