"""What stands around a question that a model asks itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from la_runtime.chat import CHAT_TEMPLATE_NAME, ChatTemplate
from la_runtime.errors import UsageError
from la_runtime.tokenizer import Tokenizer

__all__ = ["QuestionFrame", "read_frame"]

# A template that takes more of a text than this leaves too little for the text.
_MOST_TEMPLATE_SHARE: Final = 1 / 4
_PLACE: Final = "<<question>>"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionFrame:
    """Tokens of the chat template before a question and behind it.

    Args:
        before: what a text begins with; at least one token.
        behind: between question and answer; None where a model has no chat template: it asks
            nothing then, and its text begins at once.
    """

    before: tuple[int, ...]
    behind: tuple[int, ...] | None

    def __post_init__(self) -> None:
        assert self.before, "a text begins with a token"


def read_frame(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    bos_token_id: int | None,
    eos_token_ids: Sequence[int],
    length: int,
) -> QuestionFrame:
    """The chat template around a question, or the beginning of a text where there is none.

    Args:
        folder: of the tokenizer's files.
        tokenizer: loaded from it.
        bos_token_id: what a text begins with, if the model says so.
        eos_token_ids: what ends one.
        length: tokens of a whole text.
    """
    if (folder / CHAT_TEMPLATE_NAME).is_file():
        template = ChatTemplate.load(folder)
        try:
            text = template.render(
                [{"role": "user", "content": _PLACE}],
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
            )
        except UsageError:
            text = ""  # it refuses a question that stands alone
        before, found, behind = text.partition(_PLACE)
        first, last = _encode(tokenizer, before), _encode(tokenizer, behind)
        if found and first and len(first) + len(last) <= length * _MOST_TEMPLATE_SHARE:
            return QuestionFrame(before=first, behind=last)
    return QuestionFrame(before=_beginning(bos_token_id, eos_token_ids), behind=None)


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()


def _beginning(bos_token_id: int | None, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The token for it, else the one that ended the text before it."""
    if bos_token_id is not None:
        return (bos_token_id,)
    return tuple(eos_token_ids[:1]) or (0,)
