"""Windows: the stretches of tokens that are scored, each by itself. Pure functions of values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final

from pydantic import Field, model_validator

from la_runtime.records import Record

__all__ = ["WINDOW", "Window", "count_scored", "cut_windows", "limit_windows"]

WINDOW: Final = 512


class Window(Record):
    """Tokens that a model reads from an empty cache, and those of them whose probability counts.

    Args:
        token_ids: [tokens] at positions 0, 1, 2, ...
        scored_from: the first that counts; the ones before it are given.
    """

    token_ids: tuple[Annotated[int, Field(ge=0)], ...]
    scored_from: int = Field(ge=1)

    @model_validator(mode="after")
    def _check_scored(self) -> Window:
        if self.scored_from >= len(self.token_ids):
            raise ValueError(
                f"expected tokens behind the first {self.scored_from}, got {len(self.token_ids)}"
            )
        return self

    @property
    def num_scored(self) -> int:
        """How many tokens count."""
        return len(self.token_ids) - self.scored_from


def count_scored(windows: Iterable[Window]) -> int:
    """Tokens that count in all of them."""
    return sum(window.num_scored for window in windows)


def cut_windows(
    token_ids: Sequence[int], *, size: int = WINDOW, prefix: Sequence[int] = ()
) -> Iterator[Window]:
    """Cut a text into windows that do not overlap.

    Args:
        token_ids: of the text.
        size: tokens of a window, at least two more than the prefix has.
        prefix: tokens that begin each window and do not count; without any, its first does not.
    """
    given = max(1, len(prefix))
    step = size - len(prefix)
    for start in range(0, len(token_ids), step):
        window = (*prefix, *token_ids[start : start + step])
        if len(window) > given:
            yield Window(token_ids=window, scored_from=given)


def limit_windows(windows: Iterable[Window], num_tokens: int) -> tuple[Window, ...]:
    """The first windows with so many tokens that count, the last one cut to fit."""
    kept: list[Window] = []
    left = num_tokens
    for window in windows:
        if left <= 0:
            break
        end = window.scored_from + min(left, window.num_scored)
        kept.append(Window(token_ids=window.token_ids[:end], scored_from=window.scored_from))
        left -= kept[-1].num_scored
    return tuple(kept)
