"""From a row of logits to a token."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from la_runtime.choosing import Chooser
from la_runtime.errors import LookaheadError, NonFiniteScoreError, UsageError
from la_runtime.filters import NEAR, filter_scores
from la_runtime.noise import gumbel_noise
from la_runtime.sampling import SamplingParams

VOCAB_SIZE = 10
LOGITS = np.asarray([2.0, 1.0, 0.5, 0.0, -0.5, 3.0, 1.0, -2.0, 0.25, 1.5], dtype=np.float32)
# A correct sampler fails with this probability in a chi-square test.
FALSE_ALARM_RATE = 1e-6
# 99.9999 % quantiles of the chi-square distribution by degrees of freedom.
CHI_SQUARE_LIMITS = {1: 23.93, 2: 27.63, 3: 30.66, 4: 33.38, 5: 35.89, 6: 38.26, 9: 44.81}

rows = st.lists(st.floats(-8, 8, width=32), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE).map(
    lambda values: np.asarray(values, dtype=np.float32)
)


def chooser(params, *, prompt=(0,), end_token_ids=()):
    return Chooser(
        params,
        request=3,
        prompt=prompt,
        end_token_ids=end_token_ids,
        scratch=np.empty(VOCAB_SIZE, dtype=np.float32),
    )


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_k=5),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1),
    ],
)
def test_draws_follow_the_exact_distribution(params):
    """Chi-square over 100,000 draws; a correct sampler fails once in a million runs."""
    draws = 100_000
    scaled = (LOGITS - LOGITS.max()) / np.float32(params.temperature)
    ids = filter_scores(scaled, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p).ids
    weights = np.exp(scaled[ids].astype(np.float64))
    expected = draws * weights / weights.sum()
    noise = gumbel_noise(11, np.arange(draws)[:, None], ids)  # [draws, survivors]
    drawn = np.argmax(scaled[ids] + noise, axis=1)
    counts = np.bincount(drawn, minlength=len(ids))

    statistic = float(((counts - expected) ** 2 / expected).sum())

    assert statistic < CHI_SQUARE_LIMITS[len(ids) - 1]
    chosen = [
        chooser(replace(params, seed=11)).choose(LOGITS, [0] * position).token_id
        for position in range(1, 200)
    ]
    assert chosen == [int(ids[drawn[position]]) for position in range(1, 200)]


@given(logits=rows, seed=st.integers(0, 2**63), position=st.integers(1, 9))
def test_top_k_1_is_greedy_at_any_temperature(logits, seed, position):
    sampled = chooser(SamplingParams(temperature=1.7, top_k=1, seed=seed))
    greedy = chooser(SamplingParams())
    tokens = [0] * position

    assert sampled.choose(logits, tokens).token_id == greedy.choose(logits, tokens).token_id
    assert greedy.choose(logits, tokens).token_id == int(np.argmax(logits))


def test_penalties_are_those_of_their_formulas():
    """Token 5 leads; what was said is pushed back by exactly the stated amounts."""
    tokens = [5, 9, 0, 9, 0, 0]  # prompt 5, 9; output 0, 9, 0, 0
    recorded = {}

    def record(token_ids, scores):
        recorded["ids"], recorded["scores"] = list(token_ids), scores.copy()

    params = SamplingParams(
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={4: 1.0, 7: -1.0},
        logits_processors=(record,),
    )
    chooser(params, prompt=(5, 9)).choose(LOGITS, tokens)

    expected = LOGITS.copy()
    expected[4] += 1.0
    expected[7] -= 1.0
    for token in (0, 5, 9):
        expected[token] = expected[token] / 2 if expected[token] > 0 else expected[token] * 2
    expected[0] -= 0.5 + 0.25 * 3
    expected[9] -= 0.5 + 0.25 * 1
    np.testing.assert_allclose(recorded["scores"], expected, rtol=1e-6)
    assert recorded["ids"] == tokens


def test_a_repetition_penalty_multiplies_negative_scores():
    params = SamplingParams(repetition_penalty=3.0, logit_bias={1: 0.0})
    low = -np.ones(VOCAB_SIZE, dtype=np.float32)
    low[2] = -1.5

    assert chooser(params, prompt=(0, 1)).choose(low, [0, 1]).token_id == 3


def test_end_tokens_wait_for_min_new_tokens():
    params = SamplingParams(min_new_tokens=2)
    waiting = chooser(params, prompt=(0,), end_token_ids=(5, 0))

    assert [waiting.choose(LOGITS, [0] * n).token_id for n in (1, 2, 3)] == [9, 9, 5]


def test_logprobs_are_those_of_the_models_own_scores():
    params = SamplingParams(logprobs=3, logit_bias={7: 100.0})

    choice = chooser(params).choose(LOGITS, [0])

    exact = LOGITS.astype(np.float64) - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    assert choice.token_id == 7
    assert choice.logprob == pytest.approx(exact[7], abs=1e-6)
    assert [token for token, _ in choice.top_logprobs] == [5, 0, 9]
    for token, logprob in choice.top_logprobs:
        assert logprob == pytest.approx(exact[token], abs=1e-6)


def test_the_row_itself_is_not_changed():
    params = SamplingParams(temperature=0.7, repetition_penalty=2.0, top_p=0.5)
    row = LOGITS.copy()
    row.setflags(write=False)

    chooser(params).choose(row, [0, 1])

    assert np.array_equal(row, LOGITS)


def test_margins_are_distances_between_best_and_second():
    assert chooser(SamplingParams(logit_bias={1: 0.0})).choose(LOGITS, [0]).margin == 1.0
    alone = chooser(SamplingParams(temperature=1.0, top_k=1))
    assert alone.choose(LOGITS, [0]).margin == math.inf


def test_a_processor_that_raises_is_named():
    def fail(token_ids, scores):
        raise RuntimeError("no grammar")

    params = SamplingParams(logits_processors=(fail,))

    with pytest.raises(LookaheadError, match=r"request 3 at position 2: RuntimeError: no grammar"):
        chooser(params).choose(LOGITS, [0, 1])


def test_forbidding_everything_is_an_error():
    def forbid(token_ids, scores):
        scores[:] = -np.inf

    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, logits_processors=(forbid,))
        with pytest.raises(NonFiniteScoreError, match=r"no token may be chosen in request 3"):
            chooser(params).choose(LOGITS, [0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_are_an_error(bad):
    row = LOGITS.copy()
    row[4] = bad

    with pytest.raises(NonFiniteScoreError, match="request 3 at position 1"):
        chooser(SamplingParams(temperature=1.0)).choose(row, [0, 1])


def test_a_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(UsageError, match="token 10; ids go from 0 to 9"):
        chooser(SamplingParams(logit_bias={10: 1.0}))


@given(
    logits=rows,
    nudges=st.lists(st.floats(-1, 1, width=32), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 9]),
    top_p=st.sampled_from([0.3, 0.8, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.4]),
    seed=st.integers(0, 10_000),
)
def test_a_choice_stands_while_logits_move_by_less_than_a_quarter_of_its_margin(
    logits, nudges, temperature, top_k, top_p, min_p, repetition_penalty, seed
):
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    tokens = [0, 3, 5]
    choice = chooser(params).choose(logits, tokens)
    looked_at = NEAR * temperature if params.has_filters and temperature else math.inf
    stretch = max(repetition_penalty, 1 / repetition_penalty)
    safe = min(choice.margin, looked_at / stretch, 8.0) / 4
    moved = logits + np.float32(safe * 0.99) * np.asarray(nudges, dtype=np.float32)

    assert safe >= 0
    if safe > 1e-5:  # less is within the rounding of the scores themselves
        assert chooser(params).choose(moved, tokens).token_id == choice.token_id


def test_margins_count_the_distance_to_a_cut():
    """Token 1 survives top_p by a hair and is drawn; token 2 is cut by a hair and would be."""
    row = np.full(VOCAB_SIZE, -30.0, dtype=np.float32)
    row[:3] = np.log([0.5, 0.3, 0.2])
    for top_p, close in ((0.501, True), (0.6, False), (0.801, True), (0.799, True), (0.7, False)):
        margins = [
            chooser(SamplingParams(temperature=1.0, top_p=top_p, seed=seed)).choose(row, [0]).margin
            for seed in range(300)
        ]
        assert (sum(margin < 0.02 for margin in margins) > 30) == close


def draw_from_all(row, params, position):
    """By definition: every token's score and noise; the best, and its lead on the second."""
    best = float(row.max())
    scores = (row - np.float32(best)) / np.float32(params.temperature)
    drawn = scores + gumbel_noise(params.seed, position, np.arange(len(row)))
    token_id = int(np.argmax(drawn))
    second = np.delete(drawn, token_id).max()
    return token_id, (float(drawn[token_id]) - float(second)) * params.temperature


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 6.0, 20.0])
@pytest.mark.parametrize("vocab_size", [2, 13, 300, 20_000])
def test_a_draw_that_looks_at_few_tokens_equals_one_that_looks_at_all(vocab_size, spread):
    """Flat rows, where luck decides, to steep ones, where the second-best is far below."""
    rng = np.random.default_rng(4)
    scratch = np.empty(vocab_size, dtype=np.float32)
    chosen = set()
    for seed in range(60):
        row = rng.normal(0, spread, vocab_size).astype(np.float32)
        params = SamplingParams(temperature=float(rng.choice([0.05, 0.8, 1.5, 40.0])), seed=seed)

        choice = Chooser(params, request=0, prompt=(0,), end_token_ids=(), scratch=scratch).choose(
            row, [0]
        )

        assert (choice.token_id, choice.margin) == draw_from_all(row, params, position=1)
        chosen.add(choice.token_id == np.argmax(row))
    assert chosen == {True, False} or (spread == 0.0 and vocab_size > 100)


