"""Which tokens of a row may be drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from la_runtime.filters import filter_scores, find_above, rank_best, sum_exp

VOCAB_SIZE = 10

rows = st.lists(st.floats(-8, 8, width=32), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE).map(
    lambda values: np.asarray(values, dtype=np.float32)
)


def survivors(scores, *, top_k, top_p, min_p):
    return filter_scores(scores, top_k=top_k, top_p=top_p, min_p=min_p).ids


def slow_survivors(scores, top_k, top_p, min_p):
    """The definition, token by token, best first."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    order = [i for i in order if scores[i] > -math.inf]
    if top_k:
        order = order[:top_k]
    weights = [math.exp(float(scores[i]) - float(scores[order[0]])) for i in order]
    if top_p < 1:
        kept, before = [], 0.0
        for token, weight in zip(order, weights, strict=True):
            if before >= top_p * sum(weights):
                break
            kept.append(token)
            before += weight
        order = kept
    if min_p > 0:
        order = [i for i in order if scores[i] >= scores[order[0]] + math.log(min_p)]
    return sorted(order)


@given(
    scores=rows,
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.05, 0.3, 0.77, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 0.9, 1.0]),
)
def test_filters_keep_what_their_definition_keeps(scores, top_k, top_p, min_p):
    found = survivors(scores, top_k=top_k, top_p=top_p, min_p=min_p)

    assert found.tolist() == slow_survivors(scores, top_k, top_p, min_p)
    assert int(np.argmax(scores)) in found


def test_ties_at_a_cut_go_to_the_lowest_ids():
    flat = np.zeros(VOCAB_SIZE, dtype=np.float32)

    assert survivors(flat, top_k=3, top_p=1.0, min_p=0.0).tolist() == [0, 1, 2]
    assert survivors(flat, top_k=0, top_p=0.35, min_p=0.0).tolist() == [0, 1, 2, 3]
    assert survivors(flat, top_k=0, top_p=1.0, min_p=1.0).tolist() == list(range(VOCAB_SIZE))


def test_rows_of_several_blocks_keep_what_the_definition_keeps():
    rng = np.random.default_rng(2)
    scores = rng.normal(0, 3, 20_000).astype(np.float32)
    scores[rng.integers(0, 20_000, 500)] = -np.inf
    for top_k, top_p, min_p in (
        (50, 1.0, 0.0),
        (0, 0.9, 0.0),
        (9000, 0.5, 0.0),
        (0, 1.0, 0.01),
        (300, 0.9, 0.02),
        (30_000, 0.999, 0.0),
    ):
        found = survivors(scores, top_k=top_k, top_p=top_p, min_p=min_p)
        assert found.tolist() == slow_survivors(scores, top_k, top_p, min_p)


def test_forbidden_tokens_never_survive():
    scores = np.full(VOCAB_SIZE, -np.inf, dtype=np.float32)
    scores[[2, 7]] = 1.0, 0.5

    for top_k, top_p, min_p in ((5, 1.0, 0.0), (0, 0.999, 0.0), (0, 1.0, 1e-9), (3, 0.99, 0.1)):
        assert survivors(scores, top_k=top_k, top_p=top_p, min_p=min_p).tolist() == [2, 7]


