"""Where a sequence ends."""

from __future__ import annotations

from collections.abc import Sequence, Set
from enum import StrEnum

__all__ = ["FinishReason", "cut_at_end"]


class FinishReason(StrEnum):
    """Why a sequence ended: an end-of-sequence token, its token limit, or the model's context."""

    EOS = "eos"
    LENGTH = "length"
    CONTEXT = "context"


def cut_at_end(
    token_ids: Sequence[int], *, eos_token_ids: Set[int], room: int, at_room: FinishReason
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Cut emitted tokens at the first end inside them.

    Args:
        token_ids: tokens accepted by one pass.
        eos_token_ids: tokens that end a sequence; the first one is kept.
        room: how many more tokens may be emitted, at least 1.
        at_room: the reason to give when the room is used up.

    Returns:
        The tokens to emit, and the reason if the sequence ends with the last of them.
    """
    for count, token_id in enumerate(token_ids, 1):
        if token_id in eos_token_ids:
            return tuple(token_ids[:count]), FinishReason.EOS
        if count == room:
            return tuple(token_ids[:count]), at_room
    return tuple(token_ids), None
