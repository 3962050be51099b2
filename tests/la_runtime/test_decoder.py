"""Decoding over the toy backend: speculation never changes a token."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from la_runtime.backends.base import CacheSizing, Outputs
from la_runtime.backends.fake import FakeBackend
from la_runtime.contract import CacheForm
from la_runtime.decoder import BlockPolicy, Decoder
from la_runtime.errors import NonFiniteScoreError, UsageError
from la_runtime.layout import GroupMask, Layout
from la_runtime.sampling import SamplingParams, Select
from la_runtime.stopping import FinishReason
from tests.la_runtime.toy import (
    CONTEXT,
    K_MAX,
    VOCAB_SIZE,
    decode,
    decode_plainly,
    emitted,
    sample_plainly,
)

PROMPT = (3, 1, 4, 1, 5)
NUM_TOKENS = 31

prompts = st.lists(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=24), min_size=1, max_size=4
)
layouts = st.sampled_from(Layout)
lookahead_lengths = st.integers(0, K_MAX)


def _oracle(prompt: tuple[int, ...], *, seed: int = 0, num_tokens: int = 80) -> list[int]:
    return [*prompt, *decode_plainly(prompt, num_tokens, seed=seed)]


def _exact(k: int, layout: Layout, num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, k=k, layout=layout)


@given(
    batch=prompts,
    seed=st.integers(0, 5),
    data=st.data(),
    chunk=st.integers(1, 9),
    widths=st.lists(st.integers(1, 60), max_size=3),
    form=st.sampled_from(
        [
            {"cache_form": CacheForm.CONCAT},
            {"cache_form": CacheForm.SCATTER},
            {"cache_form": CacheForm.SCATTER, "capacity": CONTEXT + 60},
        ]
    ),
)
def test_exact_decoding_equals_plain_decoding(batch, seed, data, chunk, widths, form):
    """Any k, layout, batch, chunking, width and cache form; slots are right some of the time."""
    params = [
        _exact(data.draw(lookahead_lengths), data.draw(layouts), data.draw(st.integers(1, 20)))
        for _ in batch
    ]
    futures = []
    for prompt in batch:
        future = _oracle(tuple(prompt), seed=seed, num_tokens=24)
        wrong = data.draw(st.sets(st.integers(0, len(future) - 1)))
        futures.append([(t + 1) % VOCAB_SIZE if i in wrong else t for i, t in enumerate(future)])
    backend = FakeBackend(
        vocab_size=VOCAB_SIZE, k_max=K_MAX, seed=seed, slot_oracle=futures, **form
    )
    policy = BlockPolicy(prefill_chunk=chunk, widths=tuple(widths))

    results, stats = decode(backend, batch, params, policy=policy)

    for prompt, wish, found, counted in zip(batch, params, results, stats, strict=True):
        assert emitted(found) == decode_plainly(prompt, wish.max_new_tokens, seed=seed)
        assert found[-1].finish_reason is FinishReason.LENGTH
        assert counted.new_tokens == wish.max_new_tokens
        assert counted.prompt_tokens == len(prompt)


@given(
    prompt=prompts.map(lambda batch: batch[0]),
    k=lookahead_lengths,
    layout=layouts,
    eos=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=3),
    context=st.integers(26, 50),
)
def test_ends_inside_a_block_are_those_of_plain_decoding(prompt, k, layout, eos, context):
    futures = [_oracle(tuple(prompt))]
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX, slot_oracle=futures)

    results, stats = decode(
        backend, [prompt], [_exact(k, layout)], eos_token_ids=tuple(eos), context=context
    )

    truth = decode_plainly(prompt, NUM_TOKENS, eos_token_ids=tuple(eos), context=context)
    assert emitted(results[0]) == truth
    assert stats[0].new_tokens == len(truth)
    reason = results[0][-1].finish_reason
    if truth[-1] in eos:
        assert reason is FinishReason.EOS
    else:
        expected = FinishReason.LENGTH if len(truth) == NUM_TOKENS else FinishReason.CONTEXT
        assert reason is expected
    assert all(result.finish_reason is None for result in results[0][:-1])


@pytest.mark.parametrize("k", range(1, K_MAX + 1))
def test_full_layout_with_perfect_slots_emits_k_plus_1_tokens_a_pass(k):
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX, slot_oracle=[_oracle(PROMPT)])

    results, stats = decode(backend, [PROMPT], [_exact(k, Layout.FULL, 1 + 4 * (k + 1))])

    assert [len(result.token_ids) for result in results[0]] == [1, *[k + 1] * 4]
    assert stats[0].tokens_per_pass == k + 1
    assert stats[0].drafted == stats[0].accepted == (4,) * k


@pytest.mark.parametrize("k", range(1, K_MAX + 1))
def test_root_only_layout_with_perfect_slots_alternates_as_its_fallback_rule_says(k):
    """All k drafts stand, so no slot of the root's group is left to propose; then k new ones."""
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX, slot_oracle=[_oracle(PROMPT)])

    results, _ = decode(backend, [PROMPT], [_exact(k, Layout.ROOT_ONLY, 1 + 3 * (k + 2))])

    assert [len(result.token_ids) for result in results[0]] == [1, *[k + 1, 1] * 3]


