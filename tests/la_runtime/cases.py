"""Random requests over the toy backend, the slow truth about each, and their comparison.

A case is a batch: ragged prompts with parameters, k and layout of their own, slots that are right,
partly right or wrong, and the shape of passes. `make_case(index)` always makes the same one.

The truth knows neither caches, batches, drafts nor streams: each token is chosen from a pass over
its whole prefix, and the text is the decoded whole, cut.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from la_runtime.backends.fake import FakeBackend
from la_runtime.choosing import Choice, Chooser
from la_runtime.contract import CacheForm, RowPlaces
from la_runtime.decoder import BlockPolicy
from la_runtime.layout import Layout
from la_runtime.sampling import LogitsProcessor, SamplingParams
from la_runtime.sequence import StepResult
from la_runtime.source_names import SourceName
from la_runtime.stopping import FinishReason
from la_runtime.text import GeneratedText
from la_runtime.tokenizer import Tokenizer
from tests.la_runtime.guessing import GuessingDecoder
from tests.la_runtime.toy import next_logits

__all__ = [
    "LOGPROB_TOLERANCE",
    "Case",
    "Coverage",
    "End",
    "PlainText",
    "SlowDecoder",
    "Truth",
    "check_case",
    "draw_ends",
    "draw_params",
    "draw_stops",
    "find_end",
    "make_case",
]

VOCAB_SIZE: Final = 320
K_MAX: Final = 6
# Positions that a row sees in the toy model's last layer, by the case's index.
WINDOWS: Final = (None, None, 7, 3)
LONGEST_PROMPT: Final = 16
MOST_NEW_TOKENS: Final = 14
# Of a pass over a cache of fixed capacity; the widest step has 49.
MOST_ROWS: Final = 64
# How far the truth looks past the longest output, so that drafts there are right, too.
BEYOND: Final = 4
LOGPROB_TOLERANCE: Final = 1e-4
# Of margins: the runtime computes them from the same logits, but not in the same order.
MARGIN_TOLERANCE: Final = 1e-3

_SEED: Final = 20_260_101
_TEXTS: Final = (
    "né — 日本 🙂 ok. The end\n\nUser: ",
    "The cat sat on the mat, 猫は座った。",
    "aaaaaaab aab ab 🙂🙂🙂",
)
_STOPS: Final = ("\n", "ab", "aab", "本", "🙂", "🙂🙂", " the", "User:", "�", "。", "e")


# Processors: pure functions of a prefix, and values whose repr makes them again.


@dataclass(frozen=True, slots=True)
class Spell:
    """Prefers, at each position, the token of a text there."""

    token_ids: tuple[int, ...]
    weight: float

    def __call__(self, token_ids: Sequence[int], scores: NDArray[np.float32]) -> None:
        scores[self.token_ids[len(token_ids) % len(self.token_ids)]] += self.weight


@dataclass(frozen=True, slots=True)
class ForbidRepeat:
    """Forbids the last token."""

    def __call__(self, token_ids: Sequence[int], scores: NDArray[np.float32]) -> None:
        scores[token_ids[-1]] = -np.inf


@dataclass(frozen=True, slots=True)
class PreferByHistory:
    """Prefers a token that every token before it has a say in."""

    weight: float

    def __call__(self, token_ids: Sequence[int], scores: NDArray[np.float32]) -> None:
        mixed = sum((place + 1) * (token + 7) for place, token in enumerate(token_ids))
        scores[mixed % len(scores)] += self.weight


# Cases


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence of a case.

    Args:
        prompt: its token ids.
        params: its parameters.
        wrong_drafts: positions, counted from the prompt's start, at which slots propose wrongly.
        num_told: how many tokens behind the prompt slots know; the rest they make up.
        guess_seed: if set, drafts also come from a source that guesses at random, and sometimes
            well, and passes are shaped by a planner drawn from it.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    wrong_drafts: frozenset[int]
    num_told: int
    guess_seed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A batch, and how it is run."""

    index: int
    model_seed: int
    window: int | None
    requests: tuple[Request, ...]
    eos_token_ids: tuple[int, ...]
    context: int
    policy: BlockPolicy
    epsilon: float

    @property
    def cache_form(self) -> CacheForm:
        """Of every second case with a fixed capacity; of the others every second without one."""
        is_in_place = self.capacity is not None or self.index % 4 == 2
        return CacheForm.SCATTER if is_in_place else CacheForm.CONCAT

    @property
    def row_places(self) -> RowPlaces:
        """Chosen in every case that can."""
        is_growing = self.cache_form is CacheForm.SCATTER and self.capacity is None
        return RowPlaces.CHOSEN if is_growing else RowPlaces.BEHIND

    @property
    def capacity(self) -> int | None:
        """Cache places per sequence, where there is a limit to the rows of a pass."""
        return None if self.policy.most_rows is None else self.context + self.policy.most_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What plain decoding gives one request.

    Args:
        choices: how each token was chosen.
        logits: [tokens, vocab_size] of the rows that chose them.
        text: what the caller is told.
        finish_reason: why it ended.
        future: the prompt and what the model says behind it, past any end.
    """

    choices: tuple[Choice, ...]
    logits: NDArray[np.float32]
    text: str
    finish_reason: FinishReason
    future: tuple[int, ...]

    @property
    def token_ids(self) -> list[int]:
        return [choice.token_id for choice in self.choices]


@dataclass(frozen=True, slots=True, kw_only=True)
class Future:
    """What the model says behind a prompt, as if nothing ever ended: choices, and their logits."""

    choices: tuple[Choice, ...]
    logits: tuple[NDArray[np.float32], ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(choice.token_id for choice in self.choices)


class SlowDecoder:
    """Plain decoding of the toy models.

    A new `Chooser` chooses each token: what it does is tested by itself, and here only that
    nothing but the prefix, the parameters and the position reaches it.

    Args:
        tokenizer: whose text is meant; its vocabulary has `VOCAB_SIZE` tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.spell = PlainText(tokenizer)

    def look_ahead(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        model_seed: int,
        window: int | None,
        held_back: Collection[int] = (),
    ) -> Future:
        """Up to `BEYOND` tokens further than asked for.

        Args:
            prompt: token ids.
            params: of the request.
            model_seed: chooses the toy model.
            window: of its last layer.
            held_back: tokens that `min_new_tokens` forbids.
        """
        backend = FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX, seed=model_seed, window=window)
        params = replace(params, logprobs=None)
        token_ids = list(prompt)
        choices, logits = [], []
        for _ in range(params.max_new_tokens + BEYOND):
            chooser = Chooser(
                params,
                request=0,
                prompt=prompt,
                end_token_ids=tuple(held_back),
                scratch=np.empty(VOCAB_SIZE, dtype=np.float32),
            )
            logits.append(next_logits(backend, token_ids))
            choices.append(chooser.choose(logits[-1], token_ids))
            token_ids.append(choices[-1].token_id)
        return Future(choices=tuple(choices), logits=tuple(logits))


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Where plain decoding ends: after so many tokens, with this text, for this reason."""

    count: int
    text: str
    finish_reason: FinishReason


def find_end(
    prompt: Sequence[int],
    token_ids: Sequence[int],
    params: SamplingParams,
    *,
    spell: PlainText,
    eos_token_ids: Sequence[int],
    context: int,
) -> End:
    """The first token that ends an output, by looking at the whole text after each.

    Args:
        prompt: token ids.
        token_ids: what is said behind it, at least as far as to the end.
        params: of the request.
        spell: gives the text of token ids.
        eos_token_ids: of the model.
        context: number of positions the model has.
    """
    eos = () if params.ignore_eos else eos_token_ids
    for count, last in enumerate(token_ids, 1):
        text = spell(token_ids[:count])
        starts = [text.find(stop) for stop in params.stop_strings if stop in text]
        is_end_token = last in eos or last in params.stop_token_ids
        if last in eos:
            reason = FinishReason.EOS
        elif is_end_token or starts:
            reason = FinishReason.STOP
        elif count == params.max_new_tokens:
            reason = FinishReason.LENGTH
        elif len(prompt) + count == context:
            reason = FinishReason.CONTEXT
        else:
            continue
        if is_end_token:
            text = spell(token_ids[: count - 1])
        elif starts:
            text = text[: min(starts)]
        return End(count=count, text=text, finish_reason=reason)
    raise AssertionError("the tokens do not reach the end")


class PlainText:
    """Text of token ids of a byte-level tokenizer: their bytes, joined and decoded at once.

    A character whose last bytes are missing is left out, and so are special tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = _token_bytes(tokenizer)

    def __call__(self, token_ids: Sequence[int]) -> str:
        spelled = b"".join(self._token_bytes[token_id] for token_id in token_ids)
        return codecs.utf_8_decode(spelled, "replace", False)[0]


