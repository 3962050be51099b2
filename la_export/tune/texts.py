"""Texts that a model wrote for its lookaheads to learn from: prompts, and its greedy answers."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Final

from pydantic import Field, ValidationError

from la_runtime.errors import HostError, UsageError
from la_runtime.records import Record

__all__ = ["OwnText", "TextFile", "cut_loop", "read_texts", "write_texts"]

# An answer goes round in circles from where a run of so many tokens stands for the third time.
_RUN: Final = 4
_TIMES: Final = 3


class OwnText(Record):
    """One text.

    Args:
        token_ids: a prompt and the model's greedy answer.
        answered_from: index of the answer's first token.
    """

    token_ids: tuple[int, ...] = Field(min_length=2)
    answered_from: int = Field(ge=1)

    @property
    def answer_length(self) -> int:
        """Tokens of the answer."""
        return len(self.token_ids) - self.answered_from


class TextFile(Record):
    """Texts of one model.

    Args:
        model_digest: of the weights that wrote them.
        num_begun: prompts begun so far; the next one's seed.
        seconds: that writing them took.
        held_out: what nothing is learnt from.
        training: the others, in the order of their seeds.
    """

    model_digest: str
    num_begun: int = Field(ge=0)
    seconds: float = Field(ge=0)
    held_out: tuple[OwnText, ...]
    training: tuple[OwnText, ...]

    @property
    def num_texts(self) -> int:
        """All of them."""
        return len(self.held_out) + len(self.training)


def cut_loop(text: OwnText) -> OwnText:
    """The text up to where its answer begins to go round in circles.

    A draft that copies what stood there before is right about circles; lookaheads need not learn
    them.
    """
    answer = text.token_ids[text.answered_from :]
    seen: Counter[tuple[int, ...]] = Counter()
    for start in range(len(answer) - _RUN + 1):
        run = answer[start : start + _RUN]
        seen[run] += 1
        if seen[run] == _TIMES:
            end = text.answered_from + start
            return text.model_copy(update={"token_ids": text.token_ids[:end]})
    return text


def write_texts(path: Path, file: TextFile) -> None:
    """Write in one step.

    Raises:
        HostError: the file cannot be written.
    """
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(file.model_dump_json(), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise HostError(f"{path} cannot be written: {error.strerror or error}") from error


def read_texts(path: Path, model_digest: str) -> TextFile:
    """What was written there; nothing yet when there is no file.

    Raises:
        UsageError: it is another model's, or damaged.
    """
    try:
        found = TextFile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return TextFile(
            model_digest=model_digest, num_begun=0, seconds=0.0, held_out=(), training=()
        )
    except OSError as error:
        raise HostError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        raise UsageError(
            f"{path} holds no texts of a tuning that was begun; remove its folder"
        ) from error
    if found.model_digest != model_digest:
        raise UsageError(
            f"{path} was written by another model; remove its folder or choose another --out"
        )
    return found
