"""Text in, text out: the engine over a bundle.

Turns prompts into token ids, drives a decoding, and turns tokens back into text as they come.
It does not know how tokens are chosen.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, TypeAlias, TypedDict, Unpack, cast, overload

import numpy as np

from la_runtime.backends import check_backend, open_backend
from la_runtime.backends.base import Backend
from la_runtime.bundle import Bundle, open_bundle
from la_runtime.chat import ChatTemplate
from la_runtime.choosing import Choice
from la_runtime.decoder import BlockPolicy, Decoder, Decoding, StepResult
from la_runtime.digests import DigestCheck
from la_runtime.errors import UsageError
from la_runtime.layout import Layout
from la_runtime.sampling import LogitsProcessor, SamplingParams, Select
from la_runtime.stats import GenerationStats
from la_runtime.stopping import FinishReason
from la_runtime.text import GeneratedText
from la_runtime.tokenizer import Tokenizer

__all__ = [
    "DEFAULT_MAX_BATCH",
    "Chunk",
    "DecodeState",
    "Engine",
    "GenerationResult",
    "GenerationStream",
    "Message",
    "Prompt",
    "RequestOptions",
    "TokenLogprobs",
]

DEFAULT_MAX_BATCH: Final = 8
_MOST_THREADS: Final = 1024

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = "str | Sequence[int] | Sequence[Message]"


class RequestOptions(TypedDict, total=False):
    """Keywords of one request; see `SamplingParams` for their meaning."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: str | tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    logprobs: int | None
    logits_processors: tuple[LogitsProcessor, ...]
    k: int | None
    select: Select | str
    tau: float | None
    layout: Layout | str | None
    ignore_eos: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one emitted token, under the model's own scores.

    Args:
        token_id: the emitted token.
        logprob: its log-probability.
        top: the best tokens with theirs, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """One finished generation.

    `token_ids` include the token that ended it; `text` holds neither an end token nor a stop
    string. `logprobs` has an entry per token if the request asked for them, else none.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: GenerationStats
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One pass of a stream: text that became certain, and its tokens.

    `accepted` counts the tokens that were proposals.
    """

    text: str
    token_ids: tuple[int, ...]
    accepted: int
    finish_reason: FinishReason | None


