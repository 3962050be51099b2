"""What a caller may ask of one request."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from la_runtime.errors import UsageError
from la_runtime.layout import Layout
from la_runtime.source_names import SourceName

__all__ = ["DEFAULT_MAX_NEW_TOKENS", "LogitsProcessor", "SamplingParams", "Select"]

DEFAULT_MAX_NEW_TOKENS: Final = 256
_MOST_LOGPROBS: Final = 1000
_MOST_DRAFTS: Final = 256
# Scores are float32; what is done to them must stay finite.
_LEAST_TEMPERATURE: Final = 1e-30
_MOST_TEMPERATURE: Final = 1e30
_MOST_PENALTY: Final = 1e6
_MOST_BIAS: Final = 1e9
_INT_FIELDS: Final = ("max_new_tokens", "min_new_tokens", "top_k", "seed", "n")
_BOOL_FIELDS: Final = ("ignore_eos", "strict")
_FLOAT_FIELDS: Final = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)

LogitsProcessor: TypeAlias = Callable[[Sequence[int], NDArray[np.float32]], None]
"""Called once per looked-at row with the token ids before it (prompt, output and the drafts on its
path) and its scores [vocab_size], which it changes in place; -inf forbids a token."""


class Select(StrEnum):
    """How proposals become output.

    ``exact``: verified by the model in the next pass; the output is the model's own.
    ``threshold``: emitted unverified when probable enough; lossy.
    """

    EXACT = "exact"
    THRESHOLD = "threshold"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request. Speculation never changes what they give.

    A token is the argmax of the adjusted scores when `temperature` is 0 (ties to the lowest id),
    else the argmax over the filters' survivors of score / temperature plus Gumbel noise, which
    depends on seed, position and token alone: equal seeds give equal texts, whatever k, layout
    or batch. Adjustments apply in this order: `logit_bias`, `repetition_penalty`, presence and
    frequency penalties, `min_new_tokens`, `logits_processors`; then the temperature; then the
    filters `top_k`, `top_p`, `min_p`, each over what the one before it left.

    Args:
        max_new_tokens: most tokens to generate, at least 1.
        min_new_tokens: no end token or stop id before this many tokens.
        temperature: 0 is greedy.
        top_k: keep the k best tokens; 0 keeps all.
        top_p: keep the smallest set of best tokens with this probability; 1 keeps all.
        min_p: keep tokens with at least this share of the best one's probability; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative scores of tokens in prompt
            or output; 1 is none.
        presence_penalty: subtracted from the score of every token in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        logit_bias: added to the scores of these token ids.
        seed: chooses the noise.
        n: how many texts to generate from the prompt, which is read once; sample i has the seed
            `seed` + i. More than one wants a temperature above 0.
        stop: texts (or one text) that end the output; neither they nor what follows is part of it.
        stop_token_ids: further tokens that end the output.
        ignore_eos: go on past end-of-sequence tokens.
        logprobs: report this many best tokens' log-probabilities per token; None reports none.
        logits_processors: see `LogitsProcessor`; called in order.
        k: lookahead length; None takes the engine's. 0 is plain decoding.
        select: selection rule.
        tau: probability in [0, 1] from which `threshold` emits a proposal; for it alone.
        layout: where `exact` puts lookaheads; None takes `Layout.ROOT_ONLY`, or with `sources`
            leaves it to the planner.
        sources: where `exact` takes drafts from, by name, see `SourceName`; None takes the slots
            alone, one draft behind the other, k of them. Drafts of several sources, or of several
            tokens for one position, form a tree.
        drafts: most drafts that a pass verifies; for `sources` alone. None lets the planner
            choose, pass by pass, or is 8 with a layout.
        strict: choices whose margin is below the bundle's epsilon are made again by a pass of one
            row, as plain decoding makes them. For `exact`. Keys and values written by wide passes
            can still differ in their last bit from those of plain decoding.

    NumPy's integers and floating-point numbers count as Python's.

    Raises:
        UsageError: a value is of another type, out of range, or given to a rule that has no use
            for it.
    """

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    n: int = 1
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    k: int | None = None
    select: Select = Select.EXACT
    tau: float | None = None
    layout: Layout | None = None
    sources: tuple[SourceName, ...] | None = None
    drafts: int | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        _set_enum(self, "select", Select)
        if self.layout is not None:
            _set_enum(self, "layout", Layout)
        self._convert_types()
        _check_range("max_new_tokens", self.max_new_tokens, at_least=1)
        _check_range("min_new_tokens", self.min_new_tokens, at_least=0, at_most=self.max_new_tokens)
        _check_range("temperature", self.temperature, at_least=0)
        _check_range("temperature", self.temperature, at_most=_MOST_TEMPERATURE)
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            raise UsageError(
                f"temperature must be 0 or at least {_LEAST_TEMPERATURE}, got {self.temperature}"
            )
        _check_range("n", self.n, at_least=1)
        if self.n > 1 and self.temperature == 0:
            raise UsageError(
                f"n = {self.n} greedy samples would be the same text; give a temperature above 0"
            )
        _check_range("top_k", self.top_k, at_least=0)
        _check_range("top_p", self.top_p, above=0, at_most=1)
        _check_range("min_p", self.min_p, at_least=0, at_most=1)
        _check_range(
            "repetition_penalty",
            self.repetition_penalty,
            at_least=1 / _MOST_PENALTY,
            at_most=_MOST_PENALTY,
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _check_range(name, getattr(self, name), at_least=-_MOST_PENALTY, at_most=_MOST_PENALTY)
        for token_id, bias in self.logit_bias.items():
            _check_range(
                f"logit_bias of token {token_id}", bias, at_least=-_MOST_BIAS, at_most=_MOST_BIAS
            )
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, at_least=0, at_most=_MOST_LOGPROBS)
        if "" in self.stop_strings:
            raise UsageError("a stop string is empty; leave it out or give at least one character")
        if self.k is not None and self.k < 0:
            raise UsageError(f"k must be 0 or more, got {self.k}; 0 is plain decoding")
        if self.drafts is not None:
            _check_range("drafts", self.drafts, at_least=1, at_most=_MOST_DRAFTS)
            if self.sources is None:
                raise UsageError(
                    f"drafts is for requests that name sources, got drafts {self.drafts} without; "
                    "name sources, or leave drafts out: k slots alone give k drafts"
                )
        if self.select is Select.THRESHOLD:
            self._check_threshold()
        elif self.tau is not None:
            raise UsageError(
                f"tau is for select 'threshold' only, got tau {self.tau} with select 'exact'"
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the best of the model's own scores is the token, so that nothing else is read."""
        return self.temperature == 0 and not self.has_adjustments and self.logprobs is None

    @property
    def has_filters(self) -> bool:
        """Whether some tokens may not be drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def has_adjustments(self) -> bool:
        """Whether scores are changed before a token is chosen."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or bool(self.logit_bias)
            or bool(self.logits_processors)
            or self.min_new_tokens > 0
        )

    def _convert_types(self) -> None:
        """Every field as the Python type it is declared to have."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        for name in _INT_FIELDS:
            fields[name] = _as_int(name, fields[name])
        for name in _FLOAT_FIELDS:
            fields[name] = _as_float(name, fields[name])
        for name, convert in (
            ("k", _as_int),
            ("drafts", _as_int),
            ("logprobs", _as_int),
            ("tau", _as_float),
        ):
            if fields[name] is not None:
                fields[name] = convert(name, fields[name])
        for name in _BOOL_FIELDS:
            if not isinstance(fields[name], bool | np.bool_):
                raise _wrong_type(name, fields[name], "True or False")
            fields[name] = bool(fields[name])
        fields["stop_token_ids"] = tuple(
            _as_int("an id in stop_token_ids", token_id)
            for token_id in _as_tuple("stop_token_ids", fields["stop_token_ids"], "token ids")
        )
        fields["stop"] = _as_texts(fields["stop"])
        fields["logits_processors"] = _as_tuple(
            "logits_processors", fields["logits_processors"], "functions"
        )
        for processor in fields["logits_processors"]:
            if not callable(processor):
                raise _wrong_type("one of logits_processors", processor, "a function")
        if fields["sources"] is not None:
            fields["sources"] = _as_sources(fields["sources"])
        fields["logit_bias"] = _as_biases(fields["logit_bias"])
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _check_threshold(self) -> None:
        if self.layout is not None:
            raise UsageError(
                f"layout '{self.layout}' is for select 'exact' only: 'threshold' puts one group "
                "behind the last token; leave the layout out"
            )
        if self.sources is not None:
            raise UsageError(
                "sources is for select 'exact' only: 'threshold' emits what the slots propose; "
                "leave sources out"
            )
        if not self.is_plain_greedy:
            raise UsageError(
                "select 'threshold' is greedy: leave out temperature, penalties, logit_bias, "
                "min_new_tokens, logprobs and logits_processors, or use select 'exact'"
            )
        if self.strict:
            raise UsageError("strict is for select 'exact' only: 'threshold' verifies nothing")
        if self.tau is None:
            raise UsageError("select 'threshold' needs tau, a probability in [0, 1]")
        if not 0.0 <= self.tau <= 1.0:
            raise UsageError(f"tau must be a probability in [0, 1], got {self.tau}")


def _wrong_type(name: str, value: object, expected: str) -> UsageError:
    return UsageError(f"{name} must be {expected}, got {value!r:.60} ({type(value).__name__})")


def _as_int(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise _wrong_type(name, value, "an integer")
    return int(value)


def _as_float(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise _wrong_type(name, value, "a number")
    try:
        return float(value)
    except OverflowError as error:
        raise _wrong_type(name, value, "a number that a float can hold") from error


def _as_tuple(name: str, value: Any, items: str) -> tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError as error:
        raise _wrong_type(name, value, f"a sequence of {items}") from error


def _as_texts(stop: object) -> str | tuple[str, ...]:
    if isinstance(stop, str):
        return stop
    texts = _as_tuple("stop", stop, "texts, or one text")
    for text in texts:
        if not isinstance(text, str):
            raise _wrong_type("each text of stop", text, "a str")
    return texts


def _as_sources(sources: object) -> tuple[SourceName, ...]:
    """Each once, in the order of their declaration."""
    known = ", ".join(f"'{name}'" for name in SourceName)
    if isinstance(sources, str):
        raise _wrong_type("sources", sources, f"a sequence of names among {known}")
    named = set()
    for name in _as_tuple("sources", sources, f"names among {known}"):
        try:
            named.add(SourceName(name))
        except ValueError as error:
            raise UsageError(f"sources must be among {known}, got {name!r:.60}") from error
    if not named:
        raise UsageError(
            f"sources names none; leave it out, name some of {known}, or give k = 0 for plain "
            "decoding"
        )
    return tuple([name for name in SourceName if name in named])


def _as_biases(logit_bias: object) -> dict[int, float]:
    if not isinstance(logit_bias, Mapping):
        raise _wrong_type("logit_bias", logit_bias, "a mapping from token id to number")
    return {
        _as_int("a token id in logit_bias", token_id): _as_float(
            f"logit_bias of token {token_id}", bias
        )
        for token_id, bias in logit_bias.items()
    }


def _check_range(
    name: str,
    value: float,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{name} must be a finite number, got {value}")
    if value < at_least or value > at_most or (value == above):
        bounds = [f"at least {at_least}"] * math.isfinite(at_least)
        bounds += [f"more than {above}"] * math.isfinite(above)
        bounds += [f"at most {at_most}"] * math.isfinite(at_most)
        raise UsageError(f"{name} must be {' and '.join(bounds)}, got {value}")
    if value < above:
        raise UsageError(f"{name} must be more than {above}, got {value}")


def _set_enum(params: SamplingParams, field_name: str, kind: type[StrEnum]) -> None:
    """Accept the plain string of an enum field."""
    value = getattr(params, field_name)
    try:
        object.__setattr__(params, field_name, kind(value))
    except ValueError as error:
        known = ", ".join(f"'{member}'" for member in kind)
        raise UsageError(f"{field_name} must be one of {known}, got {value!r}") from error
