"""The second sampler: it agrees with the first, and excuses near-ties alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from la_export.verify.ladder import RECIPES
from la_export.verify.sampler import judge_token
from la_runtime.choosing import Chooser
from la_runtime.sampling import SamplingParams

VOCAB_SIZE = 50
PROMPT = (3, 1, 4)


def judge(token_id, logits, before, params, epsilon=0.0):
    return judge_token(token_id, logits, before, params, prompt_len=len(PROMPT), epsilon=epsilon)


@pytest.mark.parametrize("recipe", [*RECIPES, SamplingParams(temperature=0.9, top_k=5, top_p=0.5)])
def test_both_samplers_choose_the_same(recipe):
    rng = np.random.default_rng(0)
    for seed in range(40):
        params = replace(recipe, seed=seed - 7)
        logits = rng.normal(0.0, 3.0, VOCAB_SIZE).astype(np.float32)
        before = [*PROMPT, *rng.integers(0, VOCAB_SIZE, seed % 9).tolist()]
        chooser = Chooser(
            params,
            request=0,
            prompt=PROMPT,
            end_token_ids=(),
            scratch=np.empty(VOCAB_SIZE, np.float32),
        )

        token_id = chooser.choose(logits, before).token_id

        assert judge(token_id, logits, before, params).is_expected
        assert not judge((token_id + 1) % VOCAB_SIZE, logits, before, params).is_near_tie


def test_a_filter_leaves_what_it_says():
    """Of 8, 4, 2 and 1 fifteenths, top_p 0.7 keeps two and min_p 0.3 does, too; top_k is 1."""
    logits = np.log(np.array([8.0, 4.0, 2.0, 1.0])).astype(np.float32)
    for filters, left in (
        ({"top_k": 1}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"min_p": 0.3}, {0, 1}),
        ({"top_k": 3, "top_p": 0.9}, {0, 1, 2}),
        ({"logit_bias": {3: math.log(100)}, "top_k": 1}, {3}),
    ):
        drawn = {
            judge(
                0, logits, PROMPT[:1], SamplingParams(temperature=1.0, seed=s, **filters)
            ).expected
            for s in range(200)
        }

        assert drawn == left


def test_a_token_at_a_cut_is_a_near_tie_and_one_behind_it_is_not():
    logits = np.array([1.0, 0.0, -1e-5, -1.0], np.float32)
    found = {True: set(), False: set()}
    for seed in range(100):
        params = SamplingParams(temperature=1.0, top_k=2, seed=seed)
        for token_id in range(4):
            judgement = judge(token_id, logits, (0,), params, epsilon=1e-4)
            if not judgement.is_expected:
                found[judgement.is_near_tie].add(token_id)

    assert 2 in found[True]  # it could have survived in the place of token 1
    assert 3 not in found[True]
    assert found[False] == {1, 2, 3}