def test_root_only_falls_back_to_later_slots_after_a_partial_accept():
    """k = 3, the second draft wrong: slots (0,2) and (0,3) propose, then (0,3) alone."""
    future = _oracle(PROMPT)
    second_draft = len(PROMPT) + 2  # position of d_2 in the first decode pass
    future[second_draft] = (future[second_draft] + 1) % VOCAB_SIZE
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX, slot_oracle=[future])

    results, _ = decode(backend, [PROMPT], [_exact(3, Layout.ROOT_ONLY)])

    assert [result.accepted for result in results[0][:4]] == [0, 1, 2, 1]


@pytest.mark.parametrize("k", [1, 2, 4, 6])
def test_threshold_at_tau_0_emits_k_plus_1_tokens_a_pass(k):
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX)
    params = SamplingParams(max_new_tokens=5 * (k + 1), k=k, select=Select.THRESHOLD, tau=0.0)

    results, stats = decode(backend, [PROMPT], [params])

    assert [len(result.token_ids) for result in results[0]] == [k + 1] * 5
    assert stats[0].reread == 4 * k


def test_threshold_with_perfect_slots_agrees_with_the_model_everywhere():
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX, slot_oracle=[_oracle(PROMPT)])
    params = SamplingParams(max_new_tokens=NUM_TOKENS, k=4, select=Select.THRESHOLD, tau=0.9)

    results, stats = decode(backend, [PROMPT], [params])

    assert emitted(results[0]) == decode_plainly(PROMPT, NUM_TOKENS)
    assert stats[0].agreement == 1.0


def test_threshold_counts_each_disagreement_when_the_token_is_reread():
    """A wrong proposal is emitted, and the pass that reads it sees that the model would not."""
    future = _oracle(PROMPT)
    wrong = len(PROMPT) + 2
    future[wrong] = (future[wrong] + 1) % VOCAB_SIZE
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX, slot_oracle=[future])
    params = SamplingParams(max_new_tokens=6, k=2, select=Select.THRESHOLD, tau=0.9)

    results, stats = decode(backend, [PROMPT], [params])

    assert results[0][0].token_ids[:2] == tuple(decode_plainly(PROMPT, 2))
    assert results[0][0].token_ids[2] == future[wrong]
    assert (stats[0].reread, stats[0].agreed) == (2, 1)


def test_threshold_above_every_probability_is_plain_decoding():
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX)
    params = SamplingParams(max_new_tokens=NUM_TOKENS, k=4, select=Select.THRESHOLD, tau=1.0)

    results, stats = decode(backend, [PROMPT], [params])

    assert emitted(results[0]) == decode_plainly(PROMPT, NUM_TOKENS)
    assert stats[0].agreement is None


