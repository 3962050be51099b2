"""What a manifest says of lookaheads. Light, so that commands may know it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

__all__ = ["UNTUNED", "GroupMask"]

# The origin of lookaheads that nobody taught.
UNTUNED: Final = "untuned"


class GroupMask(StrEnum):
    """What a slot sees of its own group: itself alone, or also the slots before it."""

    STRICT = "strict"
    CAUSAL = "causal"
