"""What a request's parameters choose, computed a second time: slowly, in float64, and by itself.

Shares no code with `la_runtime.choosing`, which every way of decoding uses, so that what is wrong
there would be wrong with and without lookaheads. It covers `logit_bias`, penalties, temperature,
`top_k`, `top_p`, `min_p` and the noise, as `SamplingParams` documents them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_runtime.sampling import SamplingParams

__all__ = ["Judgement", "judge_token"]

Scores = NDArray[np.float64]
Mask = NDArray[np.bool_]

_WORD: Final = 2**64
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Whether a token is what parameters and scores choose.

    Args:
        expected: the token they choose.
        is_expected: whether it is the token judged.
        is_near_tie: whether scores that differ by less than the margin could choose that one.
        gap: score and noise of the expected token minus those of the one judged.
    """

    expected: int
    is_expected: bool
    is_near_tie: bool
    gap: float


def judge_token(
    token_id: int,
    logits: NDArray[np.float32],
    before: Sequence[int],
    params: SamplingParams,
    *,
    prompt_len: int,
    epsilon: float,
) -> Judgement:
    """Compare an emitted token with what a reference's scores choose.

    Args:
        token_id: the token.
        logits: [vocab_size], the reference's, of the row before it.
        before: prompt and output before it.
        params: of the request, whose temperature is not 0.
        prompt_len: how many of those are the prompt.
        epsilon: how far apart the best and another logit may be for a near-tie.
    """
    assert params.temperature > 0, "greedy choices are compared with the best logit"
    scores = _adjust(logits.astype(np.float64), before, params, prompt_len)
    scores = (scores - scores.max()) / params.temperature
    # Penalties stretch a difference of logits, the temperature that of scores.
    stretch = max(params.repetition_penalty, 1 / params.repetition_penalty)
    slack = epsilon * stretch / params.temperature
    drawn = scores + _noise(params.seed, len(before), len(scores))
    kept = _survivors(scores, params, slack=0.0)
    expected = int(np.argmax(np.where(kept, drawn, -np.inf)))
    certain = np.where(_survivors(scores, params, slack=-slack), drawn, -np.inf)
    possible = _survivors(scores, params, slack=slack)
    is_near_tie = bool(possible[token_id] and drawn[token_id] > certain.max() - slack)
    return Judgement(
        expected=expected,
        is_expected=token_id == expected,
        is_near_tie=is_near_tie,
        gap=float(drawn[expected] - drawn[token_id]),
    )


def _adjust(
    scores: Scores, before: Sequence[int], params: SamplingParams, prompt_len: int
) -> Scores:
    """Bias, repetition penalty, presence and frequency penalties, one token at a time."""
    for token_id, bias in params.logit_bias.items():
        scores[token_id] += bias
    for token_id in set(before):
        if scores[token_id] > 0:
            scores[token_id] /= params.repetition_penalty
        else:
            scores[token_id] *= params.repetition_penalty
    for token_id, times in Counter(before[prompt_len:]).items():
        scores[token_id] -= params.presence_penalty + params.frequency_penalty * times
    return scores


def _survivors(scores: Scores, params: SamplingParams, *, slack: float) -> Mask:
    """[vocab_size] what the filters leave, each over what the one before it left.

    With a positive slack also what they would leave if scores moved by half as much, with a
    negative one only what they would leave all the same.
    """
    kept = np.ones(len(scores), dtype=np.bool_)
    order = np.argsort(-scores, kind="stable")
    if 0 < params.top_k < len(scores):
        kept = _cut_behind(scores, order, params.top_k, slack)
        order = order[: params.top_k]
    if params.top_p < 1:
        weights = np.exp(scores[order])
        before = (np.cumsum(weights) - weights) / weights.sum()
        bound = _shift_odds(params.top_p, 2 * slack)
        kept &= _cut_behind(scores, order, max(1, int(np.sum(before < bound))), slack)
    if params.min_p > 0:
        kept &= scores >= math.log(params.min_p) - slack
    return kept


def _cut_behind(scores: Scores, order: NDArray[np.int64], count: int, slack: float) -> Mask:
    """The first `count` of an order, and those within the slack of their cut more, or less."""
    kept = np.zeros(len(scores), dtype=np.bool_)
    kept[order[:count]] = True
    if slack > 0:
        kept |= scores >= scores[order[count - 1]] - slack
    elif slack < 0 and count < len(order):
        kept &= scores > scores[order[count]] - slack
    return kept


def _shift_odds(share: float, shift: float) -> float:
    """A probability whose log-odds are moved."""
    return 1 / (1 + (1 - share) / share * math.exp(-shift))


def _noise(seed: int, position: int, vocab_size: int) -> Scores:
    """[vocab_size] Gumbel noise: 52 bits of the hash of seed, position and token, and a half."""
    state = _scatter(_words([seed % _WORD])) ^ _words([position])
    tokens = _scatter(np.arange(vocab_size, dtype=np.uint64))
    bits = _scatter(_scatter(state) ^ tokens) >> np.uint64(12)
    return np.asarray(-np.log(-np.log((bits.astype(np.float64) + 0.5) / 2.0**52)))


def _words(values: Sequence[int]) -> NDArray[np.uint64]:
    return np.array(values, dtype=np.uint64)


def _scatter(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A step of splitmix64, modulo 2**64.

    Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    words = words + _GOLDEN
    words = (words ^ words >> np.uint64(30)) * _FIRST
    words = (words ^ words >> np.uint64(27)) * _SECOND
    return words ^ words >> np.uint64(31)