class GenerationStream:
    """Chunks of one generation, one per pass, as an iterator.

    A context manager: leaving it, or `close`, stops the generation and releases its cache.
    """

    def __init__(self, decoding: Decoding, text: GeneratedText) -> None:
        self._decoding = decoding
        self._text = text
        self._pieces: list[str] = []
        self._has_prefilled = False
        self.finish_reason: FinishReason | None = None

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if self._decoding.is_done or self._decoding.is_closed:
            raise StopIteration
        run_pass = self._decoding.step if self._has_prefilled else self._decoding.prefill
        ((_, result),) = run_pass()
        self._has_prefilled = True
        self.finish_reason = result.finish_reason
        if result.finish_reason is not None:
            self._text.finish()
        text = self._text.take()
        self._pieces.append(text)
        return Chunk(
            text=text,
            token_ids=result.token_ids,
            accepted=result.accepted,
            finish_reason=result.finish_reason,
        )

    @property
    def result(self) -> GenerationResult:
        """The whole generation.

        Raises:
            UsageError: it has not finished.
        """
        if self.finish_reason is None:
            raise UsageError("the stream has not finished; read it to its end first")
        return GenerationResult(
            text="".join(self._pieces),
            token_ids=self._decoding.token_ids(0),
            finish_reason=self.finish_reason,
            stats=self._decoding.stats(0),
            logprobs=_token_logprobs(self._decoding.choices(0)),
        )

    def close(self) -> None:
        """Stop, and release the cache."""
        self._decoding.close()


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

    One engine serves one thread at a time.
    """

    def __init__(
        self,
        bundle: Bundle,
        backend: Backend,
        *,
        k: int,
        max_batch: int = DEFAULT_MAX_BATCH,
        policy: BlockPolicy | None = None,
    ) -> None:
        model = bundle.manifest.model
        self.bundle = bundle
        self.backend = backend
        self.k = k
        self.tokenizer = Tokenizer.load(bundle.root)
        self._max_batch = max_batch
        self._policy = policy
        self._decoder = Decoder(
            backend,
            context=model.context,
            eos_token_ids=model.eos_token_ids,
            group_mask=bundle.manifest.lookahead.group_mask,
        )

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        backend: str = "ort-cpu",
        k: int | None = None,
        threads: int = 0,
        max_batch: int = DEFAULT_MAX_BATCH,
        fixed_width: int | None = None,
        digests: DigestCheck | str = DigestCheck.FULL,
    ) -> Engine:
        """Open a bundle.

        Args:
            path: the bundle's folder.
            backend: what runs the graph.
            k: lookahead length of requests that name none; None takes the largest built.
            threads: threads for one pass; 0 lets the backend choose.
            max_batch: most sequences decoded together; further prompts wait.
            fixed_width: pad every pass to this width; see `BlockPolicy.fixed_width`.
            digests: how file digests are checked.

        Raises:
            UsageError: no bundle there, or an argument out of range.
            BundleError: the bundle is damaged, incomplete or of a newer version.
            HostError: the backend's library is missing.
        """
        _check_at_least("threads", threads, 0)
        if threads > _MOST_THREADS:
            raise UsageError(f"threads must be at most {_MOST_THREADS}, got {threads}")
        _check_at_least("max_batch", max_batch, 1)
        check_backend(backend)
        bundle = open_bundle(path, digests=_parse_digests(digests))
        built = max(bundle.manifest.lookahead_lengths)
        chosen_k = built if k is None else k
        _check_k(chosen_k, built)
        k_max = bundle.manifest.contract.k_max
        policy = None if fixed_width is None else BlockPolicy.fixed_width(fixed_width, k_max=k_max)
        return cls(
            bundle,
            open_backend(backend, bundle, threads=threads),
            k=chosen_k,
            max_batch=max_batch,
            policy=policy,
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the backend."""
        self.backend.close()

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return ChatTemplate.load(self.bundle.root)

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
        if _is_messages(prompt):
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
        params: SamplingParams | None = None,
        *,
        chat: bool = False,
        **options: Unpack[RequestOptions],
    ) -> list[GenerationResult]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        chat: bool = False,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult | list[GenerationResult]:
        """Generate from one prompt, or from several in batches.

        Args:
            prompt: text, token ids or chat messages; or a list of those.
            params: the request's parameters; or name them as keywords.
            chat: put text into the chat template.
            options: see `SamplingParams`.

        Returns:
            A `GenerationResult`, or a list of them in the order of the prompts.

        Raises:
            UsageError: a prompt or an option is out of range.
            NonFiniteScoreError: the model produced NaN or infinity.
        """
        params = self._make_params(params, options)
        prompt = _as_lists(prompt)
        if _is_single(prompt):
            encoded = self.encode(cast("Prompt", prompt), chat=chat)
            return self._generate_batch([encoded], params, first_request=0)[0]
        prompts = self._encode_all(cast("Sequence[Prompt]", prompt), chat=chat)
        results: list[GenerationResult] = []
        for start in range(0, len(prompts), self._max_batch):
            batch = prompts[start : start + self._max_batch]
            results += self._generate_batch(batch, params, first_request=start)
        return results

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
        """Generate from one prompt, a chunk per pass.

        Raises:
            UsageError: the prompt or an option is out of range.
        """
        encoded = self.encode(_as_lists(prompt), chat=chat)
        decoding, (text,) = self._start([encoded], self._make_params(params, options))
        return GenerationStream(decoding, text)

    def prefill(
        self,
        token_ids: Sequence[int],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> DecodeState:
        """Read a prompt and return its sequence, to be advanced pass by pass.

        Raises:
            UsageError: the prompt or an option is out of range.
        """
        wish = self._make_params(params, options)
        if isinstance(cast(object, token_ids), str):
            raise UsageError("prefill wants token ids, got text; use engine.encode first")
        return DecodeState(self._decoder.start([_as_lists(token_ids)], [wish], self._policy))

    def _make_params(
        self, params: SamplingParams | None, options: RequestOptions
    ) -> SamplingParams:
        if params is None:
            params = SamplingParams(**options)  # type: ignore[arg-type]  # enums by their names
        elif options:
            raise UsageError(f"give params or keywords, not both; got {', '.join(options)}")
        if params.k is None:
            return replace(params, k=self.k)
        _check_k(params.k, max(self.bundle.manifest.lookahead_lengths))
        return params

    def _start(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        first_request: int = 0,
    ) -> tuple[Decoding, list[GeneratedText]]:
        texts = [GeneratedText(self.tokenizer, params.stop_strings) for _ in prompts]
        wishes = [params] * len(prompts)
        decoding = self._decoder.start(
            prompts, wishes, self._policy, listeners=texts, first_request=first_request
        )
        return decoding, texts

    def _generate_batch(
        self, prompts: Sequence[tuple[int, ...]], params: SamplingParams, *, first_request: int
    ) -> list[GenerationResult]:
        reasons: dict[int, FinishReason] = {}
        decoding, texts = self._start(prompts, params, first_request=first_request)
        with decoding:
            results = decoding.prefill()
            while True:
                for index, result in results:
                    if result.finish_reason is not None:
                        reasons[index] = result.finish_reason
                if decoding.is_done:
                    break
                results = decoding.step()
        for text in texts:
            text.finish()
        return [
            GenerationResult(
                text=text.take(),
                token_ids=decoding.token_ids(index),
                finish_reason=reasons[index],
                stats=decoding.stats(index),
                logprobs=_token_logprobs(decoding.choices(index)),
            )
            for index, text in enumerate(texts)
        ]


def _token_logprobs(choices: Sequence[Choice]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(token_id=choice.token_id, logprob=choice.logprob, top=choice.top_logprobs)
        for choice in choices
        if choice.logprob is not None
    )


def _as_lists(prompt: Any) -> Any:
    """NumPy arrays of token ids as lists, alone or in a list of prompts."""
    if isinstance(prompt, np.ndarray):
        return prompt.tolist()
    if isinstance(prompt, list | tuple) and any(isinstance(one, np.ndarray) for one in prompt):
        return [_as_lists(one) for one in prompt]
    return prompt


def _is_messages(prompt: Prompt | Sequence[Prompt]) -> bool:
    return bool(prompt) and isinstance(prompt[0], Mapping)


def _is_single(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt rather than a list of prompts."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or _is_messages(prompt):
        return True
    if not prompt:
        raise UsageError("the prompt is empty; give text, token ids or chat messages")
    return not isinstance(prompt[0], str | Sequence)


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


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"{name} must be at least {least}, got {value}")