def test_a_row_with_one_token_left_draws_it_whatever_its_luck():
    row = np.full(1000, 3.0, dtype=np.float32)

    def forbid_the_others(token_ids, scores):
        scores[np.arange(len(scores)) != 777] = -np.inf

    params = SamplingParams(temperature=1.0, logits_processors=(forbid_the_others,))
    scratch = np.empty_like(row)
    choice = Chooser(params, request=0, prompt=(0,), end_token_ids=(), scratch=scratch).choose(
        row, [0]
    )

    assert (choice.token_id, choice.margin) == (777, math.inf)


def test_a_bias_may_name_every_token_of_the_vocabulary_and_no_other():
    biases = {0: 9.0, VOCAB_SIZE - 1: 1.0}

    assert chooser(SamplingParams(logit_bias=biases)).choose(LOGITS, [3]).token_id == 0
    with pytest.raises(UsageError, match="token -1; ids go from 0 to 9"):
        chooser(SamplingParams(logit_bias={-1: 1.0}))


@pytest.mark.parametrize("penalty", [2.0, 0.5])
def test_a_repetition_penalty_may_double_a_difference_so_the_margin_is_halved(penalty):
    """Token 5 leads token 0 by one; token 7, which the penalty changes, is far below."""
    params = SamplingParams(repetition_penalty=penalty)

    assert chooser(params, prompt=(7,)).choose(LOGITS, [7]).margin == 0.5


