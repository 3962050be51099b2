"""A chat whose cache stays: every turn reads only what the cache does not hold yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Unpack

from la_runtime.backends.base import CacheState
from la_runtime.errors import UsageError
from la_runtime.prompts import Message, Prompt
from la_runtime.replies import GenerationStream, Reply
from la_runtime.requests import RequestOptions
from la_runtime.results import GenerationResult
from la_runtime.sampling import SamplingParams
from la_runtime.sequence import TokenSequence

__all__ = ["Conversation", "KeptCache", "OpenStream"]


class KeptCache:
    """The cache of a conversation between two turns, and the tokens it holds."""

    def __init__(self) -> None:
        self.state: CacheState | None = None
        self.token_ids: tuple[int, ...] = ()
        self._turn: TokenSequence | None = None
        self._reply: Reply | None = None

    def lend(self, sequence: TokenSequence, reply: Reply) -> CacheState | None:
        """Hand the cache to a turn, cut to the longest prefix that it shares with the prompt.

        The last token of the prompt is never taken from the cache: its scores are wanted.

        Raises:
            UsageError: another turn has it.
        """
        if self._reply is not None and self._reply.job is not None and self._reply.job.is_cancelled:
            self._reply.wait()  # at most the pass under way
        self.take_back()
        if self._turn is not None:
            raise UsageError("the conversation is busy; wait for its turn to end, or close it")
        shared = 0
        for cached, token in zip(self.token_ids, sequence.token_ids[:-1], strict=False):
            if cached != token:
                break
            shared += 1
        state, self.state, self.token_ids = self.state, None, ()
        self._turn, self._reply = sequence, reply
        sequence.keeps_cache = True
        if state is not None:
            state.truncate([shared])
            sequence.resume(shared)
        return state

    def give_up(self, state: CacheState | None) -> None:
        """The turn did not come about: the cache, as cut by `lend`, is back."""
        assert self._turn is not None, "lent before"
        self.state = state
        self.token_ids = tuple(self._turn.token_ids[: self._turn.num_cached])
        self._turn = self._reply = None

    def take_back(self) -> None:
        """Have the cache again if the turn has ended; it is lost if the turn failed."""
        turn = self._turn
        if turn is None or not turn.is_over:
            return
        self._turn = self._reply = None
        if turn.kept_cache is not None:
            self.state = turn.kept_cache
            self.token_ids = tuple(turn.token_ids[: turn.num_cached])

    def close(self) -> None:
        """Release the cache, or have a turn that runs release it at its end."""
        if self._turn is not None:
            self._turn.keeps_cache = False
        self.take_back()
        if self.state is not None:
            self.state.close()
        self.state, self.token_ids = None, ()


class OpenStream(Protocol):
    """Begins a turn; an engine's."""

    def __call__(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions,
        *,
        chat: bool,
        cache: KeptCache,
        on_end: Callable[[GenerationResult], None] | None,
    ) -> GenerationStream:
        """The stream of its chunks."""
        ...


class Conversation:
    """Turns over one cache. Made by `Engine.start`; a context manager that releases the cache.

    A turn gives what it would give without the cache (near-ties apart, as between any two passes
    of different widths); it only takes less time. One turn at a time.
    """

    def __init__(self, open_stream: OpenStream, messages: Sequence[Message] = ()) -> None:
        self._open_stream = open_stream
        self._cache = KeptCache()
        self._is_closed = False
        self.messages: list[Message] = list(messages)

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the cache. A turn that runs is not ended by it."""
        self._is_closed = True
        self._cache.close()

    @property
    def num_cached(self) -> int:
        """Tokens that the cache holds between two turns."""
        self._cache.take_back()
        return len(self._cache.token_ids)

    def send(
        self, content: str, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> GenerationResult:
        """Say something and wait for the answer; both become part of `messages`.

        Raises:
            UsageError: an option is out of range, a turn is running, or there is no template.
            LookaheadError: the turn failed; `messages` are as before.
        """
        with self.stream(content, params, **options) as stream:
            for _ in stream:
                pass
            return stream.result

    def stream(
        self, content: str, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> GenerationStream:
        """The same, a chunk per step. What was said until the stream ends or is closed counts."""
        messages = [*self.messages, {"role": "user", "content": content}]

        def remember(result: GenerationResult) -> None:
            self.messages = [*messages, {"role": "assistant", "content": result.text}]

        return self._start(messages, params, options, chat=False, on_end=remember)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool = False,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult:
        """Generate from a whole prompt of any kind, reading only what the cache does not hold.

        `messages` stay as they are.

        Raises:
            UsageError: the prompt or an option is out of range, or a turn is running.
            LookaheadError: the turn failed.
        """
        with self._start(prompt, params, options, chat=chat, on_end=None) as stream:
            for _ in stream:
                pass
            return stream.result

    def _start(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions,
        *,
        chat: bool,
        on_end: Callable[[GenerationResult], None] | None,
    ) -> GenerationStream:
        if self._is_closed:
            raise UsageError("the conversation is closed; start another with engine.start()")
        return self._open_stream(
            prompt, params, options, chat=chat, cache=self._cache, on_end=on_end
        )
