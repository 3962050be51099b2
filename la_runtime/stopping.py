"""Where a sequence ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

__all__ = ["FinishReason", "cut_at_end"]


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


def cut_at_end(
    token_ids: Sequence[int],
    *,
    ends_with: Callable[[int], FinishReason | None],
    room: int,
    at_room: FinishReason,
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Cut emitted tokens at the first end inside them.

    Args:
        token_ids: tokens accepted by one pass.
        ends_with: the reason if the sequence ends with this token; asked for each token in order
            until one ends it. That token is kept.
        room: how many more tokens may be emitted, at least 1.
        at_room: the reason to give when the room is used up.

    Returns:
        The tokens to emit, and the reason if the sequence ends with the last of them.
    """
    for count, token_id in enumerate(token_ids, 1):
        reason = ends_with(token_id)
        if reason is None and count == room:
            reason = at_room
        if reason is not None:
            return tuple(token_ids[:count]), reason
    return tuple(token_ids), None
