"""Trees of the likeliest candidates."""

from __future__ import annotations

import numpy as np
import pytest

from la_runtime.drafting.candidates import Candidates, grow, merge
from la_runtime.layout import DraftTree
from la_runtime.source_names import SourceName

SUFFIX, RECYCLED = SourceName.SUFFIX, SourceName.RECYCLED


def paths(token_ids, parents):
    """Each node's tokens from the root down."""
    found = [()]
    for token_id, parent in zip(token_ids, parents, strict=True):
        found.append((*found[parent], token_id))
    return found[1:]


def draw(rng, *, vocab_size=4, most=12):
    """A random trie with chances that never rise on the way down."""
    tokens, parents, chances = [], [], []
    edges = set()
    for _ in range(rng.integers(most + 1)):
        edge = (int(rng.integers(len(tokens) + 1)), int(rng.integers(vocab_size)))
        if edge in edges:
            continue
        edges.add(edge)
        parents.append(edge[0])
        tokens.append(edge[1])
        chances.append((chances[edge[0] - 1] if edge[0] else 1.0) * float(rng.random()))
    return Candidates(token_ids=tuple(tokens), parents=tuple(parents), chances=tuple(chances))


def test_paths_grow_from_the_likeliest_one():
    """Behind 7: 1 with .6, 2 with .3; behind 1: 3 with .9, 4 with .1; behind 2 and 3: nothing."""
    children = {7: [(1, 0.6), (2, 0.3)], 1: [(3, 0.9), (4, 0.1)]}

    found = grow(
        lambda depth, tokens: children.get(tokens[1], []),
        root=(0, 7),
        most=10,
        least_chance=0.06,
    )

    assert found == Candidates(
        token_ids=(1, 3, 2, 4),
        parents=(0, 1, 0, 1),
        chances=(0.6, pytest.approx(0.54), 0.3, pytest.approx(0.06)),
    )


def test_children_know_their_depth_and_no_more_grow_than_are_wanted():
    asked = []

    def children(depth, tokens):
        asked.append((depth, *tokens))
        return [(tokens[1] + 1, 0.5)]

    found = grow(children, root=(9, 0), most=3, least_chance=0.0)

    assert found.token_ids == (1, 2, 3)
    assert asked == [(1, 9, 0), (2, 0, 1), (3, 1, 2), (4, 2, 3)]


def test_equal_paths_become_one_with_the_best_of_their_chances():
    one = Candidates(token_ids=(5, 6), parents=(0, 1), chances=(0.5, 0.4))
    other = Candidates(token_ids=(8, 5, 9), parents=(0, 0, 2), chances=(0.45, 0.2, 0.1))

    ranked = merge([(SUFFIX, one), (RECYCLED, other)], most=9, max_depth=9)

    assert ranked.drafts == DraftTree(token_ids=(5, 8, 6, 9), parents=(0, 0, 1, 1))
    assert ranked.chances == pytest.approx((0.5, 0.45, 0.4, 0.1))
    assert ranked.sources == ({SUFFIX, RECYCLED}, {RECYCLED}, {SUFFIX}, {RECYCLED})


@pytest.mark.parametrize("most", [0, 1, 3, 9])
@pytest.mark.parametrize("max_depth", [0, 2, 9])
def test_one_chain_alone_is_cut_as_any_tree_is(most, max_depth):
    chain = Candidates(token_ids=(5, 6, 5), parents=(0, 1, 2), chances=(0.9, 0.5, 0.5))

    alone = merge([(SUFFIX, chain)], most=most, max_depth=max_depth)

    beside_nothing = merge(
        [(SUFFIX, chain), (RECYCLED, Candidates())], most=most, max_depth=max_depth
    )
    assert alone == beside_nothing
    assert len(alone.chances) == min(3, most, max_depth)


def test_rivals_have_no_more_than_their_place_and_what_follows_shrinks_as_they_do():
    """Of .9 and .6 for one place the second gets .1, and .3 behind it becomes .05."""
    one = Candidates(token_ids=(5,), parents=(0,), chances=(0.9,))
    other = Candidates(token_ids=(8, 9), parents=(0, 1), chances=(0.6, 0.3))

    ranked = merge([(SUFFIX, one), (RECYCLED, other)], most=9, max_depth=9)

    assert ranked.drafts.token_ids == (5, 8, 9)
    assert ranked.chances == pytest.approx((0.9, 0.1, 0.05))


def test_the_likeliest_path_takes_the_likeliest_child_of_each_node():
    tree = Candidates(token_ids=(5, 8, 6, 9), parents=(0, 0, 2, 2), chances=(0.3, 0.5, 0.1, 0.2))

    path = merge([(SUFFIX, tree)], most=9, max_depth=9).likeliest_path()

    assert path.drafts == DraftTree(token_ids=(8, 9), parents=(0, 1))
    assert path.chances == (0.5, 0.2)
    assert path.sources == ({SUFFIX}, {SUFFIX})


@pytest.mark.parametrize("seed", range(60))
def test_the_likeliest_of_all_paths_are_kept_and_every_beginning_is_a_tree(seed):
    rng = np.random.default_rng(seed)
    proposals = [(SUFFIX, draw(rng)), (RECYCLED, draw(rng)), (SourceName.LOOKAHEAD, draw(rng))]
    most, max_depth = int(rng.integers(1, 15)), int(rng.integers(5))

    ranked = merge(proposals, most=most, max_depth=max_depth)

    best = {}
    for _, found in proposals:
        for path, chance in zip(paths(found.token_ids, found.parents), found.chances, strict=True):
            if len(path) <= max_depth:
                best[path] = max(chance, best.get(path, 0.0))
    assert len(ranked.chances) == min(most, len(best))
    assert list(ranked.chances) == sorted(ranked.chances, reverse=True)
    taken = {}
    for path, chance in zip(
        paths(ranked.drafts.token_ids, ranked.drafts.parents), ranked.chances, strict=True
    ):
        assert chance <= best[path]
        taken[path] = chance
    for path, chance in {(): 1.0, **taken}.items():
        children = [c for child, c in taken.items() if child[:-1] == path and child]
        assert sum(children) <= chance + 1e-9, "one at most comes true"
    for count in range(len(ranked.chances) + 1):
        beginning = ranked.first(count)
        assert len(beginning.sources) == len(beginning.chances) == count
        assert all(parent <= i for i, parent in enumerate(beginning.drafts.parents))