def test_distances_to_the_cuts_are_those_of_their_definitions():
    scores = np.log(np.asarray([0.4, 0.3, 0.21, 0.05, 0.04], dtype=np.float32))

    by_rank = filter_scores(scores, top_k=4, top_p=1.0, min_p=0.0)
    assert np.isinf(by_rank.slack).all(), "the fifth is too far to be looked at"
    scores[4] = math.log(0.049)
    by_rank = filter_scores(scores, top_k=4, top_p=1.0, min_p=0.0)
    expected = np.log(np.asarray([0.4, 0.3, 0.21, 0.05]) / 0.049)
    np.testing.assert_allclose(by_rank.slack, expected, 1e-4)
    np.testing.assert_allclose(by_rank.cut_by, [math.log(0.05 / 0.049)], 1e-4)
    scores[4] = math.log(0.04)
    by_share = filter_scores(scores, top_k=0, top_p=1.0, min_p=0.51)
    assert by_share.ids.tolist() == [0, 1, 2]
    np.testing.assert_allclose(by_share.slack[2], math.log(0.21 / (0.4 * 0.51)), 1e-4)

    by_mass = filter_scores(scores, top_k=0, top_p=0.71, min_p=0.0)
    assert by_mass.ids.tolist() == [0, 1, 2]
    odds = math.log(0.71 / 0.29) - math.log(0.7 / 0.3)  # 0.7 lies before token 2
    np.testing.assert_allclose(by_mass.slack[2], odds, 1e-3)

    near = filter_scores(scores, top_k=0, top_p=0.69, min_p=0.0)
    assert near.ids.tolist() == [0, 1]
    assert near.cut_ids.tolist() == [2]
    odds = math.log(0.7 / 0.3) - math.log(0.69 / 0.31)
    np.testing.assert_allclose(near.cut_by, [odds], 1e-3)


@given(scores=rows, count=st.integers(0, 12))
def test_the_best_are_ranked_with_ties_to_the_lowest_id(scores, count):
    order = sorted(range(VOCAB_SIZE), key=lambda i: (-scores[i], i))

    assert rank_best(scores, count).tolist() == order[:count]


@pytest.mark.parametrize("count", [1, 40, 312, 313, 1000, 20_000])
@pytest.mark.parametrize("num_forbidden", [0, 19_990])
def test_the_best_of_a_wide_row_are_those_of_the_sorted_row(count, num_forbidden):
    """The row has 312 stretches and a rest; ties, and a few peaks close together."""
    rng = np.random.default_rng(7)
    scores = np.round(rng.normal(0, 3, 20_000), 1).astype(np.float32)
    scores[5_000:5_030] += 9.0
    scores[rng.permutation(20_000)[:num_forbidden]] = -np.inf
    order = np.lexsort((np.arange(20_000), -scores))
    finite = [i for i in order.tolist() if np.isfinite(scores[i])]

    assert rank_best(scores, count).tolist() == finite[:count]
    kept = filter_scores(scores, top_k=count, top_p=1.0, min_p=0.0)
    assert sorted(kept.ids.tolist()) == sorted(finite[:count])


@pytest.mark.parametrize("floor", [0.5, -1.0, -np.inf])
def test_what_is_above_a_floor_is_finite_and_may_be_on_it(floor):
    scores = np.asarray([0.5, -np.inf, 0.4999, -1.0, np.finfo(np.float32).min, 3.0], np.float32)

    expected = [i for i, score in enumerate(scores) if floor <= score and np.isfinite(score)]
    assert find_above(scores, floor).tolist() == expected


def test_sums_of_exponentials_over_several_blocks():
    scores = np.random.default_rng(0).normal(0, 4, 30_000).astype(np.float32)

    exact = np.exp(scores.astype(np.float64) - 5.0).sum()
    np.testing.assert_allclose(sum_exp(scores, 5.0), exact, rtol=1e-6)


def test_top_p_is_a_share_of_what_top_k_left():
    """Of two equal survivors the first alone holds half; the others, as near, do not count."""
    flat = np.zeros(VOCAB_SIZE, dtype=np.float32)

    assert survivors(flat, top_k=2, top_p=0.5, min_p=0.0).tolist() == [0]
    assert survivors(flat, top_k=2, top_p=0.51, min_p=0.0).tolist() == [0, 1]


def test_a_token_stays_near_its_cut_where_the_mass_before_it_exceeds_a_rounded_total(monkeypatch):
    """The sum over the row came out too small: what stands before token 2 is more than all."""
    weight = math.exp(-10.0)
    monkeypatch.setattr("la_runtime.filters.sum_exp", lambda scores, peak: 1 + 0.5 * weight)
    row = np.asarray([0.0, -10.0, -10.01], dtype=np.float32)

    left = filter_scores(row, top_k=0, top_p=1 - 0.1 * weight, min_p=0.0)

    assert left.ids.tolist() == [0, 1]
    assert left.cut_ids.tolist() == [2]
    assert left.cut_by.tolist() == [float(row[1]) - float(row[2])]
