"""Random requests to SmolLM2-135M: whatever is asked for, speculation changes nothing.

The default run checks a few cases, `-m slow` 200. Plain decoding of each prompt, alone and with
k = 0, is compared with the engine's answer to the whole batch, each request with its own k and
layout. Float sums run in other orders in wide passes, so a near-tie is excused, as everywhere.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from la_export.bench.prompts import load_prompts
from la_export.verify.tokens import Verdict, compare_tokens
from la_export.verify.tolerance import FP32
from la_runtime.decoder import Decoder
from la_runtime.generation import Engine
from tests.la_runtime.cases import (
    LOGPROB_TOLERANCE,
    PlainText,
    draw_ends,
    draw_params,
    draw_stops,
    find_end,
)

NUM_CASES = 10
NUM_SLOW_CASES = 200
SEED = 135
K_MAX = 4
LONGEST_PROMPT = 48
MOST_NEW_TOKENS = 12


@pytest.fixture(scope="module")
def engine(smollm2_bundle):
    with Engine.open(smollm2_bundle, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def texts(engine):
    """Token ids of questions in plain English, of code, and of other scripts."""
    questions = [prompt.turns[0] for prompt in load_prompts()]
    others = [
        "def fibonacci(n):\n    if n < 2:\n        return n\n",
        "春眠不覺曉，處處聞啼鳥。",
        "كان يا ما كان في قديم الزمان",
        "I ❤️ 🍕 and 🎉 on 2024-01-01!",
    ]
    return [engine.encode(text) for text in others * 5 + questions]


def decode_plainly(engine, prompt, params):
    """Tokens, their margins and choices, of k = 0 at batch 1; stop strings are not looked for."""
    model = engine.bundle.manifest.model
    decoder = Decoder(engine.backend, context=model.context, eos_token_ids=model.eos_token_ids)
    plain = replace(params, k=0, stop=(), strict=False, layout=None)
    margins = []
    with decoder.start([prompt], [plain]) as decoding:
        run_pass = decoding.prefill
        while not decoding.is_done:
            ((_, result),) = run_pass()
            margins += result.margins
            run_pass = decoding.step
        return decoding.token_ids(0), margins, decoding.choices(0)


def draw_requests(rng, engine, texts, spell):
    """Prompts, their parameters, and plain decoding of each."""
    prompts, wishes, plain = [], [], []
    for _ in range(rng.choice([1, 2, 3], p=[0.4, 0.4, 0.2])):
        text = texts[rng.integers(len(texts))]
        start = rng.integers(len(text))
        prompts.append(text[start : start + int(rng.integers(1, LONGEST_PROMPT))])
        params = draw_params(rng, engine.tokenizer, k_max=K_MAX, most_new_tokens=MOST_NEW_TOKENS)
        if params.min_new_tokens:
            vocab_size = engine.backend.contract.vocab_size
            params = replace(params, stop_token_ids=draw_ends(rng, [0], vocab_size, most=2))
        token_ids, margins, choices = decode_plainly(engine, prompts[-1], params)
        if not params.min_new_tokens:  # then end tokens change nothing but the end
            ends = draw_ends(rng, token_ids, engine.backend.contract.vocab_size, most=1)
            params = replace(params, stop_token_ids=ends)
        wishes.append(replace(params, stop=draw_stops(rng, spell(token_ids))))
        plain.append((token_ids, margins, choices))
    return prompts, wishes, plain


@pytest.mark.parametrize(
    "num_cases",
    [
        pytest.param(NUM_CASES, id="some"),
        pytest.param(NUM_SLOW_CASES, id="many", marks=pytest.mark.slow),
    ],
)
def test_any_request_gives_what_plain_decoding_gives(engine, texts, num_cases):
    """Tokens, text, finish reason and log-probabilities."""
    model = engine.bundle.manifest.model
    spell = PlainText(engine.tokenizer)
    num_tokens = num_accepted = 0
    excuses, reasons = [], set()
    for index in range(num_cases):
        rng = np.random.default_rng([SEED, index])
        prompts, wishes, plain = draw_requests(rng, engine, texts, spell)

        results = engine.generate(prompts, wishes)

        for prompt, params, (token_ids, margins, choices), result in zip(
            prompts, wishes, plain, results, strict=True
        ):
            case = f"case {index}: {prompt!r} with {params!r}"
            end = find_end(
                prompt,
                token_ids,
                params,
                spell=spell,
                eos_token_ids=model.eos_token_ids,
                context=model.context,
            )
            compared = compare_tokens(
                token_ids[: end.count], margins, result.token_ids, epsilon=engine.epsilon
            )
            num_tokens += compared.num_compared
            num_accepted += sum(result.stats.accepted)
            if compared.verdict is Verdict.EXCUSED:
                excuses.append(f"{case}: token {compared.position}, margin {compared.margin}")
                continue
            assert compared.verdict is Verdict.EQUAL, case
            assert (result.text, result.finish_reason) == (end.text, end.finish_reason), case
            reasons.add(result.finish_reason)
            found = [(one.token_id, one.logprob, dict(one.top)) for one in result.logprobs]
            expected = [
                (one.token_id, one.logprob, dict(one.top_logprobs)) for one in choices[: end.count]
            ]
            assert len(found) == (0 if params.logprobs is None else end.count), case
            for one, other in zip(found, expected, strict=True):
                assert one[0] == other[0], case
                assert one[1] == pytest.approx(other[1], abs=LOGPROB_TOLERANCE), case
                assert_top_logprobs_are_near(one[2], other[2], case)
    assert len(excuses) <= FP32.excuse_allowance(num_tokens), excuses
    assert num_accepted > num_tokens / 10, "drafts stood"
    assert reasons >= {"length", "stop"}


def assert_top_logprobs_are_near(found, expected, case):
    """Equal up to the tolerance; at the last place two tokens may be as good as each other."""
    assert len(found) == len(expected), case
    lowest = min(expected.values(), default=0.0)
    for token_id in found.keys() | expected.keys():
        assert found.get(token_id, lowest) == pytest.approx(
            expected.get(token_id, lowest), abs=LOGPROB_TOLERANCE
        ), case
