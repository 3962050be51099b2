"""The engine over a tiny random model: the same tokens as transformers, whatever is asked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from la_export.reference import TorchReference
from la_export.verify.recording import RecordingBackend
from la_export.verify.tokens import Verdict, compare_tokens
from la_runtime import Engine, SamplingParams
from la_runtime.backends.base import CacheSizing
from la_runtime.bundle import Bundle, open_bundle
from la_runtime.decoder import LARGEST_EPSILON, BlockPolicy, Decoder
from la_runtime.errors import UsageError
from la_runtime.generation import _find_epsilon
from la_runtime.layout import Layout, make_rows
from la_runtime.stopping import FinishReason
from tests.passes import score_rows

# fp32 sums in another order; DESIGN's bound for logits and K/V.
TOLERANCE = 1e-4
EPSILON = 1e-3
NUM_TOKENS = 24
PROMPTS = (
    "The cat sat on the mat",
    "One",
    "A model predicts the next token, and then the next token after that. " * 3,
    "二 🙂 def f(x):\n    return x",
    "rain",
)


@pytest.fixture(scope="module")
def reference(tiny_bundle):
    return TorchReference.load(str(tiny_bundle.parent / "checkpoint"))


def plain_run(engine, prompt):
    """Plain tokens and the margin of each."""
    with engine.prefill(prompt, k=0, max_new_tokens=NUM_TOKENS) as state:
        margins = [*state.first.margins]
        while state.finish_reason is None:
            margins += state.step().margins
        return state.token_ids, margins


def assert_same(engine, prompt, found):
    """Equal tokens, or a first difference at a near-tie."""
    tokens, margins = plain_run(engine, prompt)
    comparison = compare_tokens(tokens, margins, found, epsilon=EPSILON)
    assert comparison.verdict is not Verdict.DIFFERENT, comparison


@pytest.mark.parametrize("text", PROMPTS)
def test_plain_decoding_equals_transformers(engine, reference, text):
    prompt = engine.encode(text)

    eos = engine.bundle.manifest.model.eos_token_ids
    assert_same(engine, prompt, reference.generate_greedy(prompt, NUM_TOKENS, eos))


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_lookahead_decoding_equals_plain_decoding_alone_and_in_ragged_batches(engine, layout, k):
    prompts = [engine.encode(text) for text in PROMPTS]
    options = {"k": k, "layout": layout, "max_new_tokens": NUM_TOKENS}

    for prompt, batched in zip(prompts, engine.generate(prompts, **options), strict=True):
        assert_same(engine, prompt, batched.token_ids)
        assert_same(engine, prompt, engine.generate(prompt, **options).token_ids)


def test_more_prompts_than_the_largest_batch_wait_their_turn(tiny_bundle, engine):
    texts = list(PROMPTS)

    with Engine.open(tiny_bundle, max_batch=2, threads=1) as narrow:
        results = narrow.generate(texts, max_new_tokens=5)

    assert [result.stats.prompt_tokens for result in results] == [
        len(engine.encode(text)) for text in texts
    ]
    for text, result in zip(texts, results, strict=True):
        tokens, margins = plain_run(engine, engine.encode(text))
        comparison = compare_tokens(tokens[:5], margins, result.token_ids, epsilon=EPSILON)
        assert comparison.verdict is not Verdict.DIFFERENT


@pytest.mark.parametrize("layout", Layout)
def test_at_a_fixed_width_logits_are_equal_bit_for_bit(engine, layout):
    """Every pass at one width, plain decoding included: no excuse for any difference."""
    model = engine.bundle.manifest.model
    policy = BlockPolicy.fixed_width(25, k_max=engine.backend.contract.k_max)
    for text in PROMPTS:
        recorded = []
        for k in (0, 1, 4):
            recorder = RecordingBackend(engine.backend)
            decoder = Decoder(recorder, context=model.context, eos_token_ids=())
            params = SamplingParams(k=k, layout=layout, max_new_tokens=NUM_TOKENS)
            with decoder.start([engine.encode(text)], [params], policy) as decoding:
                decoding.prefill()
                while not decoding.is_done:
                    decoding.step()
                recorded.append((decoding.token_ids(0), recorder.logits_at))
        (plain_tokens, plain_logits), *others = recorded
        for tokens, logits in others:
            assert tokens == plain_tokens
            shared = plain_logits.keys() & logits.keys()
            assert len(shared) >= NUM_TOKENS - 1
            assert all(np.array_equal(plain_logits[p], logits[p]) for p in shared)


def test_a_fixed_width_engine_decodes_as_any_other(tiny_bundle, engine):
    with Engine.open(tiny_bundle, fixed_width=32, threads=1) as fixed:
        for text in PROMPTS[:2]:
            found = fixed.generate(text, k=4, layout="full", max_new_tokens=NUM_TOKENS)
            assert_same(engine, engine.encode(text), found.token_ids)


@pytest.fixture
def vectors(engine):
    """Random vectors, so that slots differ from each other; the bundle's own afterwards."""
    contract = engine.backend.contract
    untuned = engine.backend.lookahead_embeddings
    vectors = np.random.default_rng(1).normal(size=(contract.k_max, contract.hidden_size))
    vectors = vectors.astype(np.float32)
    engine.backend.set_lookahead_embeddings(vectors)
    yield vectors
    engine.backend.set_lookahead_embeddings(untuned)


