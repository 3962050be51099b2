"""Where a sequence ends."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Protocol

__all__ = ["Ending", "FinishReason", "TokenListener"]


class FinishReason(StrEnum):
    """Why a sequence ended.

    ``eos``: an end-of-sequence token. ``stop``: a stop string or stop token of the request.
    ``length``: the request's limit. ``context``: the model's. ``cancelled``: the caller, or the
    engine closed.
    """

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"
    CANCELLED = "cancelled"


class TokenListener(Protocol):
    """Hears the emitted tokens of a sequence but an end token, and may end it."""

    def push(self, token_id: int) -> bool:
        """A token; True ends the sequence with it."""
        ...


class Ending:
    """Hears a sequence token by token, and knows with which one it ends.

    Args:
        eos_token_ids: tokens that end it as ``eos``.
        stop_token_ids: tokens that end it as ``stop``.
        max_new_tokens: the request's limit.
        context_room: tokens that fit into the context behind the prompt, at least 1.
        listener: may end it as ``stop``.
    """

    def __init__(
        self,
        *,
        eos_token_ids: Collection[int],
        stop_token_ids: Collection[int],
        max_new_tokens: int,
        context_room: int,
        listener: TokenListener | None = None,
    ) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._listener = listener
        self._at_limit = (
            FinishReason.LENGTH if max_new_tokens <= context_room else FinishReason.CONTEXT
        )
        self.room = min(max_new_tokens, context_room)  # tokens that may still come

    def hear(self, token_id: int) -> FinishReason | None:
        """One more token; the reason if the sequence ends with it."""
        self.room -= 1
        if token_id in self._eos_token_ids:
            return FinishReason.EOS
        if token_id in self._stop_token_ids:
            return FinishReason.STOP
        if self._listener is not None and self._listener.push(token_id):
            return FinishReason.STOP
        return self._at_limit if self.room == 0 else None