@given(vectors=st.lists(st.floats(-1e6, 1e6), min_size=K_MAX, max_size=K_MAX), layout=layouts)
def test_lookahead_vectors_change_no_token(vectors, layout):
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX)
    backend.set_lookahead_embeddings(np.asarray(vectors)[:, None])

    results, _ = decode(backend, [PROMPT], [_exact(4, layout)])

    assert emitted(results[0]) == decode_plainly(PROMPT, NUM_TOKENS)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("k", [0, 1, 3])
def test_fixed_width_decodes_the_same_tokens(layout, k):
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX, slot_oracle=[_oracle(PROMPT)])
    policy = BlockPolicy.fixed_width(16, k_max=K_MAX)

    results, _ = decode(backend, [PROMPT], [_exact(k, layout)], policy=policy)

    assert emitted(results[0]) == decode_plainly(PROMPT, NUM_TOKENS)


def test_prefill_passes_are_counted_apart():
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX)

    _, stats = decode(
        backend, [PROMPT], [_exact(0, Layout.FULL, 4)], policy=BlockPolicy(prefill_chunk=2)
    )

    assert (stats[0].prefill_passes, stats[0].passes) == (3, 6)
    assert stats[0].tokens_per_pass == 1.0


def test_margins_are_those_of_the_rows_that_chose_the_tokens():
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX, slot_oracle=[_oracle(PROMPT)])

    plain, _ = decode(backend, [PROMPT], [_exact(0, Layout.FULL)])
    ahead, _ = decode(backend, [PROMPT], [_exact(4, Layout.FULL)])

    plain_margins = [margin for result in plain[0] for margin in result.margins]
    assert [margin for result in ahead[0] for margin in result.margins] == plain_margins
    assert min(plain_margins) >= 0


class _WatchedBackend(FakeBackend):
    """Keeps a copy of what every pass was asked: its arrays serve the next pass, too."""

    def __init__(self, **options):
        super().__init__(**options)
        self.passes = []

    def forward(self, state, inputs):
        self.passes.append(copy.deepcopy(inputs))
        return super().forward(state, inputs)


def test_only_scores_that_are_needed_are_asked_for():
    asked = {}
    for name, params in {
        "greedy": _exact(2, Layout.FULL, 4),
        "sampled": SamplingParams(k=2, max_new_tokens=4, temperature=1.0),
        "threshold": SamplingParams(k=2, max_new_tokens=4, select=Select.THRESHOLD, tau=0.9),
    }.items():
        backend = _WatchedBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX)
        decode(backend, [PROMPT], [params], policy=BlockPolicy(prefill_chunk=2))
        assert [inputs.outputs for inputs in backend.passes[:2]] == [Outputs.NONE] * 2
        asked[name] = {inputs.outputs for inputs in backend.passes[2:]}

    assert asked == {
        "greedy": {Outputs.TOP},
        "sampled": {Outputs.TOP | Outputs.LOGITS},
        "threshold": {Outputs.TOP | Outputs.LOGSUMEXP},
    }


def test_no_draft_is_verified_that_could_not_be_emitted():
    """With r tokens to go, a pass emits at most r - 1 drafts and the bonus token."""
    backend = _WatchedBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX, slot_oracle=[_oracle(PROMPT)])

    results, _ = decode(backend, [PROMPT], [_exact(4, Layout.FULL, 8)])

    drafts = [int((inputs.input_ids < VOCAB_SIZE).sum()) - 1 for inputs in backend.passes[1:]]
    assert [len(result.token_ids) for result in results[0]] == [1, 5, 2]
    assert drafts == [4, 1]