def adjusted_scores(logits, tokens, *, prompt, **keywords):
    """What a logits processor sees."""
    seen = []
    params = SamplingParams(
        logits_processors=(lambda token_ids, scores: seen.append(scores.copy()),), **keywords
    )
    chooser(params, prompt=prompt).choose(np.asarray(logits, dtype=np.float32), tokens)
    return seen[0].tolist()


def test_a_repetition_penalty_turns_at_zero():
    row = [0.5, -0.5, 1.5, -1.5, 0.0, 8.0, 8.0, 8.0, 8.0, 8.0]

    found = adjusted_scores(row, [0, 1, 2, 3, 4], prompt=(0, 1, 2, 3, 4), repetition_penalty=2.0)

    assert found == [0.25, -1.0, 0.75, -3.0, 0.0, 8.0, 8.0, 8.0, 8.0, 8.0]


@pytest.mark.parametrize("penalty", [1.0, -1.0, 0.5])
def test_presence_and_frequency_penalties_act_alone(penalty):
    """Output 4, 4, 6 behind a prompt of 2."""
    tokens, flat = [2, 4, 4, 6], [0.0] * VOCAB_SIZE

    presence = adjusted_scores(flat, tokens, prompt=(2,), presence_penalty=penalty)
    frequency = adjusted_scores(flat, tokens, prompt=(2,), frequency_penalty=penalty)

    assert presence == [0.0, 0.0, 0.0, 0.0, -penalty, 0.0, -penalty, 0.0, 0.0, 0.0]
    assert frequency == [0.0, 0.0, 0.0, 0.0, -2 * penalty, 0.0, -penalty, 0.0, 0.0, 0.0]


