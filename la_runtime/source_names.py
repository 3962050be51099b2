"""What sources of drafts are called."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["SourceName"]


class SourceName(StrEnum):
    """Where drafts come from.

    ``lookahead``: the slots of the last pass.
    ``suffix``: what followed an earlier occurrence of the sequence's last tokens.
    ``recycled``: what the model thought likely behind a token when it last verified that token.
    """

    LOOKAHEAD = "lookahead"
    SUFFIX = "suffix"
    RECYCLED = "recycled"