def test_each_slots_logits_equal_pytorch_on_prefix_and_one_lookahead_token(
    engine, reference, vectors
):
    """Slot i behind position p is what PyTorch says after [prefix, lookahead token i at p+i]."""
    prompt = engine.encode(PROMPTS[0])
    k = engine.k
    rows = make_rows(len(prompt), (), Layout.ROOT_ONLY.groups(0, k))
    state = engine.backend.allocate(1, CacheSizing.STEPPED)
    logits = score_rows(engine, state, prompt, rows)
    last = len(prompt) - 1
    vocab_size = engine.backend.contract.vocab_size
    for slot in range(1, k + 1):
        expected = reference.scores(
            [*prompt, vocab_size + slot - 1],
            vectors,
            position_ids=[*range(len(prompt)), last + slot],
        )
        np.testing.assert_allclose(logits[last + slot], expected[-1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layout", Layout)
def test_the_committed_cache_equals_a_fresh_full_pass_after_every_step(engine, reference, layout):
    prompt = engine.encode(PROMPTS[2])
    decoder = Decoder(engine.backend, context=512, eos_token_ids=())
    params = SamplingParams(k=4, layout=layout, max_new_tokens=NUM_TOKENS)
    with decoder.start([prompt], [params]) as decoding:
        decoding.prefill()
        while not decoding.is_done:
            cached = int(decoding.cache.lengths[0])
            known = [*prompt, *decoding.token_ids(0)][:cached]
            assert cached == len(prompt) + len(decoding.token_ids(0)) - 1
            np.testing.assert_allclose(
                decoding.cache.read(0),
                reference.key_values(known),
                rtol=0,
                atol=TOLERANCE,
            )
            decoding.step()


def test_streamed_chunks_add_up_to_the_result(engine):
    for text in PROMPTS:
        whole = engine.generate(text, max_new_tokens=NUM_TOKENS)
        with engine.stream(text, max_new_tokens=NUM_TOKENS) as stream:
            chunks = list(stream)
        assert "".join(chunk.text for chunk in chunks) == stream.result.text == whole.text
        assert tuple(t for chunk in chunks for t in chunk.token_ids) == whole.token_ids
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason is whole.finish_reason


def test_a_closed_stream_ends_as_cancelled(engine):
    whole = engine.generate(PROMPTS[0], max_new_tokens=200, ignore_eos=True)
    stream = engine.stream(PROMPTS[0], max_new_tokens=200, ignore_eos=True)
    with pytest.raises(UsageError, match="the stream has not finished"):
        _ = stream.result
    first = next(stream)
    stream.close()

    assert list(stream) == []
    assert stream.finish_reason is stream.result.finish_reason is FinishReason.CANCELLED
    assert stream.result.text.startswith(first.text)
    assert whole.text.startswith(stream.result.text.rstrip("\ufffd"))
    assert len(stream.result.token_ids) < 200


def test_stepping_gives_what_generating_gives(engine):
    prompt = engine.encode(PROMPTS[1])
    whole = engine.generate(prompt, k=2, max_new_tokens=NUM_TOKENS)

    with engine.prefill(prompt, k=2, max_new_tokens=NUM_TOKENS) as state:
        results = [state.first]
        while state.finish_reason is None:
            results.append(state.step())
        assert state.token_ids == whole.token_ids
        assert state.stats.passes == whole.stats.passes == len(results)
        assert sum(result.accepted for result in results) == sum(whole.stats.accepted)
        with pytest.raises(UsageError, match=r"the sequence has finished \(length\)"):
            state.step()


def test_the_largest_built_k_is_the_default(tiny_bundle, engine):
    assert engine.k == max(open_bundle(tiny_bundle).manifest.lookahead_lengths)
    assert engine.generate("One", max_new_tokens=3).stats.k == engine.k
    assert engine.generate("One", SamplingParams(max_new_tokens=3)).stats.k == engine.k
    with Engine.open(tiny_bundle, k=1, threads=1) as other:
        assert other.generate("One", max_new_tokens=3).stats.k == 1


def test_generation_ends_at_the_end_token_inside_a_block(engine, tiny_bundle):
    """The second plain token is declared an end token: everything after it is discarded."""
    prompt = engine.encode(PROMPTS[0])
    tokens, _ = plain_run(engine, prompt)
    end = tokens[6]
    expected = tokens[: tokens.index(end) + 1]
    decoder = Decoder(engine.backend, context=512, eos_token_ids=(end,))
    for layout in Layout:
        params = SamplingParams(k=4, layout=layout, max_new_tokens=NUM_TOKENS)
        with decoder.start([prompt], [params]) as decoding:
            results = [*decoding.prefill()]
            while not decoding.is_done:
                results += decoding.step()
            assert decoding.token_ids(0) == expected
            assert results[-1][1].finish_reason is FinishReason.EOS
            ignoring = replace(params, ignore_eos=True)
        with decoder.start([prompt], [ignoring]) as decoding:
            decoding.prefill()
            while not decoding.is_done:
                decoding.step()
            assert decoding.token_ids(0) == tokens


def test_chat_puts_the_prompt_into_the_template(engine):
    messages = [{"role": "user", "content": "One"}]

    assert engine.encode("One", chat=True) == engine.encode(messages)
    assert engine.encode("One", chat=True) != engine.encode("One")
    text = engine.tokenizer.decode(engine.encode(messages))
    assert "user\nOne" in text


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        (["One", ""], {}, "prompt 1: the prompt is empty"),
        ("One", {"k": 99}, r"k must be between 0 and .* 4; got 99"),
        ("One", {"k": -1}, "k must be 0 or more, got -1"),
        ("One " * 600, {}, r"prompt 0 has \d+ tokens, but the context of \d+"),
        ([1, 10_000], {}, "holds a token id outside 0"),
        ([5.7, 6.2], {}, "prompt 0 holds 5.7, expected whole token ids"),
        (5, {}, "a prompt is text, token ids or chat messages, got int"),
        ([1, 2], {"chat": True}, "chat wants text or messages, got token ids"),
        (["One"] * 8 + ["One " * 600], {}, r"prompt 8 has \d+ tokens"),
        ("One", {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ],
)
def test_impossible_requests_are_refused(engine, prompt, options, message):
    with pytest.raises(UsageError, match=message):
        engine.generate(prompt, **options)


def test_params_and_keywords_together_are_refused(engine):
    with pytest.raises(UsageError, match="params or keywords, not both; got k"):
        engine.generate("One", SamplingParams(), k=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 9}, "got 9"),
        ({"threads": -1}, "threads must be at least 0, got -1"),
        ({"max_batch": 0}, "max_batch must be at least 1, got 0"),
        ({"fixed_width": 4}, "fixed width must be more than k = 4, got 4"),
        ({"backend": "tpu"}, "unknown backend 'tpu'"),
        ({"threads": 10**11}, "threads must be at most 1024"),
        ({"digests": "bogus"}, "digests must be one of 'full', 'cached', got 'bogus'"),
    ],
)
def test_impossible_engine_options_are_refused(tiny_bundle, options, message):
    with pytest.raises(UsageError, match=message):
        Engine.open(tiny_bundle, **options)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("k", [2, 4])