@pytest.mark.parametrize("group_mask", GroupMask)
def test_the_group_mask_of_the_vectors_reaches_every_pass(group_mask):
    backend = _WatchedBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX)
    decoder = Decoder(backend, context=CONTEXT, eos_token_ids=(), group_mask=group_mask)
    with decoder.start([PROMPT], [_exact(3, Layout.ROOT_ONLY, 5)]) as decoding:
        decoding.prefill()
        while not decoding.is_done:
            decoding.step()
        tokens = decoding.token_ids(0)

    assert list(tokens) == decode_plainly(PROMPT, 5)
    expected = np.eye(3) if group_mask is GroupMask.STRICT else np.tri(3)
    for inputs in backend.passes:
        own = inputs.attention_mask[0, 0, -3:, -3:] == 0
        assert np.array_equal(own, expected.astype(bool))


def test_times_are_those_of_the_first_and_the_last_token(monkeypatch):
    """Every look at the clock is a second later than the one before."""
    clock = iter(range(1000))
    monkeypatch.setattr("la_runtime.sequence.time.perf_counter", lambda: float(next(clock)))
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX)

    _, stats = decode(backend, [PROMPT], [_exact(0, Layout.FULL, 5)])

    times = (stats[0].queued_s, stats[0].ttft_s, stats[0].decode_s)
    assert times == (1.0, 2.0, 4.0)
    assert stats[0].tokens_per_s == 1.0


threshold_params = st.builds(
    SamplingParams,
    select=st.just(Select.THRESHOLD),
    tau=st.sampled_from([0.0, 0.2, 0.6, 1.0]),
    k=lookahead_lengths,
    max_new_tokens=st.integers(1, 20),
)


@given(batch=prompts, data=st.data(), eos=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=2))
def test_threshold_and_exact_rows_of_a_batch_equal_their_runs_alone(batch, data, eos):
    """Mixed rules in one ragged batch, and every row's counts."""
    params = [
        data.draw(
            st.one_of(
                threshold_params, st.builds(_exact, lookahead_lengths, layouts, st.integers(1, 9))
            )
        )
        for _ in batch
    ]
    options = {"eos_token_ids": tuple(eos), "context": 40}
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX)

    together, stats = decode(backend, batch, params, **options)

    for prompt, wish, found, counted in zip(batch, params, together, stats, strict=True):
        (alone,), (alone_counted,) = decode(backend, [prompt], [wish], **options)
        assert found == alone
        assert (counted.drafted, counted.accepted) == (
            alone_counted.drafted,
            alone_counted.accepted,
        )
        assert (counted.reread, counted.agreed) == (alone_counted.reread, alone_counted.agreed)
        assert counted.tokens_per_pass <= wish.k + 1


class _BrokenBackend(FakeBackend):
    """Gives NaN for whatever follows one position of one of the sequences."""

    def __init__(self, *, sequence, **options):
        super().__init__(**options)
        self._sequence = sequence

    def forward(self, state, inputs):
        scores = super().forward(state, inputs)
        rows = np.take_along_axis(inputs.position_ids, inputs.logits_rows, axis=1)
        broken = rows == len(PROMPT) + 2
        broken[[i for i in range(len(rows)) if i != self._sequence]] = False
        scores.logits()[broken, 3] = np.nan
        return scores


@pytest.mark.parametrize(
    "params",
    [
        _exact(0, Layout.FULL),
        _exact(3, Layout.FULL),
        SamplingParams(k=2, temperature=1.0),
        SamplingParams(k=2, select=Select.THRESHOLD, tau=0.0),
    ],
    ids=["plain", "lookahead", "sampled", "threshold"],
)
def test_non_finite_scores_are_an_error_that_names_request_and_position(params):
    """Wherever the row stands in the block."""
    backend = _BrokenBackend(sequence=1, vocab_size=VOCAB_SIZE, k_max=K_MAX)

    with pytest.raises(NonFiniteScoreError, match=r"(?i)nan.* in request 1 at position 7"):
        decode(backend, [PROMPT] * 3, [params] * 3)


