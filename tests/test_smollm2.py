"""The whole way on a real model: SmolLM2-135M compiled, decoded, and compared with PyTorch.

A cut of what `scripts/lossless.py` measures, and the positive controls: proposals that were
garbage, or rows that saw too much, would show here.
"""

from __future__ import annotations

import numpy as np
import pytest

from la_export.bench.prompts import load_prompts, pick_prompts
from la_export.lookahead import read_lookaheads
from la_export.reference import TorchReference
from la_export.verify.lossless import (
    compare_fixed_width,
    compare_lookahead,
    compare_reference,
    run_plainly,
)
from la_export.verify.tolerance import FP32
from la_runtime.backends.base import CacheSizing
from la_runtime.bundle import LOOKAHEAD_PATH
from la_runtime.decoder import Decoder
from la_runtime.generation import Engine
from la_runtime.layout import Group, Layout, make_rows
from la_runtime.sampling import SamplingParams
from tests.passes import score_rows

MODEL = "smollm2-135m"
# fp32 sums in another order than PyTorch's; the largest seen is 8e-5, on logits of up to 37.
TOLERANCE = 1e-4
NUM_TOKENS = 16
LONGEST_PROMPT = 150


@pytest.fixture(scope="module")
def engine(smollm2_bundle):
    with Engine.open(smollm2_bundle, max_batch=4, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(smollm2_bundle):
    return TorchReference.load(
        MODEL, adapter=read_lookaheads(smollm2_bundle / LOOKAHEAD_PATH).adapter
    )


@pytest.fixture(scope="module")
def prompts(engine):
    encoded = {
        f"{prompt.group}/{prompt.question_id}": engine.encode(prompt.turns[0], chat=True)
        for prompt in pick_prompts(load_prompts(), per_group=2)
    }
    short = [(name, ids) for name, ids in encoded.items() if len(ids) <= LONGEST_PROMPT]
    assert len(short) >= 4, "enough prompts for a ragged batch"
    return short[:4]


@pytest.fixture(scope="module")
def runs(engine, prompts):
    return [run_plainly(engine, name, ids, num_tokens=NUM_TOKENS) for name, ids in prompts]


def test_plain_decoding_equals_transformers(engine, reference, runs):
    eos = engine.bundle.manifest.model.eos_token_ids

    tally = compare_reference(
        runs,
        lambda ids: reference.generate_greedy(ids, NUM_TOKENS, eos),
        epsilon=FP32.epsilon,
        report=print,
    )

    assert (tally.prompts, tally.different) == (4, 0)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("k", [2, 4])
def test_lookahead_decoding_equals_plain_decoding(engine, runs, k, layout, batch):
    tally = compare_lookahead(
        engine,
        runs,
        batch,
        k=k,
        layout=layout,
        num_tokens=NUM_TOKENS,
        epsilon=FP32.epsilon,
        report=print,
    )

    assert (tally.prompts, tally.different) == (4, 0)
    assert tally.excused <= 1


@pytest.mark.parametrize("layout", Layout)
def test_at_one_width_logits_are_equal_bit_for_bit(engine, prompts, layout):
    tally = compare_fixed_width(
        engine,
        prompts[:1],
        what="plain",
        k=4,
        layout=layout,
        width=32,
        num_tokens=NUM_TOKENS,
        report=print,
    )

    assert (tally.prompts, tally.equal) == (1, 1)


@pytest.fixture(params=["own", "distinct"])
def vectors(engine, request):
    """The bundle's vectors, or ones that differ from slot to slot; the bundle's own afterwards.

    What distinct random vectors give is no text: its logits are held to 1e-4 of their range.
    """
    contract = engine.backend.contract
    own = engine.backend.lookahead_embeddings.copy()
    noise = np.random.default_rng(0).normal(size=(contract.k_max, contract.hidden_size))
    scale = {"own": 0.0, "distinct": 0.1}[request.param]
    vectors = (own + scale * noise).astype(np.float32)
    engine.backend.set_lookahead_embeddings(vectors)
    yield vectors
    engine.backend.set_lookahead_embeddings(own)


def test_each_slot_equals_pytorch_on_prefix_and_one_lookahead_token(
    engine, reference, prompts, vectors
):
    """Behind a cached prefix, with drafts: slot (j, i) against [prefix, drafts to j, token i]."""
    _, prompt = prompts[0]
    is_distinct = len(np.unique(vectors, axis=0)) > 1
    vocab_size = engine.backend.contract.vocab_size
    state = engine.backend.allocate(1, CacheSizing.STEPPED)
    cached = len(prompt) - 3
    score_rows(engine, state, prompt[:cached], make_rows(cached, (), ()))
    engine.backend.commit(state, [range(cached)])
    rows = make_rows(1, (0, 1), (Group(0, 4), Group(1, 2), Group(2, 4)))
    logits = score_rows(engine, state, prompt[cached:], rows)
    for group in rows.groups:
        prefix = list(prompt[: cached + 1 + group.node])
        for slot, row in enumerate(rows.slot_rows(group.node), 1):
            expected = reference.scores(
                [*prefix, vocab_size + slot - 1],
                vectors,
                position_ids=[*range(len(prefix)), len(prefix) - 1 + slot],
            )[-1]
            tolerance = TOLERANCE * (np.ptp(expected) if is_distinct else 1.0)
            np.testing.assert_allclose(logits[row], expected, rtol=0, atol=tolerance)


def test_lookahead_vectors_change_no_verified_logit(engine, prompts, vectors):
    """Bit for bit, at equal shapes."""
    _, prompt = prompts[0]
    rows = make_rows(len(prompt) - 2, (0, 1), Layout.FULL.groups(2, 4))
    found = []
    for factor in (1.0, -3.0):
        engine.backend.set_lookahead_embeddings(np.float32(factor) * vectors)
        state = engine.backend.allocate(1, CacheSizing.STEPPED)
        found.append(score_rows(engine, state, prompt, rows).copy())

    verified = rows.num_verified
    assert np.array_equal(found[0][:verified], found[1][:verified])
    assert not np.array_equal(found[0][verified:], found[1][verified:])


@pytest.mark.parametrize("layout", Layout)
def test_the_committed_cache_equals_a_fresh_full_pass_after_every_step(
    engine, reference, prompts, layout
):
    _, prompt = prompts[1]
    decoder = Decoder(engine.backend, context=2048, eos_token_ids=())
    params = SamplingParams(k=4, layout=layout, max_new_tokens=8)
    with decoder.start([prompt], [params]) as decoding:
        decoding.prefill()
        while not decoding.is_done:
            cached = int(decoding.cache.lengths[0])
            known = [*prompt, *decoding.token_ids(0)]
            assert cached == len(known) - 1
            np.testing.assert_allclose(
                decoding.cache.read(0),
                reference.key_values(known[:cached]),
                rtol=0,
                atol=TOLERANCE,
            )
            decoding.step()


def test_threshold_at_tau_0_emits_k_plus_1_tokens_a_pass_and_reports_agreement(engine, prompts):
    _, prompt = prompts[0]

    result = engine.generate(
        prompt, k=4, select="threshold", tau=0.0, max_new_tokens=20, ignore_eos=True
    )

    assert result.stats.passes == 4
    assert result.stats.reread == 12
    assert result.stats.agreement is not None
