"""Text in, text out: the engine over a bundle.

Turns prompts into token ids, lets its scheduler decode them, and turns tokens back into text as
they come. It does not know how tokens are chosen.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final, Unpack, cast, overload

import numpy as np

from la_runtime.backends import check_backend, open_backend, read_processor
from la_runtime.backends.availability import check_precision
from la_runtime.backends.base import Backend
from la_runtime.batch import BlockPolicy
from la_runtime.bundle import Bundle, open_bundle
from la_runtime.calibration import measure_costs
from la_runtime.certificate import check_certificate, read_backend_version
from la_runtime.chat import ChatTemplate
from la_runtime.conversation import Conversation, KeptCache
from la_runtime.decoder import (
    DEFAULT_EPSILON,
    LARGEST_EPSILON,
    MOST_PLANNED_ROWS,
    Decoder,
    Decoding,
)
from la_runtime.digests import DigestCheck
from la_runtime.errors import UsageError
from la_runtime.prompts import Message, Prompt, as_lists, is_messages, is_single
from la_runtime.replies import (
    AsyncGenerationStream,
    Delivery,
    GenerationStream,
    Reply,
    deliver_nowhere,
    do_nothing,
)
from la_runtime.requests import RequestOptions
from la_runtime.results import GenerationResult
from la_runtime.sampling import SamplingParams, Select
from la_runtime.scheduler import DEFAULT_MAX_QUEUE, Job, Observer, Scheduler
from la_runtime.sequence import StepResult, TokenSequence
from la_runtime.source_names import SourceName
from la_runtime.stats import GenerationStats, StepEvent
from la_runtime.step_costs import ASSUMED_COSTS, StepCosts
from la_runtime.step_times import StepTimes
from la_runtime.text import GeneratedText
from la_runtime.tokenizer import Tokenizer

__all__ = ["DEFAULT_MAX_BATCH", "DecodeState", "Engine"]

DEFAULT_MAX_BATCH: Final = 8
_MOST_THREADS: Final = 1024
_WARM_UP_PROMPT: Final = 16
_WARM_UP_TOKENS: Final = 3

logger = logging.getLogger(__name__)


class DecodeState:
    """One sequence at the level of single passes. A context manager that releases its cache.

    `first` is the result of prefill: the sequence's first token.
    """

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        ((_, self.first),) = decoding.prefill()
        self.finish_reason = self.first.finish_reason

    def __enter__(self) -> DecodeState:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every token emitted so far, the first included."""
        return self._decoding.token_ids(0)

    @property
    def stats(self) -> GenerationStats:
        """Counts and times so far."""
        return self._decoding.stats(0)

    def step(self) -> StepResult:
        """Run one pass.

        Raises:
            UsageError: the sequence has finished.
        """
        if self.finish_reason is not None:
            raise UsageError(f"the sequence has finished ({self.finish_reason}); start another")
        ((_, result),) = self._decoding.step()
        self.finish_reason = result.finish_reason
        return result

    def close(self) -> None:
        """Release the cache."""
        self._decoding.close()


