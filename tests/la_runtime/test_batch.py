"""Sequences that share a cache: they join, leave, fail and choose again without each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from la_runtime.backends.base import Outputs, PassLimits
from la_runtime.backends.fake import FakeBackend
from la_runtime.batch import BlockPolicy
from la_runtime.decoder import Decoder
from la_runtime.errors import LookaheadError, UsageError
from la_runtime.hashing import mix
from la_runtime.layout import Layout
from la_runtime.sampling import SamplingParams
from la_runtime.sequence import StepResult
from tests.la_runtime.toy import CONTEXT, K_MAX, VOCAB_SIZE, decode, decode_plainly, emitted

NUM_TOKENS = 14
PROMPTS = ([1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 0, 1], [12, 12])


def make_decoder(backend=None, **options):
    backend = backend or FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX)
    return Decoder(backend, context=CONTEXT, eos_token_ids=(), **options)


def oracle(prompts):
    """Slots that know what the toy model says."""
    return [[*prompt, *decode_plainly(prompt, NUM_TOKENS + K_MAX)] for prompt in prompts]


def run_to_end(batch, tokens, errors=None):
    """Step a batch until it is empty."""
    while len(batch):
        if batch.needs_reading:
            batch.read_chunk()
            continue
        for sequence, outcome in batch.step().outcomes:
            if isinstance(outcome, StepResult):
                tokens.setdefault(sequence, []).extend(outcome.token_ids)
            else:
                assert errors is not None, outcome
                errors[sequence] = outcome


@given(
    arrivals=st.lists(st.integers(0, 6), min_size=len(PROMPTS), max_size=len(PROMPTS)),
    ks=st.lists(st.integers(0, 4), min_size=len(PROMPTS), max_size=len(PROMPTS)),
    chunk=st.integers(1, 6),
    layout=st.sampled_from(Layout),
)
def test_sequences_that_join_at_any_step_say_what_they_say_alone(arrivals, ks, chunk, layout):
    decoder = make_decoder()
    policy = BlockPolicy(prefill_chunk=chunk)
    batches = [
        decoder.make_batch(
            decoder.make_sequences(
                [prompt], [SamplingParams(k=k, layout=layout, max_new_tokens=NUM_TOKENS)]
            ),
            policy,
        )
        for prompt, k in zip(PROMPTS, ks, strict=True)
    ]
    sequences = [batch.sequences[0] for batch in batches]
    tokens = {sequence: [] for sequence in sequences}

    def step(batch):
        for sequence, outcome in batch.step().outcomes:
            tokens[sequence].extend(outcome.token_ids)

    order = sorted(range(len(PROMPTS)), key=lambda i: arrivals[i])
    running = None
    for place, index in enumerate(order):
        batch = batches[index]
        while batch.needs_reading:
            batch.read_chunk()
        step(batch)
        if running is None or not len(running):
            running = batch
        elif len(batch):
            running.absorb(batch)
        following = order[place + 1] if place + 1 < len(order) else None
        wait = 0 if following is None else arrivals[following] - arrivals[index]
        for _ in range(wait):
            if len(running):
                step(running)
    run_to_end(running, tokens)

    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        assert tokens[sequence] == decode_plainly(prompt, NUM_TOKENS)


@given(
    num_siblings=st.integers(1, 4),
    prompt_len=st.integers(1, 20),
    chunk=st.integers(1, 7),
    dropped=st.sets(st.integers(0, 4)),
    after=st.integers(0, 4),
)
def test_siblings_share_one_reading_of_their_prompt(
    num_siblings, prompt_len, chunk, dropped, after
):
    """Even if some of them, the first included, leave while it is read."""
    rng = np.random.default_rng(prompt_len)
    prompt = rng.integers(0, VOCAB_SIZE, prompt_len).tolist()
    decoder = make_decoder()
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_new_tokens=6, k=2)
        for seed in range(num_siblings + 1)
    ]
    first, *siblings = decoder.make_sequences([prompt] * len(params), params)
    batch = decoder.make_batch([first], BlockPolicy(prefill_chunk=chunk), siblings=siblings)
    read = 0
    for _ in range(after):
        if batch.needs_reading:
            read += batch.read_chunk().rows
    leaving = {([first, *siblings])[i] for i in dropped if i < len(params)}
    batch.drop(leaving)
    while batch.needs_reading:
        read += batch.read_chunk().rows
    tokens: dict = {}
    if len(batch):
        if len(batch) > 1:
            assert read == prompt_len - 1, "each prompt token but the last was read once"
        run_to_end(batch, tokens)

    for seed, sequence in enumerate([first, *siblings]):
        if sequence not in leaving:
            alone, _ = decode(
                FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX), [prompt], [params[seed]]
            )
            assert tokens[sequence] == emitted(alone[0])


def test_a_failing_sequence_leaves_the_others_alone():
    def fail_late(token_ids, scores):
        if len(token_ids) > 6:
            raise RuntimeError("no grammar")

    params = [
        SamplingParams(k=2, max_new_tokens=NUM_TOKENS, logits_processors=processors)
        for processors in ((), (fail_late,), (), ())
    ]
    decoder = make_decoder()
    sequences = decoder.make_sequences(PROMPTS, params)
    tokens, errors = {}, {}
    run_to_end(decoder.make_batch(sequences, BlockPolicy()), tokens, errors)

    assert list(errors) == [sequences[1]]
    assert isinstance(errors[sequences[1]], LookaheadError)
    for index in (0, 2, 3):
        assert tokens[sequences[index]] == decode_plainly(PROMPTS[index], NUM_TOKENS)
    assert tokens[sequences[1]] == decode_plainly(PROMPTS[1], 6), "it failed where plain would"


def test_a_sequence_that_keeps_its_cache_takes_it_along():
    decoder = make_decoder()
    params = [SamplingParams(k=3, max_new_tokens=n) for n in (4, 9, 2, 7)]
    sequences = decoder.make_sequences(PROMPTS, params)
    sequences[1].keeps_cache = True
    run_to_end(decoder.make_batch(sequences, BlockPolicy()), {})

    assert [s.kept_cache is None for s in sequences] == [True, False, True, True]
    kept = sequences[1]
    assert kept.kept_cache.lengths.tolist() == [kept.num_cached] == [len(kept.token_ids) - 1]
    (again,) = decoder.make_sequences(
        [kept.token_ids], [SamplingParams(k=2, max_new_tokens=NUM_TOKENS - 9)]
    )
    again.resume(kept.num_cached)
    tokens: dict = {}
    run_to_end(decoder.make_batch([again], BlockPolicy(), cache=kept.kept_cache), tokens)
    assert kept.token_ids[1:] + tokens[again] == decode_plainly(PROMPTS[1], NUM_TOKENS)


class JitteryBackend(FakeBackend):
    """Logits of blocks of more than one row are off by up to `JITTER`, as wide float sums are."""

    JITTER = 0.15

    def forward(self, state, inputs):
        scores = super().forward(state, inputs)
        block_len = inputs.input_ids.shape[1]
        if inputs.outputs is not Outputs.NONE and block_len > 1:
            places = np.arange(scores.logits().size, dtype=np.uint64).reshape(scores.logits().shape)
            hashed = mix(
                places ^ mix(np.uint64(block_len) + state.lengths[:, None, None].astype(np.uint64))
            )
            unit = (hashed >> np.uint64(40)).astype(np.float32) / np.float32(2**24)
            scores.logits()[:] += np.float32(self.JITTER) * (2 * unit - 1)
        return scores


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_strict_decoding_is_plain_decoding_though_wide_passes_are_off(layout, temperature):
    """With epsilon four times what they are off by; without it, texts differ."""
    differing = rechecked = accepted = 0
    for seed in range(30):
        prompt = np.random.default_rng(seed).integers(0, VOCAB_SIZE, 4).tolist()
        found = {}
        for strict, k in ((False, 0), (False, 4), (True, 4)):
            params = SamplingParams(
                k=k,
                layout=layout,
                temperature=temperature,
                top_p=1.0 if seed % 2 else 0.9,
                seed=seed,
                strict=strict,
                max_new_tokens=NUM_TOKENS,
            )
            backend = JitteryBackend(
                vocab_size=VOCAB_SIZE, k_max=K_MAX, slot_oracle=oracle([prompt])
            )
            decoder = make_decoder(backend, epsilon=4 * JitteryBackend.JITTER)
            with decoder.start([prompt], [params]) as decoding:
                decoding.prefill()
                while not decoding.is_done:
                    decoding.step()
                found[strict, k] = decoding.token_ids(0)
                rechecked += decoding.stats(0).rechecked
                accepted += strict * sum(decoding.stats(0).accepted)
        assert found[True, 4] == found[False, 0]
        differing += found[False, 4] != found[False, 0]

    assert differing > 5, "the jitter matters"
    assert rechecked > 30
    assert temperature > 0 or accepted > 30, "strict decoding still accepts"


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0, 1e9])
def test_strict_rows_of_a_batch_choose_again_what_was_close(epsilon):
    """Mixed with others: equal tokens, and a one-row choice for every close one but the first."""
    params = [
        SamplingParams(k=k, layout=layout, max_new_tokens=NUM_TOKENS, strict=strict)
        for k, layout, strict in (
            (4, Layout.FULL, True),
            (2, Layout.ROOT_ONLY, False),
            (3, Layout.ROOT_ONLY, True),
            (0, Layout.FULL, True),
        )
    ]
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX, slot_oracle=oracle(PROMPTS))
    decoder = make_decoder(backend, epsilon=epsilon)
    with decoder.start(PROMPTS, params) as decoding:
        margins = {index: [*result.margins] for index, result in decoding.prefill()}
        while not decoding.is_done:
            for index, result in decoding.step():
                margins[index] += result.margins
        for index, prompt in enumerate(PROMPTS):
            assert decoding.token_ids(index) == tuple(decode_plainly(prompt, NUM_TOKENS))
            rechecked = decoding.stats(index).rechecked
            close = sum(margin < epsilon for margin in margins[index][1:])
            assert rechecked == (close if params[index].strict and index != 3 else rechecked)
            assert params[index].strict or rechecked == 0
            assert rechecked <= close


def test_an_end_inside_the_accepted_part_of_an_undecided_pass_ends_the_sequence():
    prompt = PROMPTS[0]
    plain = decode_plainly(prompt, NUM_TOKENS)
    for stop in range(1, NUM_TOKENS):
        backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX, slot_oracle=oracle([prompt]))
        params = SamplingParams(
            k=4, strict=True, max_new_tokens=NUM_TOKENS, stop_token_ids=(plain[stop],)
        )
        decoder = make_decoder(backend, epsilon=3.0)
        with decoder.start([prompt], [params]) as decoding:
            decoding.prefill()
            while not decoding.is_done:
                decoding.step()
            found = list(decoding.token_ids(0))
        assert found == plain[: plain.index(plain[stop]) + 1]


def test_chunks_shrink_while_their_scores_are_too_many():
    policy = BlockPolicy(prefill_chunk=512, prefill_scores=2**18)

    assert policy.chunk_len(batch=1, num_cached=0) == 512
    assert policy.chunk_len(batch=1, num_cached=1) == 256
    assert policy.chunk_len(batch=2, num_cached=256) == 256
    assert policy.chunk_len(batch=1, num_cached=1792) == 128
    assert policy.chunk_len(batch=1, num_cached=10**9) == 16
    assert BlockPolicy(prefill_chunk=5).chunk_len(batch=8, num_cached=10**9) == 5


def test_rows_and_padding_are_counted():
    """Two sequences, k 3 and k 1, over a prompt of 3 and one of 1: blocks as wide as the widest."""
    params = [SamplingParams(k=k, max_new_tokens=2) for k in (3, 1)]
    _, stats = decode(
        FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX), [PROMPTS[0], PROMPTS[1]], params
    )
    # Prefill: 3 + 3 rows and 1 + 1; then root, no draft at depth 1 of 1 left, and the slots.
    assert (stats[0].rows, stats[0].padding_rows) == (6 + 4, 0)
    assert (stats[1].rows, stats[1].padding_rows) == (2 + 2, 4 + 2)
    assert stats[1].padding_share == pytest.approx(6 / 10)


def end_of_script(script, prompt_len, behind):
    """A grammar of one sentence; what it does behind its end is `behind`."""

    def allow(token_ids, scores):
        place = len(token_ids) - prompt_len
        if place >= len(script):
            behind(scores)
            return
        scores[:] = -np.inf
        scores[script[place]] = 0.0

    return allow


def raise_behind(scores):
    raise RuntimeError("the sentence is over")


def forbid_behind(scores):
    scores[:] = -np.inf


@pytest.mark.parametrize("behind", [raise_behind, forbid_behind])
@pytest.mark.parametrize("ending", ["eos", "stop id", "length"])
@pytest.mark.parametrize("k", [0, 1, 2, 4, 6])
def test_no_row_behind_the_end_is_asked(behind, ending, k):
    """Slots and drafts reach past the end of the sentence; the model never would."""
    prompt, script = PROMPTS[0], [10, 11, 3, 7, 12]
    params = SamplingParams(
        k=k,
        layout=Layout.FULL,
        max_new_tokens=len(script) if ending == "length" else 20,
        stop_token_ids=(12,) if ending == "stop id" else (),
        logits_processors=(end_of_script(script, len(prompt), behind),),
    )
    decoder = Decoder(
        FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX),
        context=CONTEXT,
        eos_token_ids=(12,) if ending == "eos" else (),
    )
    accepted = 0
    with decoder.start([prompt], [params]) as decoding:
        decoding.prefill()
        while not decoding.is_done:
            decoding.step()
        assert decoding.token_ids(0) == tuple(script)
        accepted = sum(decoding.stats(0).accepted)
    assert accepted > 0 or k == 0, "drafts stood"


@pytest.mark.parametrize("k", [0, 2, 5])
@pytest.mark.parametrize("strict", [False, True])
def test_what_was_accepted_before_a_failure_is_emitted(k, strict):
    prompt = PROMPTS[0]
    plain = decode_plainly(prompt, NUM_TOKENS)

    def fail_at_nine(token_ids, scores):
        if len(token_ids) == 9:
            raise RuntimeError("no grammar")

    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX, slot_oracle=oracle([prompt]))
    params = SamplingParams(k=k, strict=strict, logits_processors=(fail_at_nine,))
    decoder = make_decoder(backend, epsilon=2.0)
    sequences = decoder.make_sequences([prompt], [params])
    tokens: dict = {}
    errors: dict = {}
    run_to_end(decoder.make_batch(sequences, BlockPolicy()), tokens, errors)

    assert tokens[sequences[0]] == plain[: 9 - len(prompt)]
    assert "failed in request 0 at position 9" in str(errors[sequences[0]])


@pytest.mark.parametrize("width", [5, 6, 7, 9])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_threshold_decodes_at_every_width_that_holds_its_steps(width, k):
    """Known rows of its steps may be more than a chunk: they are no prompt."""
    params = SamplingParams(select="threshold", tau=0.0, k=k, max_new_tokens=20)
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=4)
    decoder = make_decoder(backend)
    found = []
    for policy in (BlockPolicy(), BlockPolicy.fixed_width(width, k_max=4)):
        if 2 * k + 1 > width:
            continue
        with decoder.start([PROMPTS[2]], [params], policy) as decoding:
            decoding.prefill()
            while not decoding.is_done:
                decoding.step()
            found.append(decoding.token_ids(0))
    assert len(set(found)) <= 1


def test_an_error_of_any_kind_ends_its_own_sequence(monkeypatch):
    decoder = make_decoder()
    params = [SamplingParams(temperature=1.0, k=2, max_new_tokens=6)] * 3
    sequences = decoder.make_sequences(PROMPTS[:3], params)

    def break_down(logits, token_ids):
        raise IndexError("out of range")

    monkeypatch.setattr(sequences[1].chooser, "choose", break_down)
    tokens: dict = {}
    errors: dict = {}
    run_to_end(decoder.make_batch(sequences, BlockPolicy()), tokens, errors)

    assert list(errors) == [sequences[1]]
    assert [len(tokens[s]) for s in (sequences[0], sequences[2])] == [6, 6]


def test_the_default_policy_keeps_within_what_the_backend_can_run():
    limits = PassLimits(block=60)

    policy = BlockPolicy.within(limits, k_max=4, widths=(8, 60))

    assert (policy.prefill_chunk, policy.most_rows, policy.widths) == (56, 60, (8, 60))
    assert BlockPolicy.within(PassLimits(), k_max=4) == BlockPolicy()
    assert BlockPolicy.within(PassLimits(block=2000), k_max=4).prefill_chunk == 512
    assert BlockPolicy.within(PassLimits(block=10, k=2), k_max=16).prefill_chunk == 8
    assert BlockPolicy.within(PassLimits(block=1, k=0), k_max=8).prefill_chunk == 1
    with pytest.raises(UsageError, match="block width 61 is more than the 60 rows that a pass"):
        BlockPolicy.within(limits, k_max=4, widths=(8, 61))


def test_a_step_that_no_pass_can_hold_is_refused():
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX, max_block=24)
    decoder = make_decoder(backend)
    params = SamplingParams(k=4, layout="full", max_new_tokens=4)

    with pytest.raises(UsageError, match="up to 25 rows, and a pass of this bundle at most 24"):
        decoder.start([PROMPTS[0]], [params])
    with decoder.start([PROMPTS[0]], [replace(params, k=3)]) as decoding:
        decoding.prefill()
        decoding.step()


def test_requests_ask_for_no_longer_lookaheads_than_the_opened_plan_was_made_for():
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX)
    backend.limits = PassLimits(k=2)
    decoder = make_decoder(backend)

    (sequence,) = decoder.make_sequences([PROMPTS[0]], [SamplingParams()])
    assert sequence.k == 2
    with pytest.raises(UsageError, match="at most 2, that of the plan that was opened, got 3"):
        decoder.make_sequences([PROMPTS[0]], [SamplingParams(k=3)])
