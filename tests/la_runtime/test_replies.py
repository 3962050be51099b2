"""Streams for event loops: the same chunks, cancelled with their task."""

from __future__ import annotations

import asyncio
import gc

import pytest

from la_runtime.errors import LookaheadError, QueueFullError, UsageError
from la_runtime.stopping import FinishReason
from tests.la_runtime.toy_engine import open_toy_engine

PROMPT = "The cat sat on the mat"
ENDLESS = {"max_new_tokens": 200, "ignore_eos": True}


@pytest.fixture
def toy(tiny_bundle):
    with open_toy_engine(tiny_bundle) as engine:
        yield engine


def test_an_asynchronous_stream_gives_the_chunks_of_the_other(toy):
    async def read():
        async with toy.astream(PROMPT, max_new_tokens=20, stop="e") as stream:
            chunks = [chunk async for chunk in stream]
            assert [chunk async for chunk in stream] == []
            return chunks, stream.result

    chunks, result = asyncio.run(read())
    with toy.stream(PROMPT, max_new_tokens=20, stop="e") as stream:
        assert chunks == list(stream)
    assert (result.text, result.token_ids) == (stream.result.text, stream.result.token_ids)


def test_many_tasks_share_the_engine(toy):
    async def ask_all():
        return await asyncio.gather(
            *(toy.agenerate(PROMPT + str(i), max_new_tokens=10, k=i % 5) for i in range(20))
        )

    for index, result in enumerate(asyncio.run(ask_all())):
        expected = toy.generate(PROMPT + str(index), max_new_tokens=10, k=0)
        assert result.token_ids == expected.token_ids


def test_samples_can_be_awaited(toy):
    found = asyncio.run(toy.agenerate(PROMPT, n=3, temperature=1.0, max_new_tokens=8))

    expected = toy.generate(PROMPT, n=3, temperature=1.0, max_new_tokens=8)
    assert [s.token_ids for s in found.samples] == [s.token_ids for s in expected.samples]


@pytest.mark.parametrize("method", ["astream", "agenerate"])
def test_cancelling_a_task_cancels_its_generation_within_one_pass(toy, method):
    ended = []

    async def main():
        toy._scheduler._observer = lambda event: ended.extend(event.finished)

        async def consume():
            if method == "agenerate":
                await toy.agenerate(PROMPT, **ENDLESS)
            else:
                async with toy.astream(PROMPT, **ENDLESS) as stream:
                    async for _ in stream:
                        pass

        toy.backend.close_gate()
        task = asyncio.create_task(consume())
        while not toy.backend.at_gate.is_set():
            await asyncio.sleep(0)
        before = toy.backend.num_passes
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        toy.backend.gate.set()
        while toy.num_running:
            await asyncio.sleep(0)
        assert toy.backend.num_passes <= before + 1

    asyncio.run(main())
    toy.generate(PROMPT, max_new_tokens=1)
    assert ended[0] is FinishReason.CANCELLED


def test_leaving_a_stream_early_cancels_it(toy):
    async def main():
        async with toy.astream(PROMPT, **ENDLESS) as stream:
            async for _ in stream:
                break
        await stream.aclose()
        assert stream.finish_reason is stream.result.finish_reason is FinishReason.CANCELLED
        forgotten = toy.astream(PROMPT, **ENDLESS)
        async for _ in forgotten:
            break
        del forgotten
        gc.collect()
        while toy.num_running:
            await asyncio.sleep(0)
        closed = toy.astream(PROMPT, **ENDLESS)
        await closed.aclose()
        assert closed.finish_reason is FinishReason.CANCELLED

    asyncio.run(main())


def test_a_stream_that_has_not_ended_never_blocks_the_loop(toy):
    async def main():
        toy.backend.close_gate()
        stream = toy.astream(PROMPT, **ENDLESS)
        while not toy.backend.at_gate.is_set():
            await asyncio.sleep(0)
        stream.close()
        assert stream.finish_reason is None, "its pass is under way"
        with pytest.raises(UsageError, match=r"has not ended; .* await its aclose"):
            _ = stream.result
        closing = asyncio.create_task(stream.aclose())
        await asyncio.sleep(0)
        assert not closing.done()
        toy.backend.gate.set()
        await closing
        assert stream.result.finish_reason is FinishReason.CANCELLED

    asyncio.run(main())


def test_a_stream_keeps_its_engine_alive(tiny_bundle):
    def open_stream():
        return open_toy_engine(tiny_bundle).stream(PROMPT, max_new_tokens=9, ignore_eos=True)

    stream = open_stream()
    gc.collect()
    assert sum(len(chunk.token_ids) for chunk in stream) == 9


def test_errors_reach_the_task(toy):
    def fail(token_ids, scores):
        raise RuntimeError("no grammar")

    async def main():
        with pytest.raises(LookaheadError, match="no grammar"):
            await toy.agenerate(PROMPT, logits_processors=(fail,))
        stream = toy.astream(PROMPT, logits_processors=(fail,))
        with pytest.raises(LookaheadError, match="no grammar"):
            [chunk async for chunk in stream]
        assert stream.finish_reason is None
        with pytest.raises(UsageError, match="the prompt is empty"):
            toy.astream("")
        with pytest.raises(UsageError, match="a stream has one sample"):
            toy.astream(PROMPT, n=2, temperature=1.0)

    asyncio.run(main())


def test_a_full_queue_is_known_before_the_first_chunk(tiny_bundle):
    async def main(engine):
        engine.backend.close_gate()
        streams = [engine.astream(PROMPT, max_new_tokens=2)]
        while not engine.backend.at_gate.is_set():
            await asyncio.sleep(0)
        streams.append(engine.astream(PROMPT, max_new_tokens=2))
        with pytest.raises(QueueFullError, match="the queue is full: 1 waiting"):
            engine.astream(PROMPT)
        engine.backend.gate.set()
        for stream in streams:
            assert [chunk async for chunk in stream][-1].finish_reason is not None

    with open_toy_engine(tiny_bundle, max_batch=1, max_queue=1) as engine:
        asyncio.run(main(engine))


def test_a_loop_that_is_gone_harms_nobody(toy):
    async def main():
        return toy.astream(PROMPT, max_new_tokens=150, ignore_eos=True)

    toy.backend.close_gate()
    stream = asyncio.run(main())
    toy.backend.gate.set()

    assert len(toy.generate(PROMPT, max_new_tokens=4).token_ids) == 4
    stream._cancel()
