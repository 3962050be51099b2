"""Many threads on one engine: every request gets what it would get alone, in its turn."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from la_runtime.batch import BlockPolicy
from la_runtime.errors import LookaheadError, QueueFullError, UsageError
from la_runtime.layout import Layout
from la_runtime.sampling import SamplingParams
from la_runtime.stats import PassKind
from la_runtime.stopping import FinishReason
from tests.la_runtime.toy_engine import open_toy_engine

NUM_TOKENS = 24
PROMPTS = (
    "The cat sat on the mat",
    "One",
    "A model predicts the next token, and then the next token after that. " * 3,
    "二 🙂 def f(x):\n    return x",
    "rain in Spain",
)


def make_requests(count, seed=0):
    """Prompts and parameters of all kinds."""
    rng = np.random.default_rng(seed)
    requests = []
    for index in range(count):
        params = SamplingParams(
            k=int(rng.integers(0, 5)),
            layout=Layout.FULL if rng.integers(2) else Layout.ROOT_ONLY,
            temperature=float(rng.choice([0.0, 0.9])),
            top_p=float(rng.choice([0.8, 1.0])),
            repetition_penalty=float(rng.choice([1.0, 1.2])),
            seed=index,
            max_new_tokens=int(rng.integers(1, NUM_TOKENS)),
            logprobs=2 if rng.integers(4) == 0 else None,
            stop="e" if rng.integers(4) == 0 else (),
        )
        requests.append((PROMPTS[int(rng.integers(len(PROMPTS)))] + str(index), params))
    return requests


def essence(result):
    """What must not depend on anything but the request."""
    return (result.text, result.token_ids, result.finish_reason, result.logprobs)


@pytest.fixture(scope="module")
def requests():
    return make_requests(40)


@pytest.fixture(scope="module")
def alone(tiny_bundle, requests):
    """Each request on an engine of its own."""
    found = []
    for prompt, params in requests:
        with open_toy_engine(tiny_bundle, max_batch=1) as engine:
            found.append(engine.generate(prompt, replace(params, k=0, layout=None)))
    return found


@pytest.mark.parametrize("max_batch", [1, 2, 8, 64])
@pytest.mark.parametrize("prefill_chunk", [7, 512])
def test_different_requests_in_one_call_get_what_they_get_alone(
    tiny_bundle, requests, alone, max_batch, prefill_chunk
):
    policy = BlockPolicy(prefill_chunk=prefill_chunk)
    with open_toy_engine(tiny_bundle, max_batch=max_batch, policy=policy) as engine:
        found = engine.generate([p for p, _ in requests], [params for _, params in requests])

    assert list(map(essence, found)) == list(map(essence, alone))


def test_eight_threads_get_what_they_get_alone(tiny_bundle, requests, alone):
    def ask(engine, index):
        prompt, params = requests[index]
        if index % 3 == 0:
            with engine.stream(prompt, params) as stream:
                text = "".join(chunk.text for chunk in stream)
            assert text == stream.result.text
            return stream.result
        return engine.generate(prompt, params)

    with open_toy_engine(tiny_bundle, max_batch=4) as engine, ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda index: ask(engine, index), range(len(requests))))

    assert list(map(essence, found)) == list(map(essence, alone))


def test_requests_are_served_in_the_order_they_came(tiny_bundle):
    """Whichever thread they come from; with one place, the first to come is the first to end."""
    ended = []

    def processor(index):
        def note(token_ids, scores):
            if index not in ended:
                ended.append(index)

        return note

    with open_toy_engine(tiny_bundle, max_batch=1) as engine:
        engine.backend.close_gate()
        streams = []
        for index in range(9):
            thread = threading.Thread(
                target=lambda index=index: streams.append(
                    engine.stream(
                        PROMPTS[index % 5],
                        max_new_tokens=3,
                        logits_processors=(processor(index),),
                    )
                )
            )
            thread.start()
            thread.join()
        engine.backend.gate.set()
        for stream in streams:
            list(stream)

    assert ended == list(range(9))


def test_nobody_starves_behind_those_who_come_later(tiny_bundle):
    """Two places, one held by a long request while short ones keep coming: order is kept."""
    order = []
    with open_toy_engine(tiny_bundle, max_batch=2) as engine:
        long = engine.stream("long", max_new_tokens=200, ignore_eos=True)
        next(long)

        def note(index):
            def hear(token_ids, scores):
                if index not in order:
                    order.append(index)

            return hear

        engine.backend.close_gate()
        assert engine.backend.at_gate.wait(60)
        samples = engine.stream("x", max_new_tokens=2, logits_processors=(note("pair"),))
        threads = [
            threading.Thread(
                target=engine.generate,
                args=("y", SamplingParams(n=2, temperature=1, max_new_tokens=2,
                                          logits_processors=(note("wide"),))),
            )
        ]  # fmt: skip
        threads[0].start()
        while engine.num_waiting < 2:
            pass
        later = [
            engine.stream("z", max_new_tokens=2, logits_processors=(note(index),))
            for index in range(5)
        ]
        engine.backend.gate.set()
        for stream in (samples, *later):
            list(stream)
        threads[0].join()
        long.close()

    assert order == ["pair", "wide", 0, 1, 2, 3, 4]


def test_a_full_queue_refuses_and_goes_on(tiny_bundle):
    with open_toy_engine(tiny_bundle, max_batch=1, max_queue=2) as engine:
        expected = engine.generate("One", max_new_tokens=4)
        engine.backend.close_gate()
        streams = [engine.stream("One", max_new_tokens=4)]
        assert engine.backend.at_gate.wait(60)  # the first is admitted
        streams += [engine.stream("One", max_new_tokens=4) for _ in range(2)]
        assert engine.num_waiting == 2

        for refused in (engine.generate, engine.stream):
            with pytest.raises(
                QueueFullError,
                match=r"the queue is full: 2 waiting, at most 2; ask again later, .* max_queue",
            ):
                refused("One")
        engine.backend.gate.set()
        for stream in streams:
            list(stream)
            assert stream.result.token_ids == expected.token_ids
        assert engine.generate("One", max_new_tokens=4).token_ids == expected.token_ids


def test_a_call_with_more_prompts_than_the_queue_is_long_is_one_call(tiny_bundle):
    with open_toy_engine(tiny_bundle, max_batch=2, max_queue=1) as engine:
        results = engine.generate(["One"] * 9, max_new_tokens=3)

    assert len({result.token_ids for result in results}) == 1


def test_cancelling_ends_a_request_within_one_pass(tiny_bundle):
    with open_toy_engine(tiny_bundle) as engine:
        stream = engine.stream("One", max_new_tokens=200, ignore_eos=True)
        next(stream)
        engine.backend.close_gate()
        assert engine.backend.at_gate.wait(60)
        before = engine.backend.num_passes
        stream.close()
        engine.backend.gate.set()

        assert stream.result.finish_reason is FinishReason.CANCELLED
        assert engine.backend.num_passes <= before + 1, "only the pass under way"
        assert engine.num_running == 0
        assert list(stream) == []


def test_a_waiting_request_can_be_cancelled(tiny_bundle):
    with open_toy_engine(tiny_bundle, max_batch=1, max_queue=1) as engine:
        engine.backend.close_gate()
        first = engine.stream("One", max_new_tokens=2)
        assert engine.backend.at_gate.wait(60)
        waiting = engine.stream("Two", max_new_tokens=2)
        waiting.close()
        engine.backend.gate.set()

        assert waiting.result.finish_reason is FinishReason.CANCELLED
        assert waiting.result.token_ids == ()
        assert len(list(first)) > 0
        assert engine.num_waiting == 0


def test_a_forgotten_stream_is_cancelled(tiny_bundle):
    with open_toy_engine(tiny_bundle, max_batch=1) as engine:
        stream = engine.stream("One", max_new_tokens=250, ignore_eos=True)
        next(stream)
        engine.backend.close_gate()
        del stream
        gc.collect()
        before = engine.backend.num_passes
        engine.backend.gate.set()
        engine.generate("Two", max_new_tokens=1)

        assert engine.backend.num_passes <= before + 3


def test_closing_while_generating_ends_everything_as_cancelled(tiny_bundle):
    engine = open_toy_engine(tiny_bundle, max_batch=2)
    with ThreadPoolExecutor(6) as threads:
        running = engine.stream("One", max_new_tokens=200, ignore_eos=True)
        next(running)
        engine.backend.close_gate()
        assert engine.backend.at_gate.wait(60)
        waiting = [
            threads.submit(engine.generate, "Two", max_new_tokens=200, ignore_eos=True)
            for _ in range(4)
        ]
        while engine.num_waiting < 4:
            pass
        closing = threads.submit(engine.close)
        while not engine._scheduler._is_closing:
            pass
        engine.backend.gate.set()
        closing.result()

        reasons = [future.result().finish_reason for future in waiting]
        assert reasons == [FinishReason.CANCELLED] * 4
        running.close()
        assert running.result.finish_reason is FinishReason.CANCELLED
    with pytest.raises(UsageError, match="the engine is closed; open the bundle again"):
        engine.generate("Three")
    engine.close()


def test_an_engine_that_is_forgotten_ends_its_thread(tiny_bundle):
    engine = open_toy_engine(tiny_bundle)
    engine.generate("One", max_new_tokens=2)
    thread = weakref.ref(engine._scheduler._thread)
    assert thread().is_alive()

    del engine
    gc.collect()

    assert thread() is None or not thread().is_alive()


def test_a_request_that_fails_leaves_the_others_alone(tiny_bundle, requests, alone):
    def fail(token_ids, scores):
        raise RuntimeError("no grammar")

    broken = SamplingParams(logits_processors=(fail,), max_new_tokens=5)
    with open_toy_engine(tiny_bundle, max_batch=4) as engine, ThreadPoolExecutor(8) as threads:
        failing = [threads.submit(engine.generate, "One", broken) for _ in range(4)]
        found = list(threads.map(lambda request: engine.generate(*request), requests[:12]))
        for future in failing:
            with pytest.raises(LookaheadError, match=r"a logits processor failed .* no grammar"):
                future.result()
        with (
            engine.stream("One", broken) as stream,
            pytest.raises(LookaheadError, match="no grammar"),
        ):
            list(stream)
        assert stream.finish_reason is None

    assert list(map(essence, found)) == list(map(essence, alone[:12]))


def test_one_failing_prompt_of_a_call_fails_the_call(tiny_bundle):
    def fail(token_ids, scores):
        raise RuntimeError("no grammar")

    params = [SamplingParams(max_new_tokens=100, ignore_eos=True)] * 5
    params[3] = SamplingParams(logits_processors=(fail,))
    with open_toy_engine(tiny_bundle, max_batch=2) as engine:
        with pytest.raises(LookaheadError, match="failed in request 3"):
            engine.generate(["One"] * 5, params)
        assert len(engine.generate("One", max_new_tokens=3).token_ids) == 3


def test_a_pass_that_breaks_fails_its_batch_and_the_engine_goes_on(tiny_bundle):
    with open_toy_engine(tiny_bundle) as engine:
        expected = engine.generate("One", max_new_tokens=5)
        stream = engine.stream("One", max_new_tokens=200, ignore_eos=True)
        next(stream)
        engine.backend.error = MemoryError("no room")
        with pytest.raises(MemoryError, match="no room"):
            list(stream)
        assert list(stream) == []
        assert engine.num_running == 0
        assert engine.generate("One", max_new_tokens=5).token_ids == expected.token_ids


def test_a_cache_that_cannot_be_had_fails_its_requests_alone(tiny_bundle, monkeypatch):
    with open_toy_engine(tiny_bundle) as engine:
        allocate = engine.backend.allocate

        def refuse_once(batch, sizing):
            monkeypatch.setattr(engine.backend, "allocate", allocate)
            raise MemoryError("no room for a cache")

        monkeypatch.setattr(engine.backend, "allocate", refuse_once)
        with pytest.raises(MemoryError, match="no room for a cache"):
            engine.generate("One", max_new_tokens=3)
        assert len(engine.generate("One", max_new_tokens=3).token_ids) == 3
        assert engine.num_running == 0


def test_a_forked_process_is_told_to_open_the_bundle_itself(tiny_bundle):
    with open_toy_engine(tiny_bundle) as engine:
        engine.generate("One", max_new_tokens=1)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                engine.generate("One", max_new_tokens=1)
                os.write(writer, b"it ran")
            except UsageError as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        message = os.read(reader, 1000).decode()
        os.close(reader)
        os.close(writer)

    assert "does not survive that; open the bundle in the new process" in message


def test_a_long_prompt_is_read_beside_the_steps_of_others(tiny_bundle):
    kinds = []
    policy = BlockPolicy(prefill_chunk=8)
    with open_toy_engine(
        tiny_bundle, policy=policy, observer=lambda event: kinds.append(event.kind)
    ) as engine:
        running = engine.stream("One", max_new_tokens=200, ignore_eos=True)
        next(running)
        engine.backend.close_gate()
        assert engine.backend.at_gate.wait(60)
        kinds.clear()
        long = engine.stream(PROMPTS[2], max_new_tokens=2)
        engine.backend.gate.set()
        list(long)
        running.close()

    reading = kinds[kinds.index(PassKind.PREFILL) :]
    num_chunks = reading.count(PassKind.PREFILL)
    assert num_chunks > 5
    assert reading[: 2 * num_chunks : 2] == [PassKind.PREFILL] * num_chunks
    assert reading[1 : 2 * num_chunks : 2] == [PassKind.STEP] * num_chunks


def test_events_add_up(tiny_bundle, requests):
    events = []
    with open_toy_engine(tiny_bundle, max_batch=3, observer=events.append) as engine:
        results = engine.generate([p for p, _ in requests], [params for _, params in requests])
        stream = engine.stream("One", max_new_tokens=200, ignore_eos=True)
        chunk = next(stream)
        stream.close()
        cancelled = stream.result

    stats = [result.stats for result in (*results, cancelled)]
    assert chunk.token_ids == cancelled.token_ids[: len(chunk.token_ids)]
    assert sum(event.new_tokens for event in events) == sum(s.new_tokens for s in stats)
    assert sum(event.rows for event in events) == sum(s.rows for s in stats)
    assert sum(event.padding_rows for event in events) == sum(s.padding_rows for s in stats)
    assert sum(event.accepted for event in events) == sum(sum(s.accepted) for s in stats)
    finished = sorted(reason for event in events for reason in event.finished)
    assert finished == sorted(r.finish_reason for r in (*results, cancelled))
    assert max(event.sequences for event in events) == 3
    assert all(event.failed == 0 and event.seconds >= 0 for event in events)
    assert events[-1].kind is PassKind.NONE
    assert (events[-1].running, events[-1].waiting) == (0, 0)


def test_finished_sequences_cost_no_more(tiny_bundle):
    """Rows computed are those of the unfinished ones, pass by pass."""
    events = []
    params = [SamplingParams(k=0, max_new_tokens=n, ignore_eos=True) for n in (2, 5, 9)]
    with open_toy_engine(tiny_bundle, observer=events.append) as engine:
        engine.generate([[7], [8], [9]], params)

    steps = [event for event in events if event.kind is PassKind.STEP]
    assert [event.sequences for event in steps] == [3, 2, 2, 2, 1, 1, 1, 1]
    assert all(event.rows + event.padding_rows == event.sequences for event in steps)


def test_an_observer_that_fails_is_dropped_and_logged(tiny_bundle, caplog):
    calls = []

    def fail(event):
        calls.append(event)
        raise RuntimeError("no metrics")

    with (
        caplog.at_level(logging.ERROR),
        open_toy_engine(tiny_bundle, observer=fail) as engine,
    ):
        assert len(engine.generate("One", max_new_tokens=4).token_ids) == 4

    assert len(calls) == 1
    assert "the observer failed; it is not called again" in caplog.text


def test_samples_are_those_of_their_seeds_and_read_the_prompt_once(tiny_bundle):
    events = []
    prompt = PROMPTS[2]
    params = SamplingParams(n=5, temperature=1.0, seed=7, max_new_tokens=9, logprobs=1, stop="a")
    with open_toy_engine(tiny_bundle, observer=events.append) as engine:
        prompt_len = len(engine.encode(prompt))
        result = engine.generate(prompt, params)
        rows = sum(event.rows for event in events if event.kind is PassKind.PREFILL)
        singles = [
            engine.generate(prompt, replace(params, n=1, seed=7 + sample)) for sample in range(5)
        ]
        several = engine.generate([prompt, "One"], [params, replace(params, n=2)])

    assert rows == prompt_len - 1 + 5 * (1 + 4)
    assert [essence(sample) for sample in result.samples] == [essence(one) for one in singles]
    assert len({sample.token_ids for sample in result.samples}) > 1
    assert result.samples[0].others == ()
    assert essence(several[0]) == essence(result)
    assert [len(r.samples) for r in several] == [5, 2]


def test_impossible_samples_are_refused(tiny_bundle):
    with open_toy_engine(tiny_bundle, max_batch=2) as engine:
        with pytest.raises(UsageError, match="n must be at most the engine's max_batch, 2; got 3"):
            engine.generate("One", n=3, temperature=1.0)
        with pytest.raises(UsageError, match="a stream has one sample, got n = 2; use generate"):
            engine.stream("One", n=2, temperature=1.0)
        with pytest.raises(UsageError, match="one SamplingParams per prompt: got 1 for 2"):
            engine.generate(["One", "Two"], [SamplingParams()])
        with pytest.raises(UsageError, match="one prompt takes one SamplingParams"):
            engine.generate("One", [SamplingParams()])


def test_an_engine_is_the_same_after_warming_up(tiny_bundle):
    with open_toy_engine(tiny_bundle) as engine:
        before = engine.generate("One", max_new_tokens=5)
        passes = engine.backend.num_passes
        engine.warmup()
        assert engine.backend.num_passes > passes
        assert essence(engine.generate("One", max_new_tokens=5)) == essence(before)
        assert engine.num_running == 0


def test_other_threads_run_while_a_pass_runs(engine):
    """ONNX Runtime holds no interpreter lock: Python counts on while it computes."""
    counted, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1

    session = engine.backend.session
    advances = []

    class Watched:
        def __getattr__(self, name):
            return getattr(session, name)

        def run_with_iobinding(self, *arguments):
            before = counted[0]
            session.run_with_iobinding(*arguments)
            advances.append(counted[0] - before)

    thread = threading.Thread(target=count)
    thread.start()
    engine.backend.session = Watched()
    try:
        for _ in range(200):
            engine.generate([5] * 200, max_new_tokens=1)
            if sum(advance > 100 for advance in advances) >= 3:
                break
    finally:
        engine.backend.session = session
        stop.set()
        thread.join()

    assert sum(advance > 100 for advance in advances) >= 3


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, asyncio.CancelledError])
def test_whatever_a_processor_raises_ends_its_own_request(tiny_bundle, error):
    def fail(token_ids, scores):
        raise error("gone")

    with open_toy_engine(tiny_bundle) as engine:
        running = engine.stream("One", max_new_tokens=100, ignore_eos=True)
        next(running)
        with pytest.raises(LookaheadError, match=f"a logits processor failed.*{error.__name__}"):
            engine.generate("Two", logits_processors=(fail,))
        assert sum(len(chunk.token_ids) for chunk in running) > 50


def test_an_observer_may_raise_anything(tiny_bundle):
    def fail(event):
        raise SystemExit

    with open_toy_engine(tiny_bundle, observer=fail) as engine:
        assert len(engine.generate("One", max_new_tokens=3).token_ids) == 3


def test_a_call_fails_as_soon_as_one_of_its_prompts_does(tiny_bundle):
    """The first prompt would go on behind a closed gate."""

    def fail(token_ids, scores):
        raise RuntimeError("no grammar")

    def close_gate(event):
        if event.failed:
            engine.backend.close_gate()

    params = [
        SamplingParams(max_new_tokens=200, ignore_eos=True),
        SamplingParams(logits_processors=(fail,)),
    ]
    with open_toy_engine(tiny_bundle, observer=close_gate) as engine:
        with pytest.raises(LookaheadError, match="no grammar"):
            engine.generate(["slow", "failing"], params)
        assert engine.num_running == 1, "the other one was not waited for"
        engine.backend.gate.set()


@pytest.mark.parametrize("is_conversation", [False, True])
def test_caches_that_cannot_be_joined_fail_the_newcomers_alone(
    tiny_bundle, monkeypatch, is_conversation
):
    def refuse(cache, other):
        raise MemoryError("no room to join")

    with open_toy_engine(tiny_bundle) as engine:
        running = engine.stream("One", max_new_tokens=60, ignore_eos=True)
        next(running)
        engine.backend.close_gate()
        assert engine.backend.at_gate.wait(60)
        with monkeypatch.context() as patched:
            patched.setattr("la_runtime.backends.fake._FakeCache.absorb", refuse)
            conversation = engine.start()
            stream = (
                conversation.stream("Two", max_new_tokens=9, ignore_eos=True)
                if is_conversation
                else engine.stream("Two", max_new_tokens=9, ignore_eos=True)
            )
            engine.backend.gate.set()
            with pytest.raises(MemoryError, match="no room to join"):
                list(stream)
        assert sum(len(chunk.token_ids) for chunk in running) > 50
        assert len(engine.generate("One", max_new_tokens=3).token_ids) == 3


def test_when_the_worker_breaks_down_everybody_is_told(tiny_bundle, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    engine = open_toy_engine(tiny_bundle, max_batch=1)
    engine.backend.close_gate()
    running = engine.stream("One", max_new_tokens=60)
    assert engine.backend.at_gate.wait(60)
    waiting = engine.stream("Two", max_new_tokens=60)

    def break_down(*arguments):
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine._scheduler, "_drop_cancelled", break_down)
    engine.backend.gate.set()
    for stream in (running, waiting):
        with pytest.raises(LookaheadError, match="the engine stopped: RuntimeError: a bug"):
            list(stream)
    with pytest.raises(UsageError, match="the engine is closed"):
        engine.generate("One")
    engine.close()


def test_the_engine_cannot_wait_for_itself(tiny_bundle):
    def ask(token_ids, scores):
        engine.generate("Two")

    refused = []

    def close(event):
        with pytest.raises(UsageError, match="or observer asks for the closing of the engine") as e:
            engine.close()
        refused.append(e)

    with open_toy_engine(tiny_bundle, observer=close) as engine:
        with pytest.raises(LookaheadError, match="a generation of the engine that runs it"):
            engine.generate("One", logits_processors=(ask,))
        assert len(engine.generate("One", max_new_tokens=2).token_ids) == 2
    assert refused


def test_several_threads_may_close_an_engine_at_once(tiny_bundle):
    engines = [open_toy_engine(tiny_bundle, max_batch=2) for _ in range(5)]
    streams = [
        engine.stream("One", max_new_tokens=200, ignore_eos=True)
        for engine in engines
        for _ in range(4)
    ]
    next(streams[0])
    with ThreadPoolExecutor(15) as threads:
        list(threads.map(lambda engine: engine.close(), engines * 3))
    for stream in streams:
        assert list(stream)[-1].finish_reason is FinishReason.CANCELLED


def test_metrics_hear_of_every_request(tiny_bundle):
    events = []
    engine = open_toy_engine(tiny_bundle, max_batch=1, observer=events.append)
    engine.backend.error = MemoryError("no room")
    with pytest.raises(MemoryError):
        engine.generate("One")
    running = engine.stream("One", max_new_tokens=200, ignore_eos=True)
    waiting = engine.stream("Two", max_new_tokens=200, ignore_eos=True)
    next(running)
    engine.close()

    assert sum(event.failed for event in events) == 1
    assert sum(len(event.finished) for event in events) == 2
    assert list(waiting)[-1].finish_reason is FinishReason.CANCELLED


def test_an_observer_may_own_the_engine(tiny_bundle):
    class Service:
        def __init__(self):
            self.tokens = 0
            self.engine = open_toy_engine(tiny_bundle, observer=self.count)

        def count(self, event):
            self.tokens += event.new_tokens

    service = Service()
    assert len(service.engine.generate("One", max_new_tokens=4).token_ids) == service.tokens == 4
    thread = service.engine._scheduler._thread
    del service
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_times_of_what_never_ran_stand_still(tiny_bundle):
    with open_toy_engine(tiny_bundle, max_batch=1) as engine:
        engine.backend.close_gate()
        running = engine.stream("One", max_new_tokens=2)
        assert engine.backend.at_gate.wait(60)
        waiting = engine.stream("Two")
        waiting.close()
        engine.backend.gate.set()
        list(running)
        assert waiting.result.stats == waiting.result.stats


@pytest.mark.parametrize("is_closed", [False, True])
def test_nobody_waits_for_ever_if_a_text_breaks_at_its_end(tiny_bundle, monkeypatch, is_closed):
    """Each is told, and the engine goes on."""

    def break_down(text):
        raise AssertionError("a token changed the text before it")

    engine = open_toy_engine(tiny_bundle, max_batch=2)
    engine.backend.close_gate()
    streams = [
        engine.stream("One", max_new_tokens=60 if is_closed else 3, ignore_eos=True)
        for _ in range(4)
    ]
    assert engine.backend.at_gate.wait(60)
    monkeypatch.setattr("la_runtime.text.GeneratedText.finish", break_down)
    if is_closed:
        engine._scheduler.begin_to_close()
    engine.backend.gate.set()
    for stream in streams:
        with pytest.raises(AssertionError, match="a token changed the text before it"):
            list(stream)
    monkeypatch.undo()
    if not is_closed:
        assert len(engine.generate("One", max_new_tokens=3).token_ids) == 3
    engine.close()