def test_sampling_by_seed_does_not_depend_on_k_layout_or_batch(engine, k, layout):
    """Differences would be near-ties of float sums, noise included: none within these texts."""
    options = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.2, "max_new_tokens": 12}
    texts = PROMPTS[:3]
    plain = [engine.generate(text, k=0, seed=7, **options) for text in texts]

    batched = engine.generate(list(texts), k=k, layout=layout, seed=7, **options)

    for text, expected, found in zip(texts, plain, batched, strict=True):
        assert found.token_ids == expected.token_ids
        alone = engine.generate(text, k=k, layout=layout, seed=7, **options)
        assert alone.token_ids == expected.token_ids
    others = [engine.generate(text, k=k, seed=8, **options).token_ids for text in texts]
    assert others != [result.token_ids for result in plain]


def test_a_stop_string_cuts_text_tokens_and_stream_alike(engine):
    whole = engine.generate(PROMPTS[0], max_new_tokens=NUM_TOKENS)
    stop = whole.text[len(whole.text) // 2 :][:3]
    cut = whole.text.index(stop)

    for k in (0, 4):
        found = engine.generate(PROMPTS[0], k=k, stop=stop, max_new_tokens=NUM_TOKENS)
        with engine.stream(PROMPTS[0], k=k, stop=stop, max_new_tokens=NUM_TOKENS) as stream:
            streamed = "".join(chunk.text for chunk in stream)
        assert found.text == streamed == stream.result.text == whole.text[:cut]
        assert found.finish_reason is FinishReason.STOP
        assert found.token_ids == whole.token_ids[: len(found.token_ids)]
        assert stop in engine.tokenizer.decode(found.token_ids)
        assert stop not in engine.tokenizer.decode(found.token_ids[:-1])


def test_logprobs_equal_those_of_pytorch(engine, reference):
    prompt = engine.encode(PROMPTS[0])

    result = engine.generate(prompt, k=4, logprobs=2, max_new_tokens=NUM_TOKENS)

    logits = reference.scores([*prompt, *result.token_ids]).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
    for position, entry in enumerate(result.logprobs, len(prompt) - 1):
        row = logprobs[position]
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=TOLERANCE)
        assert [token for token, _ in entry.top] == np.argsort(-row)[:2].tolist()
        for token, logprob in entry.top:
            assert logprob == pytest.approx(row[token], abs=TOLERANCE)


