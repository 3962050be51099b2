"""What lookahead slots see of their own group. Light, so that commands may know it."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["GroupMask"]


class GroupMask(StrEnum):
    """What a slot sees of its own group: itself alone, or also the slots before it."""

    STRICT = "strict"
    CAUSAL = "causal"
