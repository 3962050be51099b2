"""What a request gives back: chunks while it runs, a result when it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from la_runtime.choosing import Choice
from la_runtime.stats import GenerationStats
from la_runtime.stopping import FinishReason

__all__ = ["Chunk", "GenerationResult", "TokenLogprobs"]


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

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> tuple[TokenLogprobs, ...]:
        """Those of the choices that have any."""
        return tuple(
            cls(token_id=choice.token_id, logprob=choice.logprob, top=choice.top_logprobs)
            for choice in choices
            if choice.logprob is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """One finished generation.

    `token_ids` include the token that ended it; `text` holds neither an end token nor a stop
    string. `logprobs` has an entry per token if the request asked for them, else none. `others`
    are the further samples of a request with n above 1.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: GenerationStats
    logprobs: tuple[TokenLogprobs, ...] = ()
    others: tuple[GenerationResult, ...] = ()

    @property
    def samples(self) -> tuple[GenerationResult, ...]:
        """All n samples, this one first; sample i was drawn with the request's seed + i."""
        return (replace(self, others=()), *self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One step of a stream: text that became certain, and its tokens.

    `accepted` counts the tokens that were proposals.
    """

    text: str
    token_ids: tuple[int, ...]
    accepted: int
    finish_reason: FinishReason | None