class _BrokenSlots(FakeBackend):
    """Gives NaN for every slot."""

    def forward(self, state, inputs):
        scores = super().forward(state, inputs)
        ids = np.take_along_axis(inputs.input_ids, inputs.logits_rows, axis=1)
        scores.logits()[ids >= VOCAB_SIZE] = np.nan
        return scores


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_slots_that_say_nothing_cost_proposals_and_no_more(temperature):
    found = []
    for backend, k in (
        (FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX), 0),
        (_BrokenSlots(vocab_size=VOCAB_SIZE, k_max=K_MAX), 4),
    ):
        params = SamplingParams(k=k, temperature=temperature, max_new_tokens=12)
        results, (stats,) = decode(backend, [PROMPT], [params])
        found.append(emitted(results[0]))
        assert sum(stats.drafted) == 0

    assert found[0] == found[1]


def test_messages_count_requests_from_where_the_caller_says():
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX)
    decoder = Decoder(backend, context=CONTEXT, eos_token_ids=())

    with pytest.raises(UsageError, match="prompt 9 is empty"):
        decoder.start([PROMPT, ()], [_exact(0, Layout.FULL)] * 2, first_request=8)
    with pytest.raises(UsageError, match="there is no prompt"):
        decoder.start([], [])


@pytest.mark.parametrize("token", [1.5, "1", None, True])
def test_token_ids_must_be_whole_numbers(token):
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX)

    with pytest.raises(UsageError, match=r"prompt 0 holds .*expected whole token ids"):
        decode(backend, [[1, token]], [_exact(0, Layout.FULL)])


def test_a_closed_decoding_says_so():
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX)
    decoding = Decoder(backend, context=CONTEXT, eos_token_ids=()).start(
        [PROMPT], [_exact(0, Layout.FULL)]
    )
    decoding.close()

    with pytest.raises(UsageError, match="the decoding is closed"):
        decoding.prefill()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1, got 0"),
        ({"cache_sizing": CacheSizing.EXACT}, "exact cache sizing needs a block width"),
    ],
)
def test_impossible_policies_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        BlockPolicy(**options)


@pytest.mark.parametrize(
    ("prompt", "k", "message"),
    [
        ((), 0, "prompt 0 is empty"),
        ((1,) * CONTEXT, 0, f"prompt 0 has {CONTEXT} tokens, but the context of {CONTEXT}"),
        ((VOCAB_SIZE,), 0, f"token id outside 0..{VOCAB_SIZE - 1}"),
        ((1,), K_MAX + 1, f"k must be at most the bundle's {K_MAX}, got {K_MAX + 1}"),
    ],
)
def test_impossible_requests_are_refused(prompt, k, message):
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX)

    with pytest.raises(UsageError, match=message):
        decode(backend, [prompt], [_exact(k, Layout.FULL)])


def test_a_fixed_width_too_narrow_for_the_layout_is_refused():
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX)

    with pytest.raises(UsageError, match=r"fixed width 8 is too narrow.*up to 16 rows"):
        decode(
            backend,
            [PROMPT],
            [_exact(3, Layout.FULL)],
            policy=BlockPolicy.fixed_width(8, k_max=K_MAX),
        )


def test_the_longest_prompt_leaves_room_for_one_token():
    prompt = tuple(i % VOCAB_SIZE for i in range(CONTEXT - 1))
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX)

    results, _ = decode(backend, [prompt], [_exact(4, Layout.FULL)])

    assert emitted(results[0]) == decode_plainly(prompt, 1)
    assert results[0][-1].finish_reason is FinishReason.CONTEXT


sampling_params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 2, 5]),
        "top_p": st.sampled_from([0.3, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "repetition_penalty": st.sampled_from([0.7, 1.0, 1.8]),
        "presence_penalty": st.sampled_from([0.0, -0.5, 3.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-100.0, -1.0, 4.0]), max_size=3
        ),
        "seed": st.integers(0, 2**64 - 1),
        "stop_token_ids": st.sampled_from([(), (2,), (0, 7)]),
        "ignore_eos": st.booleans(),
        "min_new_tokens": st.sampled_from([0, 0, 4]),
        "max_new_tokens": st.integers(4, 20),
        "logprobs": st.sampled_from([None, 0, 3]),
    }
)