def test_ties_between_blocks_of_a_row_go_to_the_lowest_id(monkeypatch):
    monkeypatch.setattr(
        "la_runtime.choosing.gumbel_noise", lambda seed, position, ids: np.zeros(len(ids))
    )
    row = np.zeros(20_000, dtype=np.float32)
    row[[5_000, 9_000, 19_000]] = 2.0

    choice = Chooser(
        SamplingParams(temperature=1.0),
        request=0,
        prompt=(0,),
        end_token_ids=(),
        scratch=np.empty_like(row),
    ).choose(row, [0])

    assert choice.token_id == 5_000
    assert choice.margin == 0.0


def test_logprobs_of_a_wide_row_are_finite():
    """exp() of the distance from the lowest score would be infinite."""
    choice = chooser(SamplingParams(logprobs=2)).choose(1000 * LOGITS, [0])

    assert choice.logprob == 0.0
    assert choice.top_logprobs == ((5, 0.0), (0, -1000.0))


def test_a_token_cut_by_a_hair_bounds_the_margin_by_what_it_lacks():
    """Against the definition: it lacks its distance to the cut, or that to the choice if more."""
    row = np.full(VOCAB_SIZE, -20.0, dtype=np.float32)
    row[:3] = 1.0, 0.99, 0.98
    seen = set()
    for seed in range(200):
        choice = chooser(SamplingParams(temperature=1.0, top_k=1, seed=seed)).choose(row, [0])
        first, second, third = (
            row[:3].astype(np.float64) - 1.0 + gumbel_noise(seed, 1, np.arange(3))
        )
        slack = 0.01  # of the survivor
        lacking = (max(0.01, first - second), max(0.02, first - third))
        assert choice.token_id == 0
        assert choice.margin == pytest.approx(min(slack, *lacking), abs=1e-6)
        seen.add(min(lacking) > slack)
    assert seen == {True, False}

    wide = np.full(VOCAB_SIZE, -20.0, dtype=np.float32)
    wide[:4] = 3.0, 1.0, 0.99, 0.98  # two survive; the choice is mostly token 0, far from the cut
    smallest = set()
    for seed in range(400):
        choice = chooser(SamplingParams(temperature=1.0, top_k=2, seed=seed)).choose(wide, [0])
        drawn = wide[:4].astype(np.float64) - 3.0 + gumbel_noise(seed, 1, np.arange(4))
        best, other = max(drawn[:2]), min(drawn[:2])
        slack = 0.01 if choice.token_id == 1 else 2.01
        lacking = (max(0.01, best - drawn[2]), max(0.02, best - drawn[3]))
        assert choice.margin == pytest.approx(min(best - other, slack, *lacking), abs=1e-5)
        smallest.add(np.argmin([best - other, slack, *lacking]))
    assert {0, 1, 2, 3} <= smallest


def test_an_interrupt_in_a_processor_stays_one():
    def interrupt(token_ids, scores):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chooser(SamplingParams(logits_processors=(interrupt,))).choose(LOGITS, [0])
