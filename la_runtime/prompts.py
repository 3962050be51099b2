"""What a caller may give as a prompt, and how one prompt is told from a list of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from la_runtime.errors import UsageError

__all__ = ["Message", "Prompt", "as_lists", "is_messages", "is_single"]

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = "str | Sequence[int] | Sequence[Message]"


def as_lists(prompt: Any) -> Any:
    """NumPy arrays of token ids as lists, alone or in a list of prompts."""
    if isinstance(prompt, np.ndarray):
        return prompt.tolist()
    if isinstance(prompt, list | tuple) and any(isinstance(one, np.ndarray) for one in prompt):
        return [as_lists(one) for one in prompt]
    return prompt


def is_messages(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is a list of chat messages."""
    return bool(prompt) and isinstance(prompt[0], Mapping)


def is_single(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt rather than a list of prompts.

    Raises:
        UsageError: it is empty.
    """
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or is_messages(prompt):
        return True
    if not prompt:
        raise UsageError("the prompt is empty; give text, token ids or chat messages")
    return not isinstance(prompt[0], str | Sequence)
