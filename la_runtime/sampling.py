"""What a caller may ask of one request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from la_runtime.errors import UsageError
from la_runtime.layout import Layout

__all__ = ["DEFAULT_MAX_NEW_TOKENS", "SamplingParams", "Select"]

DEFAULT_MAX_NEW_TOKENS: Final = 256


class Select(StrEnum):
    """How proposals become output.

    ``exact``: verified by the model in the next pass; the output is the model's own.
    ``threshold``: emitted unverified when probable enough; lossy.
    """

    EXACT = "exact"
    THRESHOLD = "threshold"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request. Decoding is greedy: a token is the argmax, ties to the lowest id.

    Args:
        max_new_tokens: most tokens to generate, at least 1.
        k: lookahead length; None takes the engine's. 0 is plain decoding.
        select: selection rule.
        tau: probability in [0, 1] from which `threshold` emits a proposal; for it alone.
        layout: where `exact` puts lookaheads; None takes `Layout.ROOT_ONLY`.
        ignore_eos: go on past end-of-sequence tokens.

    Raises:
        UsageError: a value is out of range, or given to a rule that has no use for it.
    """

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    k: int | None = None
    select: Select = Select.EXACT
    tau: float | None = None
    layout: Layout | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _set_enum(self, "select", Select)
        if self.layout is not None:
            _set_enum(self, "layout", Layout)
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.k is not None and self.k < 0:
            raise UsageError(f"k must be 0 or more, got {self.k}; 0 is plain decoding")
        if self.select is Select.THRESHOLD:
            self._check_threshold()
        elif self.tau is not None:
            raise UsageError(
                f"tau is for select 'threshold' only, got tau {self.tau} with select 'exact'"
            )

    def _check_threshold(self) -> None:
        if self.layout is not None:
            raise UsageError(
                f"layout '{self.layout}' is for select 'exact' only: 'threshold' puts one group "
                "behind the last token; leave the layout out"
            )
        if self.tau is None:
            raise UsageError("select 'threshold' needs tau, a probability in [0, 1]")
        if not 0.0 <= self.tau <= 1.0:
            raise UsageError(f"tau must be a probability in [0, 1], got {self.tau}")


def _set_enum(params: SamplingParams, field: str, kind: type[StrEnum]) -> None:
    """Accept the plain string of an enum field."""
    value = getattr(params, field)
    try:
        object.__setattr__(params, field, kind(value))
    except ValueError as error:
        known = ", ".join(f"'{member}'" for member in kind)
        raise UsageError(f"{field} must be one of {known}, got {value!r}") from error