def _token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each token; none for special ones, which are not part of the text."""
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte_of: dict[str, int] = {}
    # Every byte that occurs in UTF-8.
    for code in (*range(0x800), *range(0x800, 0xD800, 0x800), *range(0xE000, 0x110000, 0x1000)):
        ((letters, _),) = spelling.pre_tokenize_str(chr(code))
        byte_of |= dict(zip(letters, chr(code).encode(), strict=True))
    added = tokenizer.backend.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    # Letters of bytes that no text holds: one such byte is as good as another.
    return [
        b"" if token_id in special else bytes(byte_of.get(letter, 0xFF) for letter in text)
        for token_id, text in (
            (token_id, tokenizer.backend.id_to_token(token_id))
            for token_id in range(tokenizer.vocab_size)
        )
    ]


def make_case(index: int, slow: SlowDecoder) -> tuple[Case, list[Truth]]:
    """The case of this index, and what each of its requests must give."""
    rng = np.random.default_rng([_SEED, index])
    model_seed = int(rng.integers(4))
    window = WINDOWS[index % len(WINDOWS)]
    batch = int(rng.choice([1, 2, 3, 4], p=[0.4, 0.3, 0.2, 0.1]))
    prompts = [
        tuple(rng.integers(VOCAB_SIZE, size=rng.integers(1, LONGEST_PROMPT + 1)).tolist())
        for _ in range(batch)
    ]
    wishes = [
        draw_params(rng, slow.tokenizer, k_max=K_MAX, most_new_tokens=MOST_NEW_TOKENS)
        for _ in prompts
    ]
    futures = [
        slow.look_ahead(prompt, wish, model_seed=model_seed, window=window)
        for prompt, wish in zip(prompts, wishes, strict=True)
    ]
    eos = draw_ends(rng, futures[0].token_ids, VOCAB_SIZE, most=3)
    longest = max(map(len, prompts))
    context = longest + int(rng.integers(1, 12)) if rng.random() < 0.3 else 200
    requests, truths = [], []
    for prompt, wish, future in zip(prompts, wishes, futures, strict=True):
        params = replace(
            wish,
            stop=draw_stops(rng, slow.spell(future.token_ids)),
            stop_token_ids=draw_ends(rng, future.token_ids, VOCAB_SIZE, most=2),
        )
        if params.min_new_tokens:
            held_back = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
            future = slow.look_ahead(
                prompt, params, model_seed=model_seed, window=window, held_back=held_back
            )
        end = find_end(
            prompt,
            future.token_ids,
            params,
            spell=slow.spell,
            eos_token_ids=eos,
            context=context,
        )
        truths.append(
            Truth(
                choices=future.choices[: end.count],
                logits=np.stack(future.logits[: end.count]),
                text=end.text,
                finish_reason=end.finish_reason,
                future=(*prompt, *future.token_ids),
            )
        )
        requests.append(
            Request(
                prompt=prompt,
                params=params,
                wrong_drafts=_draw_wrong(rng, len(truths[-1].future)),
                num_told=int(rng.choice([0, 5, 100], p=[0.1, 0.1, 0.8])),
                guess_seed=int(rng.integers(2**32)) if rng.random() < 0.4 else None,
            )
        )
    case = Case(
        index=index,
        model_seed=model_seed,
        window=window,
        requests=tuple(requests),
        eos_token_ids=eos,
        context=context,
        policy=_draw_policy(rng, most_rows=MOST_ROWS if index % 2 else None),
        epsilon=float(rng.choice([1e-3, 1.0])),
    )
    return case, truths


def draw_params(
    rng: np.random.Generator, tokenizer: Tokenizer, *, k_max: int, most_new_tokens: int
) -> SamplingParams:
    """Everything but stops, which are drawn from what the model says.

    Args:
        rng: draws.
        tokenizer: of the model; its texts are spelled by some processors.
        k_max: largest lookahead length.
        most_new_tokens: largest `max_new_tokens`.
    """
    vocab_size = tokenizer.vocab_size

    def pick(*values: Any, usual: float = 0.6) -> Any:
        """The first value with probability `usual`, else one of the others."""
        return values[0] if rng.random() < usual else values[int(rng.integers(1, len(values)))]

    max_new_tokens = int(rng.integers(1, most_new_tokens + 1))
    biased = rng.integers(vocab_size, size=rng.integers(1, 6)).tolist()
    biases = {int(t): float(rng.choice([-100, -3, 0.5, 6, 25])) for t in biased}
    spelled = tuple(tokenizer.encode(str(rng.choice(_TEXTS)), add_special_tokens=False))
    processors: tuple[LogitsProcessor, ...] = pick(
        (),
        (Spell(spelled, 40.0),),
        (Spell(spelled, 40.0),),
        (Spell(spelled, 9.0), ForbidRepeat()),
        (PreferByHistory(12.0),),
        (ForbidRepeat(), PreferByHistory(3.0)),
        usual=0.35,
    )
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=int(rng.integers(max_new_tokens + 1)) if rng.random() < 0.2 else 0,
        temperature=pick(0.0, 0.2, 0.8, 1.0, 2.5, usual=0.4),
        top_k=pick(0, 1, 4, 50, 400),
        top_p=pick(1.0, 0.95, 0.5, 1e-3),
        min_p=pick(0.0, 0.02, 0.5, 1.0, usual=0.7),
        repetition_penalty=pick(1.0, 1.1, 2.0, 0.7),
        presence_penalty=pick(0.0, 0.2, 4.0, -1.0),
        frequency_penalty=pick(0.0, 0.1, 3.0, -0.5),
        logit_bias=biases if rng.random() < 0.3 else {},
        seed=int(rng.integers(-(2**62), 2**62)),
        ignore_eos=bool(rng.random() < 0.15),
        logprobs=pick(None, 0, 1, 5, 320, usual=0.5),
        logits_processors=processors,
        k=pick(None, *range(k_max + 1), usual=0.2),
        **_draw_drafting(rng, pick(None, *Layout, usual=0.2), k_max=k_max),
        strict=bool(rng.random() < 0.25),
    )


def _draw_drafting(
    rng: np.random.Generator, layout: Layout | None, *, k_max: int
) -> dict[str, Any]:
    """Where drafts come from and how many, no more than slots would give; where slots stand."""
    if rng.random() < 0.4:
        return {"layout": layout}
    sources = rng.choice(list(SourceName), size=rng.integers(1, 4), replace=False).tolist()
    is_planned = layout is None and rng.random() < 0.7
    drafts = None if is_planned else int(rng.integers(1, k_max + 1))
    return {"layout": layout, "sources": sources, "drafts": drafts}


def draw_ends(
    rng: np.random.Generator, said: Sequence[int], vocab_size: int, *, most: int
) -> tuple[int, ...]:
    """Token ids that end an output: some of what would be said, or any."""
    ends = [
        int(rng.choice(said)) if rng.random() < 0.35 else int(rng.integers(vocab_size))
        for _ in range(rng.integers(most + 1))
    ]
    return tuple(dict.fromkeys(ends))


def draw_stops(rng: np.random.Generator, said: str) -> str | tuple[str, ...]:
    """Stop strings: pieces of what would be said, with a wrong end now and then, or any."""
    stops = []
    for _ in range(rng.choice([0, 1, 2, 4], p=[0.45, 0.25, 0.2, 0.1])):
        if not said or rng.random() < 0.4:
            stops.append(str(rng.choice(_STOPS)))
            continue
        start = int(rng.integers(len(said)))
        piece = said[start : start + int(rng.integers(1, 7))]
        stops.append(piece + "\0" if rng.random() < 0.3 else piece)
    return stops[0] if len(stops) == 1 and rng.random() < 0.5 else tuple(stops)


def _draw_wrong(rng: np.random.Generator, length: int) -> frozenset[int]:
    share = float(rng.choice([0.0, 0.2, 0.6, 1.0], p=[0.4, 0.3, 0.2, 0.1]))
    return frozenset(np.flatnonzero(rng.random(length) < share).tolist())


def _draw_policy(rng: np.random.Generator, *, most_rows: int | None) -> BlockPolicy:
    if rng.random() < 0.1:
        policy = BlockPolicy.fixed_width(int(rng.integers(49, 60)), k_max=K_MAX)
        return replace(policy, most_rows=most_rows)
    widths = rng.integers(1, 60, size=rng.integers(4)) if rng.random() < 0.5 else ()
    chunk = int(rng.integers(1, 20)) if rng.random() < 0.6 else 512
    return BlockPolicy(
        widths=tuple(int(width) for width in widths),
        prefill_chunk=chunk if most_rows is None else min(chunk, most_rows - K_MAX),
        most_rows=most_rows,
    )


# Comparison


@dataclass(slots=True)
class Coverage:
    """What the cases so far have really exercised."""

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, request: Request, truth: Truth, results: Sequence[StepResult]) -> None:
        """Count one request."""
        params, counts = request.params, self.counts
        counts["requests"] += 1
        counts[f"finish {truth.finish_reason}"] += 1
        counts["passes behind the first"] += len(results) - 1
        counts["passes with accepted drafts"] += sum(r.accepted > 0 for r in results)
        counts["passes with two accepted drafts or more"] += sum(r.accepted > 1 for r in results)
        last = results[-1]
        is_inside = last.accepted == len(last.token_ids) > 0
        counts[f"{truth.finish_reason} on an accepted draft"] += is_inside
        counts["sampled"] += params.temperature > 0
        counts["processed"] += bool(params.logits_processors)
        counts["log-probabilities"] += params.logprobs is not None
        is_text_cut = truth.finish_reason is FinishReason.STOP and (
            truth.token_ids[-1] not in params.stop_token_ids
        )
        counts["stopped by a string"] += is_text_cut
        counts["stopped by a string on an accepted draft"] += is_text_cut and is_inside
        counts["text with characters of several bytes"] += any(
            character > "\x7f" and character != "�" for character in truth.text
        )


def check_case(
    case: Case, truths: Sequence[Truth], tokenizer: Tokenizer, coverage: Coverage
) -> None:
    """Decode the case with everything on, and compare with the truth.

    Raises:
        AssertionError: anything differs; the message holds the case.
    """
    told = [_told(request, truth) for request, truth in zip(case.requests, truths, strict=True)]
    backend = FakeBackend(
        vocab_size=VOCAB_SIZE,
        k_max=K_MAX,
        seed=case.model_seed,
        window=case.window,
        slot_oracle=told,
        cache_form=case.cache_form,
        capacity=case.capacity,
        max_block=case.policy.most_rows,
        row_places=case.row_places,
    )
    decoder = GuessingDecoder(
        backend,
        context=case.context,
        eos_token_ids=case.eos_token_ids,
        epsilon=case.epsilon,
        guesses=[
            None if request.guess_seed is None else (request.guess_seed, truth.future)
            for request, truth in zip(case.requests, truths, strict=True)
        ],
    )
    texts = [GeneratedText(tokenizer, r.params.stop_strings) for r in case.requests]
    streamed = [""] * len(texts)
    results: list[list[StepResult]] = [[] for _ in texts]
    with decoder.start(
        [request.prompt for request in case.requests],
        [request.params for request in case.requests],
        case.policy,
        listeners=texts,
    ) as decoding:
        run_pass = decoding.prefill
        while not decoding.is_done:
            for index, result in run_pass():
                results[index].append(result)
                assert len(results[index]) <= MOST_NEW_TOKENS, (
                    f"request {index} of case {case.index} does not end:\n{case!r}"
                )
                if result.finish_reason is not None:
                    texts[index].finish()
                streamed[index] += texts[index].take()
            run_pass = decoding.step
        for index, (request, truth) in enumerate(zip(case.requests, truths, strict=True)):
            _check_request(
                case, index, results[index], streamed[index], decoding.choices(index), truth
            )
            stats = decoding.stats(index)
            assert stats.new_tokens == len(truth.choices)
            coverage.counts["choices made again"] += stats.rechecked
            coverage.counts["plain passes of a planner"] += (
                stats.without_drafts + stats.not_worth_drafts
            )
            for source in stats.sources:
                coverage.counts[f"accepted drafts of {source.source}"] += source.accepted
            coverage.add(request, truth, results[index])
    coverage.counts["ragged batches"] += len({len(r.prompt) for r in case.requests}) > 1


def _told(request: Request, truth: Truth) -> list[int]:
    """What slots know of the future: token ids by position, some of them wrong."""
    known = truth.future[: len(request.prompt) + request.num_told]
    return [
        (token + 1) % VOCAB_SIZE if position in request.wrong_drafts else token
        for position, token in enumerate(known)
    ]


def _check_request(
    case: Case,
    index: int,
    results: Sequence[StepResult],
    text: str,
    choices: Sequence[Choice],
    truth: Truth,
) -> None:
    params = case.requests[index].params
    found: dict[str, object] = {
        "token_ids": [token for result in results for token in result.token_ids],
        "text": text,
        "finish_reason": [r.finish_reason for r in results if r.finish_reason is not None],
        "is_last": results[-1].finish_reason is not None,
        "logprobs": [
            (c.token_id, c.logprob, [i for i, _ in c.top_logprobs], [p for _, p in c.top_logprobs])
            for c in choices
        ],
        "margins": [margin for result in results for margin in result.margins],
    }
    expected: dict[str, object] = {
        "token_ids": truth.token_ids,
        "text": truth.text,
        "finish_reason": [truth.finish_reason],
        "is_last": True,
        "logprobs": _logprobs(truth, params.logprobs),
        "margins": [choice.margin for choice in truth.choices],
    }
    tolerances = {"logprobs": LOGPROB_TOLERANCE, "margins": MARGIN_TOLERANCE}
    for what, value in expected.items():
        if not _is_near(found[what], value, tolerance=tolerances.get(what, 0.0)):
            raise AssertionError(
                f"{what} of request {index} of case {case.index}:\n{found[what]!r}\n"
                f"plain decoding gives\n{value!r}\nmake_case({case.index}, ...) is\n{case!r}"
            )


def _logprobs(truth: Truth, count: int | None) -> list[object]:
    """Per token its id, its log-probability, and the best ids with theirs."""
    if count is None:
        return []
    rows = truth.logits.astype(np.float64)
    rows -= np.log(np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
    rows -= truth.logits.max(axis=1, keepdims=True)
    best = np.argsort(-truth.logits, axis=1, kind="stable")[:, :count]
    return [
        (token, float(row[token]), ids.tolist(), row[ids].tolist())
        for token, row, ids in zip(truth.token_ids, rows, best, strict=True)
    ]


def _is_near(found: Any, expected: Any, *, tolerance: float) -> bool:
    """Equality, of floating-point numbers up to a tolerance."""
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(
            _is_near(one, other, tolerance=tolerance)
            for one, other in zip(found, expected, strict=True)
        )
    if isinstance(expected, float) and isinstance(found, float):
        return found == expected or abs(found - expected) <= tolerance
    return bool(found == expected)