def test_prompts_may_be_numpy_arrays(engine):
    prompt = engine.encode(PROMPTS[0])
    expected = engine.generate(prompt, max_new_tokens=4).token_ids
    array = np.asarray(prompt)

    assert engine.generate(array, max_new_tokens=4).token_ids == expected
    assert engine.generate([array, array], max_new_tokens=4)[1].token_ids == expected
    with engine.prefill(array, max_new_tokens=4) as state:
        assert state.first.token_ids == expected[:1]
    with pytest.raises(UsageError, match="prefill wants token ids, got text"):
        engine.prefill("One")


def test_a_wrong_prompt_is_found_before_any_runs(engine, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a pass was run")

    monkeypatch.setattr(engine.backend, "forward", refuse)

    with pytest.raises(UsageError, match="prompt 8"):
        engine.generate(["One"] * 8 + ["One " * 600])


def test_a_closed_engine_says_so_and_may_be_closed_again(tiny_bundle):
    with Engine.open(tiny_bundle, threads=1) as engine:
        state = engine.prefill(engine.encode("One"))
        engine.close()
        with pytest.raises(UsageError, match="the engine is closed"):
            engine.generate("One")
        with pytest.raises(UsageError, match="the engine is closed"):
            state.step()
    with pytest.raises(UsageError, match="the engine is closed"):
        engine.stream("One")


def test_a_closed_state_says_so(engine):
    state = engine.prefill(engine.encode("One"))
    state.close()

    with pytest.raises(UsageError, match="the decoding is closed"):
        state.step()


def test_decoding_up_to_the_end_of_the_context_equals_transformers(engine, reference):
    """Slots past the last position are clipped; the last token is the context's last."""
    context = engine.bundle.manifest.model.context
    prompt = engine.encode("One " * context)[: context - 9]
    expected = reference.generate_greedy(prompt, 9, ())
    for layout in Layout:
        found = engine.generate(prompt, k=4, layout=layout, ignore_eos=True, max_new_tokens=50)
        assert found.finish_reason is FinishReason.CONTEXT
        _, margins = plain_run(engine, prompt)
        assert len(found.token_ids) == 9
        comparison = compare_tokens(expected, margins, found.token_ids, epsilon=EPSILON)
        assert comparison.verdict is not Verdict.DIFFERENT


def test_stepping_stops_at_stop_strings_as_generating_does(engine):
    whole = engine.generate(PROMPTS[0], max_new_tokens=NUM_TOKENS, ignore_eos=True)
    stop = whole.text[3:5]
    options = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "stop": stop}
    expected = engine.generate(PROMPTS[0], **options)
    with engine.prefill(engine.encode(PROMPTS[0]), **options) as state:
        while state.finish_reason is None:
            state.step()

        assert (state.token_ids, state.finish_reason) == (expected.token_ids, FinishReason.STOP)