class Engine:
    """A bundle opened on a backend. Open it with `Engine.open`; it is a context manager.

    Any number of threads may use one engine. Their requests wait in one queue, first come first
    served, and are decoded together by a thread of the engine's, at most `max_batch` sequences at
    a time; a sequence joins and leaves between two passes. What a request gives does not depend
    on the others, but for near-ties: a pass of another width sums in another order. An engine
    opened with `fixed_width` decodes one sequence at a time, and nothing changes its result.
    """

    def __init__(
        self,
        bundle: Bundle,
        backend: Backend,
        *,
        k: int,
        max_batch: int = DEFAULT_MAX_BATCH,
        max_queue: int = DEFAULT_MAX_QUEUE,
        policy: BlockPolicy | None = None,
        observer: Observer | None = None,
        epsilon: float = DEFAULT_EPSILON,
        sources: tuple[SourceName, ...] | None = None,
        costs: StepCosts = ASSUMED_COSTS,
    ) -> None:
        model = bundle.manifest.model
        self.bundle = bundle
        self.backend = backend
        self.k = k
        self.sources = sources
        self.tokenizer = Tokenizer.load(bundle.root)
        self._decoder = Decoder(
            backend,
            context=model.context,
            eos_token_ids=model.eos_token_ids,
            group_mask=bundle.manifest.lookahead.group_mask,
            epsilon=epsilon,
            costs=costs,
            most_rows=_most_planned_rows(policy),
            is_tuned=bundle.manifest.lookahead.is_tuned,
        )
        self._policy = policy or self._decoder.default_policy
        self._scratch = self._decoder.make_scratch()
        self._scheduler = Scheduler(
            self._decoder,
            self._policy,
            max_batch=max_batch,
            max_queue=max_queue,
            observer=None if observer is None else _weakly(self, observer),
        )
        self._observer = observer
        # An engine that is never closed ends its thread all the same, at the latest on exit.
        weakref.finalize(self, _close_from_anywhere, self._scheduler)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        backend: str = "ort-cpu",
        k: int | None = None,
        threads: int = 0,
        max_batch: int | None = None,
        max_queue: int = DEFAULT_MAX_QUEUE,
        fixed_width: int | None = None,
        digests: DigestCheck | str = DigestCheck.FULL,
        require_certificate: bool = False,
        observer: Observer | None = None,
    ) -> Engine:
        """Open a bundle.

        Args:
            path: the bundle's folder.
            backend: what runs the graph.
            k: lookahead length of requests that name none. None takes the largest built as the
                most that slots may be, and lets requests that name neither k, layout nor sources
                have drafts of every source, as many as pay, see `SamplingParams`. A backend that
                runs plans opens the one for this k, and requests may ask for no more.
            threads: threads for one pass; 0 lets the backend choose.
            max_batch: most sequences decoded together, 8 by default or as many as the backend
                takes; further prompts wait.
            max_queue: most calls that may wait for their turn.
            fixed_width: pad every pass to this width, see `BlockPolicy.fixed_width`; one sequence
                is decoded at a time.
            digests: how file digests are checked.
            require_certificate: refuse a bundle that `la-export verify` has not certified for this
                backend. Another library version, processor or number of threads is logged as a
                warning.
            observer: called with a `StepEvent` after every pass, in the engine's thread.

        Raises:
            UsageError: no bundle there, or an argument out of range.
            BundleError: the bundle is damaged, incomplete or of a newer version.
            CertificateError: a certificate is required and there is none, or it does not fit.
            HostError: the backend's library is missing.
        """
        threads = _check_int("threads", threads, at_least=0)
        if threads > _MOST_THREADS:
            raise UsageError(f"threads must be at most {_MOST_THREADS}, got {threads}")
        if max_batch is not None:
            max_batch = _check_int("max_batch", max_batch, at_least=1)
        if fixed_width is not None:
            fixed_width = _check_int("fixed_width", fixed_width, at_least=1)
        if k is not None:
            k = _check_int("k", k, at_least=0)
        if fixed_width is not None and max_batch not in (None, 1):
            raise UsageError(
                f"an engine of fixed width decodes one sequence at a time, got max_batch "
                f"{max_batch}; leave max_batch out"
            )
        max_queue = _check_int("max_queue", max_queue, at_least=1)
        check_backend(backend)
        bundle = open_bundle(
            path,
            digests=_parse_digests(digests),
            check=lambda manifest: check_precision(backend, manifest.contract),
        )
        built = max(bundle.manifest.lookahead_lengths)
        chosen_k = built if k is None else k
        _check_k(chosen_k, built)
        k_max = bundle.manifest.contract.k_max
        policy = None if fixed_width is None else BlockPolicy.fixed_width(fixed_width, k_max=k_max)
        if require_certificate:
            _check_certificate(bundle, backend, threads)
        runner = open_backend(backend, bundle, threads=threads, k=chosen_k)
        try:
            if policy is not None:
                policy = policy.limited(runner.limits)
            largest_batch = _find_max_batch(
                max_batch or (None if fixed_width is None else 1), runner.limits.batch
            )
        except BaseException:
            runner.close()
            raise
        return cls(
            bundle,
            runner,
            k=chosen_k,
            max_batch=largest_batch,
            max_queue=max_queue,
            policy=policy,
            observer=observer,
            epsilon=_find_epsilon(bundle, backend),
            sources=tuple(SourceName) if k is None else None,
            costs=_find_costs(
                bundle, backend, threads, runner.widths if policy is None else policy.widths
            ),
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs or waits as cancelled after the pass under way, and release the backend.

        Raises:
            UsageError: a logits processor or the observer calls it.
        """
        try:
            self._scheduler.close()
        finally:
            self.backend.close()

    @property
    def epsilon(self) -> float:
        """Margin below which a `strict` request has a choice made again."""
        return self._decoder.epsilon

    @property
    def max_batch(self) -> int:
        """Most sequences decoded together."""
        return self._scheduler.max_batch

    @property
    def num_running(self) -> int:
        """Sequences that are being decoded."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Calls that wait for their turn."""
        return self._scheduler.num_waiting

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return ChatTemplate.load(self.bundle.root)

    def warmup(self) -> None:
        """Run a few tokens, so that the first request does not pay for what libraries do once."""
        params = SamplingParams(max_new_tokens=_WARM_UP_TOKENS, k=self.k, ignore_eos=True)
        prompt = [0] * min(_WARM_UP_PROMPT, self._decoder.context - 1)
        with self._decoder.start([prompt], [params], self._policy) as decoding:
            decoding.prefill()
            while not decoding.is_done:
                decoding.step()

    def calibrate(self) -> None:
        """Measure how long passes take here and now, for the plans of later requests.

        By default they follow what the manifest records of this backend, processor and number of
        threads, or of the nearest.

        Raises:
            UsageError: a request runs or waits; passes would be timed beside it.
        """
        busy = self.num_waiting + self.num_running  # a request goes from the one to the other
        if busy:
            raise UsageError(
                f"calibrate measures passes alone, and {busy} requests run or wait; call it before "
                "the first one"
            )
        self._decoder.costs = measure_costs(self.backend, context=self._decoder.context)

    def use_costs(self, costs: StepCosts) -> None:
        """Plan by times of passes that were measured elsewhere, or are assumed.

        Args:
            costs: for the requests that come from here on; they change no text.
        """
        self._decoder.costs = costs

    def encode(self, prompt: Prompt, *, chat: bool = False) -> tuple[int, ...]:
        """Token ids of a prompt.

        Args:
            prompt: text, token ids (returned as they are), or chat messages.
            chat: put text into the chat template as the user's message.

        Raises:
            UsageError: the prompt is empty, or the bundle has no chat template.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise UsageError("the prompt is empty; give at least one character")
            if not chat:
                return tuple(self.tokenizer.encode(prompt, add_special_tokens=True))
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, Sequence):
            raise UsageError(
                f"a prompt is text, token ids or chat messages, got {type(prompt).__name__}"
            )
        if is_messages(prompt):
            text = self._chat_template.render(
                cast("Sequence[Message]", prompt),
                add_generation_prompt=True,
                bos_token=self.tokenizer.bos_token,
                eos_token=self.tokenizer.eos_token,
            )
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        if chat:
            raise UsageError("chat wants text or messages, got token ids; leave chat out")
        return cast("tuple[int, ...]", tuple(prompt))

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool = False,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
        **options: Unpack[RequestOptions],
    ) -> list[GenerationResult]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult | list[GenerationResult]:
        """Generate from one prompt, or from several together.

        Args:
            prompt: text, token ids or chat messages; or a list of those.
            params: the request's parameters, or a list with those of every prompt; or name them
                as keywords.
            chat: put text into the chat template.
            options: see `SamplingParams`.

        Returns:
            A `GenerationResult`, or a list of them in the order of the prompts.

        Raises:
            UsageError: a prompt or an option is out of range.
            QueueFullError: too many calls wait already.
            NonFiniteScoreError: the model produced NaN or infinity.
            LookaheadError: a logits processor failed.
        """
        prompt = as_lists(prompt)
        if is_single(prompt):
            if isinstance(params, Sequence):
                raise UsageError("one prompt takes one SamplingParams, got a list of them")
            wish = self._make_params(params, options)
            encoded = self.encode(cast("Prompt", prompt), chat=chat)
            return self._generate([encoded], [wish])[0]
        prompts = self._encode_all(cast("Sequence[Prompt]", prompt), chat=chat)
        if isinstance(params, Sequence):
            if len(params) != len(prompts):
                raise UsageError(
                    f"there must be one SamplingParams per prompt: got {len(params)} for "
                    f"{len(prompts)} prompts"
                )
            wishes = [self._make_params(one, options) for one in params]
        else:
            wishes = [self._make_params(params, options)] * len(prompts)
        return self._generate(prompts, wishes)

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool = False,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult:
        """Generate from one prompt without blocking the event loop; see `generate`.

        Cancelling the task cancels the generation within one step.
        """
        wish = self._make_params(params, options)
        encoded = self.encode(as_lists(prompt), chat=chat)
        ended = asyncio.Event()
        call = _call_into(asyncio.get_running_loop())
        (reply,) = self._submit([encoded], [wish], on_ended=lambda: call(ended.set))
        try:
            await ended.wait()
        except BaseException:
            self._cancel([reply])
            raise
        return reply.result()

    def _encode_all(self, prompts: Sequence[Prompt], *, chat: bool) -> list[tuple[int, ...]]:
        """Every prompt's token ids; all are checked before the first one runs."""
        encoded = []
        for index, prompt in enumerate(prompts):
            try:
                encoded.append(self.encode(prompt, chat=chat))
            except UsageError as error:
                raise UsageError(f"prompt {index}: {error}") from error
            self._decoder.check_prompt(encoded[-1], request=index)
        return encoded

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool = False,
        **options: Unpack[RequestOptions],
    ) -> GenerationStream:
        """Generate from one prompt, a chunk per step.

        Raises:
            UsageError: the prompt or an option is out of range.
            QueueFullError: too many calls wait already.
        """
        return self._open_stream(prompt, params, options, chat=chat)

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool = False,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerationStream:
        """The same for an event loop; call it inside one.

        The request waits for its turn from this call on, so that a full queue is known before the
        first chunk. Use the stream in ``async with``, or close it, when it may be left early.

        Raises:
            UsageError: the prompt or an option is out of range.
            QueueFullError: too many calls wait already.
        """
        wish = self._make_single(params, options)
        encoded = self.encode(as_lists(prompt), chat=chat)
        items: asyncio.Queue[Any] = asyncio.Queue()
        ended = asyncio.Event()
        call = _call_into(asyncio.get_running_loop())
        (reply,) = self._submit(
            [encoded],
            [wish],
            deliver=lambda item: call(items.put_nowait, item),
            on_ended=lambda: call(ended.set),
        )
        return AsyncGenerationStream(self._scheduler, reply, items, ended, engine=self)

    def start(self, messages: Sequence[Message] = ()) -> Conversation:
        """A chat whose cache stays between its turns.

        Args:
            messages: what was said before, a system message for example.
        """
        return Conversation(self._open_stream, messages)

    def prefill(
        self,
        token_ids: Sequence[int],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> DecodeState:
        """Read a prompt and return its sequence, to be advanced pass by pass, by the caller.

        Raises:
            UsageError: the prompt or an option is out of range.
        """
        wish = self._make_single(params, options)
        if isinstance(cast(object, token_ids), str):
            raise UsageError("prefill wants token ids, got text; use engine.encode first")
        text = GeneratedText(self.tokenizer, wish.stop_strings)
        return DecodeState(
            self._decoder.start([as_lists(token_ids)], [wish], self._policy, listeners=[text])
        )

    def _make_params(
        self, params: SamplingParams | None, options: RequestOptions
    ) -> SamplingParams:
        if params is None:
            params = SamplingParams(**options)  # type: ignore[arg-type]  # enums by their names
        elif options:
            raise UsageError(f"give params or keywords, not both; got {', '.join(options)}")
        if params.k is None:
            is_open = params.layout is None and params.sources is None
            takes_sources = is_open and params.select is Select.EXACT
            sources = self.sources if takes_sources else params.sources
            return replace(params, k=self.k, sources=sources)
        _check_k(params.k, max(self.bundle.manifest.lookahead_lengths))
        return params

    def _make_single(
        self, params: SamplingParams | None, options: RequestOptions
    ) -> SamplingParams:
        wish = self._make_params(params, options)
        if wish.n > 1:
            raise UsageError(f"a stream has one sample, got n = {wish.n}; use generate")
        return wish

    def _open_stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions,
        *,
        chat: bool,
        cache: KeptCache | None = None,
        on_end: Callable[[GenerationResult], None] | None = None,
    ) -> GenerationStream:
        wish = self._make_single(params, options)
        encoded = self.encode(as_lists(prompt), chat=chat)
        items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        (reply,) = self._submit([encoded], [wish], deliver=items.put, cache=cache)
        return GenerationStream(self._scheduler, reply, items, engine=self, on_end=on_end)

    def _submit(
        self,
        prompts: Sequence[Sequence[int]],
        wishes: Sequence[SamplingParams],
        *,
        deliver: Delivery = deliver_nowhere,
        on_ended: Callable[[], None] = do_nothing,
        cache: KeptCache | None = None,
    ) -> list[Reply]:
        """Queue these prompts as one call; a reply each."""
        replies = [
            Reply(self._make_sequences(prompt, wish, request), deliver, on_ended)
            for request, (prompt, wish) in enumerate(zip(prompts, wishes, strict=True))
        ]
        jobs = []
        for reply in replies:
            reply.job = Job(reply.sequences, reply)
            jobs.append(reply.job)
        if cache is None:
            self._scheduler.submit(jobs)
            return replies
        (job,) = jobs
        job.cache = cache.lend(job.sequences[0], replies[0])
        try:
            self._scheduler.submit(jobs)
        except BaseException:
            cache.give_up(job.cache)
            raise
        return replies

    def _make_sequences(
        self, prompt: Sequence[int], wish: SamplingParams, request: int
    ) -> dict[TokenSequence, GeneratedText]:
        """The samples of one prompt, and the texts that hear their tokens."""
        texts: dict[TokenSequence, GeneratedText] = {}
        for sample in range(wish.n):
            text = GeneratedText(self.tokenizer, wish.stop_strings)
            (sequence,) = self._decoder.make_sequences(
                [prompt],
                [replace(wish, n=1, seed=wish.seed + sample)],
                listeners=[text],
                first_request=request,
                scratch=self._scratch,
            )
            texts[sequence] = text
        return texts

    def _generate(
        self, prompts: Sequence[Sequence[int]], wishes: Sequence[SamplingParams]
    ) -> list[GenerationResult]:
        """The results of one call; if one fails, or the caller is interrupted, all end."""
        ends: queue.SimpleQueue[None] = queue.SimpleQueue()
        replies = self._submit(prompts, wishes, on_ended=lambda: ends.put(None))
        try:
            for _ in replies:
                ends.get()
                for reply in replies:
                    if reply.is_ended and (error := reply.wait()) is not None:
                        raise error
            return [reply.result() for reply in replies]
        except BaseException:
            self._cancel(replies)
            raise

    def _cancel(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            if reply.job is not None:
                self._scheduler.cancel(reply.job)


def _weakly(engine: Engine, observer: Observer) -> Observer:
    """The observer, called without being kept alive: it may well own the engine."""
    reference = weakref.ref(engine)
    del observer

    def call(event: StepEvent) -> None:
        found = reference()
        if found is not None and found._observer is not None:
            found._observer(event)

    return call


def _close_from_anywhere(scheduler: Scheduler) -> None:
    """Close behind an engine that is gone, wherever its last reference was dropped."""
    scheduler.begin_to_close()
    if not scheduler.is_own_thread:
        scheduler.close()


def _call_into(loop: asyncio.AbstractEventLoop) -> Callable[..., None]:
    """What calls a function in an event loop, from the worker's thread."""

    def call(function: Callable[..., object], *arguments: object) -> None:
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            logger.debug("the event loop of a request is closed; its tokens are dropped")

    return call


def _find_max_batch(wanted: int | None, most: int | None) -> int:
    """Sequences to decode together: as many as wished for, else the default where it fits.

    Args:
        wanted: by the caller, if any.
        most: that the backend can run; None for any number.
    """
    if most is None:
        return wanted or DEFAULT_MAX_BATCH
    if wanted is not None and wanted > most:
        raise UsageError(
            f"max_batch {wanted} is more than the {most} sequences that the bundle's plan was "
            "built for; choose fewer, or build plans with a larger --max-batch"
        )
    return wanted or min(DEFAULT_MAX_BATCH, most)


def _find_epsilon(bundle: Bundle, backend: str) -> float:
    """Margin of a near-tie: as verified on this backend, else the most it may be."""
    measured = [c.epsilon for c in bundle.manifest.certificates if c.backend == backend]
    widest = max(LARGEST_EPSILON.values())  # of a precision that is not known here
    return max(measured, default=LARGEST_EPSILON.get(bundle.manifest.precision, widest))


def _most_planned_rows(policy: BlockPolicy | None) -> int:
    """Rows of the widest step to plan: no more than the widest block that is padded to."""
    if policy is None or not policy.widths:
        return MOST_PLANNED_ROWS
    return min(MOST_PLANNED_ROWS, max(policy.widths))


def _find_costs(bundle: Bundle, backend: str, threads: int, widths: tuple[int, ...]) -> StepCosts:
    """How long passes take: as measured on this backend, best on this processor and as many
    threads.
    """
    measured = [times for times in bundle.manifest.step_times if times.backend == backend]
    if not measured:
        return ASSUMED_COSTS
    processor = read_processor(backend)
    wanted = threads or os.cpu_count() or 1

    def closeness(times: StepTimes) -> tuple[bool, int]:
        return times.processor == processor, -abs(times.threads - wanted)

    found = max(measured, key=closeness)
    return StepCosts.measured(found.token_times, widths=widths, slots_ms=found.slots_ms)


def _check_certificate(bundle: Bundle, backend: str, threads: int) -> None:
    differences = check_certificate(
        bundle,
        backend=backend,
        backend_version=read_backend_version(backend),
        processor=read_processor(backend),
        threads=threads,
    )
    for line in differences:
        logger.warning("%s", line)


def _check_k(k: int, built: int) -> None:
    if not 0 <= k <= built:
        raise UsageError(
            f"k must be between 0 and the largest this bundle was built for, {built}; got {k}"
        )


def _parse_digests(digests: DigestCheck | str) -> DigestCheck:
    try:
        return DigestCheck(digests)
    except ValueError as error:
        known = ", ".join(f"'{member}'" for member in DigestCheck)
        raise UsageError(f"digests must be one of {known}, got {digests!r}") from error


def _check_int(name: str, value: object, *, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise UsageError(f"{name} must be an integer, got {value!r:.60} ({type(value).__name__})")
    if value < at_least:
        raise UsageError(f"{name} must be at least {at_least}, got {value}")
    return int(value)
