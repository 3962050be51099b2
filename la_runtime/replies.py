"""From the worker that decodes to the caller that waits: whole results, and streams of chunks.

A `Reply` is filled by the engine's worker thread. Callers wait for its end, or read its chunks as
they come, in a thread (`GenerationStream`) or in an event loop (`AsyncGenerationStream`).
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from la_runtime.errors import UsageError
from la_runtime.results import Chunk, GenerationResult, TokenLogprobs
from la_runtime.scheduler import Job, Scheduler
from la_runtime.sequence import StepResult, TokenSequence
from la_runtime.stopping import FinishReason
from la_runtime.text import GeneratedText

__all__ = [
    "AsyncGenerationStream",
    "Delivery",
    "GenerationStream",
    "Reply",
    "deliver_nowhere",
    "do_nothing",
]

Item: TypeAlias = "Chunk | Exception"
Delivery: TypeAlias = Callable[[Item], None]


def deliver_nowhere(item: Item) -> None:
    """For callers that wait for the end."""


def do_nothing() -> None:
    """For callers that read chunks."""


class Reply:
    """What the samples of one prompt have given so far.

    Args:
        texts: per sample its sequence and the text it becomes.
        deliver: gets every chunk, or the error that ended it, in the worker's thread.
        on_ended: called by that thread when nothing more will come.
    """

    def __init__(
        self,
        texts: Mapping[TokenSequence, GeneratedText],
        deliver: Delivery = deliver_nowhere,
        on_ended: Callable[[], None] = do_nothing,
    ) -> None:
        self.job: Job | None = None
        self._texts = dict(texts)
        self._pieces: dict[TokenSequence, list[str]] = {sequence: [] for sequence in texts}
        self._deliver = deliver
        self._on_ended = on_ended
        self._num_open = len(self._texts)
        self._ended = threading.Event()
        self._error: Exception | None = None

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """Its samples, in order."""
        return tuple(self._texts)

    @property
    def is_ended(self) -> bool:
        """Whether nothing more will come."""
        return self._ended.is_set()

    def hear(self, sequence: TokenSequence, result: StepResult) -> None:
        """See `scheduler.Hearer`."""
        text = self._texts[sequence]
        if result.finish_reason is not None:
            text.finish()
        piece = text.take()
        self._pieces[sequence].append(piece)
        chunk = Chunk(
            text=piece,
            token_ids=result.token_ids,
            accepted=result.accepted,
            finish_reason=result.finish_reason,
        )
        if result.finish_reason is not None:
            self._close_one()
        self._deliver(chunk)

    def fail(self, sequence: TokenSequence, error: Exception) -> None:
        """See `scheduler.Hearer`; the other samples are of no use then."""
        self._error = self._error or error
        if self.job is not None:
            self.job.is_cancelled = True
        self._close_one()
        self._deliver(error)

    def _close_one(self) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self._ended.set()
            self._on_ended()

    def wait(self) -> Exception | None:
        """Wait for the end; the error that made it, if any."""
        self._ended.wait()
        return self._error

    def result(self) -> GenerationResult:
        """The generation; waits for its end.

        Raises:
            LookaheadError: it failed.
        """
        error = self.wait()
        if error is not None:
            raise error
        first, *others = [self._result_of(sequence) for sequence in self._texts]
        return replace(first, others=tuple(others))

    def _result_of(self, sequence: TokenSequence) -> GenerationResult:
        assert sequence.finish_reason is not None, "it has ended"
        return GenerationResult(
            text="".join(self._pieces[sequence]),
            token_ids=sequence.new_token_ids,
            finish_reason=sequence.finish_reason,
            stats=sequence.stats(),
            logprobs=TokenLogprobs.of(sequence.choices),
        )


class _Stream:
    """What both kinds of stream share."""

    def __init__(
        self,
        scheduler: Scheduler,
        reply: Reply,
        on_end: Callable[[GenerationResult], None] | None,
        engine: object,
    ) -> None:
        self._is_over = False
        self._engine = engine  # as long as it is read, the engine lives
        self._scheduler = scheduler
        self._reply = reply
        self._on_end = on_end

    def _take(self, item: Item) -> Chunk:
        if isinstance(item, Exception):
            self._is_over = True
            self._on_end = None
            raise item
        if item.finish_reason is not None:
            self._is_over = True
            self._tell_end()
        return item

    def _cancel(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._reply.job is not None:
            self._scheduler.cancel(self._reply.job)

    def _tell_end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None and self._reply.wait() is None:
            on_end(self._reply.result())

    def __del__(self) -> None:
        if not self._is_over:
            self._cancel()


class GenerationStream(_Stream):
    """Chunks of one generation, one per step, as an iterator.

    A context manager: leaving it, or `close`, cancels the generation if it has not ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        reply: Reply,
        items: queue.SimpleQueue[Item],
        *,
        engine: object,
        on_end: Callable[[GenerationResult], None] | None = None,
    ) -> None:
        super().__init__(scheduler, reply, on_end, engine)
        self._items = items

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if self._is_over:
            raise StopIteration
        return self._take(self._items.get())

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while there is more to read, and when it failed."""
        if not self._is_over or self._reply.wait() is not None:
            return None
        return self._reply.result().finish_reason

    @property
    def result(self) -> GenerationResult:
        """The whole generation; what there was of it if it was closed before its end.

        Waits for the pass under way if the stream was just closed.

        Raises:
            UsageError: it has not finished.
            LookaheadError: it failed.
        """
        if not self._is_over:
            raise UsageError("the stream has not finished; read it to its end or close it first")
        return self._reply.result()

    def close(self) -> None:
        """Cancel the generation if it has not ended; its cache is released within one step."""
        self._cancel()
        self._tell_end()


class AsyncGenerationStream(_Stream):
    """The same for an event loop: an asynchronous iterator and context manager.

    A task that is cancelled while it waits for a chunk cancels the generation with it. Nothing
    here blocks the loop.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        reply: Reply,
        items: asyncio.Queue[Item],
        ended: asyncio.Event,
        *,
        engine: object,
    ) -> None:
        super().__init__(scheduler, reply, None, engine)
        self._items = items
        self._ended = ended

    async def __aenter__(self) -> AsyncGenerationStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._cancel()

    def __aiter__(self) -> AsyncGenerationStream:
        return self

    async def __anext__(self) -> Chunk:
        if self._is_over:
            raise StopAsyncIteration
        try:
            item = await self._items.get()
        except BaseException:
            self._cancel()
            raise
        return self._take(item)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while there is more to read or to end, and when it failed."""
        if not (self._is_over and self._reply.is_ended) or self._reply.wait() is not None:
            return None
        return self._reply.result().finish_reason

    @property
    def result(self) -> GenerationResult:
        """The whole generation; what there was of it if it was closed before its end.

        Raises:
            UsageError: it has not ended.
            LookaheadError: it failed.
        """
        if not (self._is_over and self._reply.is_ended):
            raise UsageError("the stream has not ended; read it to its end or await its aclose()")
        return self._reply.result()

    def close(self) -> None:
        """Cancel the generation if it has not ended; its cache is released within one step."""
        self._cancel()

    async def aclose(self) -> None:
        """The same, and wait until it has ended: at most the pass under way."""
        self._cancel()
        await self._ended.wait()