@given(batch=prompts, seed=st.integers(0, 3), data=st.data())
def test_sampled_decoding_equals_plain_sampling_by_seed(batch, seed, data):
    """Any parameters per prompt, k, layout and batch, with slots that are right now and then."""
    params = [
        SamplingParams(
            **data.draw(sampling_params), k=data.draw(lookahead_lengths), layout=data.draw(layouts)
        )
        for _ in batch
    ]
    truths = [
        sample_plainly(prompt, wish, seed=seed, eos_token_ids=(11,))
        for prompt, wish in zip(batch, params, strict=True)
    ]
    futures = []
    for prompt, truth in zip(batch, truths, strict=True):
        future = [*prompt, *(choice.token_id for choice in truth)]
        wrong = data.draw(st.sets(st.integers(0, len(future) - 1), max_size=6))
        futures.append([(t + 1) % VOCAB_SIZE if i in wrong else t for i, t in enumerate(future)])
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX, seed=seed, slot_oracle=futures)
    decoder = Decoder(backend, context=CONTEXT, eos_token_ids=(11,))

    with decoder.start(batch, params) as decoding:
        results = [*decoding.prefill()]
        while not decoding.is_done:
            results += decoding.step()

    for index, (wish, truth) in enumerate(zip(params, truths, strict=True)):
        found = [result for i, result in results if i == index]
        assert emitted(found) == [choice.token_id for choice in truth]
        assert [m for result in found for m in result.margins] == [c.margin for c in truth]
        assert decoding.choices(index) == (() if wish.logprobs is None else tuple(truth))
        last = truth[-1].token_id
        if last == 11 and not wish.ignore_eos:
            assert found[-1].finish_reason is FinishReason.EOS
        elif last in wish.stop_token_ids:
            assert found[-1].finish_reason is FinishReason.STOP
        else:
            assert found[-1].finish_reason is FinishReason.LENGTH


def test_perfect_drafts_of_a_sampled_text_are_all_accepted():
    """Slots that propose the sampled continuation are verified with the same noise."""
    params = SamplingParams(
        temperature=1.0, seed=5, k=4, layout=Layout.FULL, max_new_tokens=16, top_p=0.9
    )
    truth = [choice.token_id for choice in sample_plainly(PROMPT, params)]
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX, slot_oracle=[[*PROMPT, *truth]])

    results, stats = decode(backend, [PROMPT], [params])

    assert emitted(results[0]) == truth
    assert stats[0].tokens_per_pass == 5.0


def test_processors_see_the_draft_prefix_and_only_rows_that_are_reached():
    """A grammar: called once per chosen token in plain decoding, with exactly its history."""
    plain_calls, calls = [], []

    def record(into):
        def process(token_ids, scores):
            into.append(tuple(token_ids))
            scores[token_ids[-1]] = -np.inf

        return process

    options = {"temperature": 1.0, "max_new_tokens": 13, "layout": Layout.FULL}
    plain = SamplingParams(**options, k=0, logits_processors=(record(plain_calls),))
    truth = [choice.token_id for choice in sample_plainly(PROMPT, plain)]
    plain_calls.clear()
    backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX, slot_oracle=[[*PROMPT, *truth]])
    decode(backend, [PROMPT], [plain])
    ahead = SamplingParams(**options, k=3, logits_processors=(record(calls),))

    results, _ = decode(backend, [PROMPT], [ahead])

    assert emitted(results[0]) == truth
    assert all(a != b for a, b in pairwise(truth))
    histories = [(*PROMPT, *truth[:i]) for i in range(13)]
    assert plain_calls == histories
    assert set(histories) <= set(calls)