def test_stop_ids_must_be_of_the_vocabulary(engine):
    for token_id in (-1, 320, 2**70):
        with pytest.raises(UsageError, match=f"stop_token_ids names token {token_id}; ids go from"):
            engine.generate("One", stop_token_ids=(token_id,))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("k", "2", r"k must be an integer, got '2' \(str\)"),
        ("threads", 1.5, r"threads must be an integer, got 1.5 \(float\)"),
        ("threads", True, r"threads must be an integer, got True \(bool\)"),
        ("max_batch", "8", "max_batch must be an integer"),
        ("max_batch", 0, "max_batch must be at least 1, got 0"),
        ("max_queue", 0, "max_queue must be at least 1, got 0"),
        ("fixed_width", "9", "fixed_width must be an integer"),
    ],
)
def test_impossible_engines_are_refused(tiny_bundle, option, value, message):
    with pytest.raises(UsageError, match=message):
        Engine.open(tiny_bundle, **{option: value})


def test_a_fixed_width_decodes_one_sequence_at_a_time(tiny_bundle):
    with pytest.raises(UsageError, match="decodes one sequence at a time, got max_batch 4"):
        Engine.open(tiny_bundle, fixed_width=32, max_batch=4)
    with Engine.open(tiny_bundle, fixed_width=32, threads=1) as fixed:
        assert fixed.max_batch == 1


@pytest.mark.parametrize(
    ("precision", "expected"),
    [*LARGEST_EPSILON.items(), ("fp2", max(LARGEST_EPSILON.values()))],
)
def test_without_a_certificate_a_near_tie_is_as_close_as_the_precision_allows(
    tiny_bundle, precision, expected
):
    bundle = open_bundle(tiny_bundle)
    manifest = bundle.manifest.model_copy(update={"precision": precision, "certificates": ()})

    assert _find_epsilon(Bundle(bundle.root, manifest), "ort-cpu") == expected
