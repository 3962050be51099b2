"""Turns over one cache equal turns without it, and read only what is new."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from la_runtime.errors import LookaheadError, QueueFullError, UsageError
from la_runtime.generation import Engine
from la_runtime.prompts import as_lists
from la_runtime.sampling import SamplingParams
from la_runtime.stopping import FinishReason
from tests.la_runtime.toy_engine import open_toy_engine

TURNS = ("The cat sat on the mat.", "And then?", "二 🙂", "One, two, three")


@pytest.fixture
def toy(tiny_bundle):
    with open_toy_engine(tiny_bundle) as engine:
        yield engine


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_turn_equals_a_cold_run(toy, k, temperature):
    params = SamplingParams(k=k, temperature=temperature, max_new_tokens=12, stop="e", seed=3)
    with toy.start([{"role": "system", "content": "Be brief."}]) as conversation:
        for number, text in enumerate(TURNS):
            before = [*conversation.messages]
            num_cached = conversation.num_cached
            result = conversation.send(text, params)

            cold = toy.generate([*before, {"role": "user", "content": text}], params)
            assert (result.text, result.token_ids) == (cold.text, cold.token_ids)
            assert conversation.messages == [
                *before,
                {"role": "user", "content": text},
                {"role": "assistant", "content": result.text},
            ]
            stats = result.stats
            assert 0 < stats.cached_tokens <= num_cached or number == 0
            assert cold.stats.cached_tokens == 0
            assert stats.prompt_tokens == cold.stats.prompt_tokens


def test_a_turn_reads_only_what_the_cache_does_not_hold(toy):
    """Rows of prefill: the prompt less the cached prefix, and the slots."""
    with toy.start() as conversation:
        first = conversation.generate(list(range(3, 60)), k=2, max_new_tokens=9)
        history = [*range(3, 60), *first.token_ids]
        assert conversation.num_cached == len(history) - 1

        more = conversation.generate([*history, 7, 8], k=2, max_new_tokens=1)
        assert more.stats.cached_tokens == len(history) - 1
        assert more.stats.rows == 3 + 2

        other = conversation.generate([*range(3, 20), 200, 201], k=2, max_new_tokens=1)
        assert other.stats.cached_tokens == 17
        assert other.stats.rows == 2 + 2

        same = conversation.generate([*range(3, 20), 200, 201], k=0, max_new_tokens=1)
        assert same.stats.cached_tokens == 18, "the root's scores are wanted"
        assert same.token_ids == other.token_ids

        shorter = conversation.generate([3], k=0, max_new_tokens=2)
        assert shorter.stats.cached_tokens == 0
        assert shorter.token_ids == toy.generate([3], k=0, max_new_tokens=2).token_ids


def test_prompts_that_share_anything_are_read_from_where_they_part(toy):
    rng = np.random.default_rng(0)
    base = rng.integers(0, 300, 40).tolist()
    with toy.start() as conversation:
        for _ in range(25):
            kept = int(rng.integers(0, 40))
            prompt = base[:kept] + rng.integers(0, 300, int(rng.integers(1, 9))).tolist()
            params = SamplingParams(k=int(rng.integers(0, 5)), max_new_tokens=5)
            found = conversation.generate(prompt, params)
            assert found.token_ids == toy.generate(prompt, params).token_ids


def test_conversations_go_on_together(toy):
    """Their turns are decoded in one batch and each gets its own cache back."""
    conversations = [toy.start() for _ in range(3)]
    for _ in range(3):
        streams = [
            conversation.stream(TURNS[index], max_new_tokens=4 + 5 * index)
            for index, conversation in enumerate(conversations)
        ]
        for stream in streams:
            list(stream)
    for index, conversation in enumerate(conversations):
        *before, last = conversation.messages
        cold = toy.generate(before, max_new_tokens=4 + 5 * index)
        assert last["content"] == cold.text
        assert len(conversation.messages) == 6
        conversation.close()


def test_a_cancelled_turn_counts_as_far_as_it_got_and_keeps_the_cache(toy):
    with toy.start() as conversation:
        stream = conversation.stream(TURNS[0], max_new_tokens=150, ignore_eos=True)
        next(stream)
        stream.close()

        assert stream.finish_reason is FinishReason.CANCELLED
        assert conversation.messages[-1] == {"role": "assistant", "content": stream.result.text}
        assert conversation.num_cached > 0
        result = conversation.send(TURNS[1], max_new_tokens=6)
        assert result.text == toy.generate(conversation.messages[:-1], max_new_tokens=6).text


def test_a_failed_turn_leaves_messages_and_cache_as_they_were(toy):
    def fail(token_ids, scores):
        raise RuntimeError("no grammar")

    with toy.start() as conversation:
        conversation.send(TURNS[0], max_new_tokens=6)
        messages, num_cached = conversation.messages, conversation.num_cached
        with pytest.raises(LookaheadError, match="no grammar"):
            conversation.send(TURNS[1], logits_processors=(fail,))
        assert conversation.messages == messages
        assert 0 < conversation.num_cached <= num_cached

        toy.backend.error = MemoryError("no room")
        with pytest.raises(MemoryError):
            conversation.send(TURNS[1])
        assert conversation.messages == messages
        assert conversation.num_cached == 0, "what a broken pass left is not used"
        again = conversation.send(TURNS[1], max_new_tokens=6)
        assert again.text == toy.generate(conversation.messages[:-1], max_new_tokens=6).text


def test_one_turn_at_a_time(toy):
    with toy.start() as conversation:
        stream = conversation.stream(TURNS[0], max_new_tokens=200, ignore_eos=True)
        next(stream)
        with pytest.raises(UsageError, match="the conversation is busy; wait for its turn"):
            conversation.send(TURNS[1])
        stream.close()
        conversation.send(TURNS[1], max_new_tokens=2)
    with pytest.raises(UsageError, match="the conversation is closed; start another"):
        conversation.send(TURNS[2])


def test_a_turn_that_is_refused_leaves_the_cache(tiny_bundle):
    with open_toy_engine(tiny_bundle, max_batch=1, max_queue=1) as engine:
        conversation = engine.start()
        conversation.send(TURNS[0], max_new_tokens=4)
        messages, num_cached = conversation.messages, conversation.num_cached
        engine.backend.close_gate()
        running = engine.stream("One", max_new_tokens=2)
        assert engine.backend.at_gate.wait(60)
        waiting = engine.stream("Two", max_new_tokens=2)
        with pytest.raises(QueueFullError):
            conversation.send(TURNS[1])
        engine.backend.gate.set()
        assert conversation.messages == messages
        assert 0 < conversation.num_cached <= num_cached
        assert list(running)
        assert list(waiting)
        result = conversation.send(TURNS[1], max_new_tokens=4)
        assert result.stats.cached_tokens > 0
        with pytest.raises(UsageError, match="a stream has one sample"):
            conversation.send(TURNS[1], n=2, temperature=1.0)


def test_a_turn_cancelled_while_it_waits_keeps_the_cache(tiny_bundle):
    with open_toy_engine(tiny_bundle, max_batch=1) as engine:
        conversation = engine.start()
        conversation.send(TURNS[0], max_new_tokens=4)
        engine.backend.close_gate()
        running = engine.stream("One", max_new_tokens=2)
        assert engine.backend.at_gate.wait(60)
        turn = conversation.stream(TURNS[1], max_new_tokens=4)
        turn._cancel()
        engine.backend.gate.set()
        list(running)
        assert turn.result.token_ids == ()
        assert conversation.num_cached > 0


def test_a_real_model_says_the_same_at_a_fixed_width(tiny_bundle):
    """Bit for bit: with and without the cache, every row was computed in a pass of one width."""
    with Engine.open(tiny_bundle, threads=1, fixed_width=24) as engine:
        conversation = engine.start()
        for text in TURNS:
            found = conversation.send(text, max_new_tokens=10, logprobs=3, ignore_eos=True)
            cold = engine.generate(
                conversation.messages[:-1], max_new_tokens=10, logprobs=3, ignore_eos=True
            )
            assert found.token_ids == cold.token_ids
            assert found.logprobs == cold.logprobs


def test_numpy_prompts_are_prompts(toy):
    with toy.start() as conversation:
        found = conversation.generate(np.arange(5), max_new_tokens=3)
    assert found.token_ids == toy.generate([0, 1, 2, 3, 4], max_new_tokens=3).token_ids
    assert as_lists([np.arange(2), "text"]) == [[0, 1], "text"]


def test_a_conversation_closed_while_its_turn_runs_keeps_no_cache(toy):
    conversation = toy.start()
    stream = conversation.stream(TURNS[0], max_new_tokens=9, ignore_eos=True)
    next(stream)
    conversation.close()
    list(stream)

    assert conversation.num_cached == 0
    assert conversation.messages[-1]["content"] == stream.result.text


def test_a_forgotten_turn_makes_way_for_the_next(toy):
    with toy.start() as conversation:
        stream = conversation.stream(TURNS[0], max_new_tokens=200, ignore_eos=True)
        next(stream)
        del stream
        gc.collect()
        result = conversation.send(TURNS[1], max_new_tokens=4)
    assert result.text == toy.generate(conversation.messages[:-1], max_new_tokens=4).text
