"""The texts whose perplexity is taken, as windows of a bundle's own tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from la_export.perplexity.own_text import (
    Progress,
    find_own_text,
    keep_own_text,
    write_own_text,
)
from la_export.perplexity.windows import (
    WINDOW,
    Window,
    count_scored,
    cut_windows,
    limit_windows,
)
from la_runtime.generation import Engine

__all__ = ["DEFAULT_TOKENS", "PAGES_FOLDER", "Texts", "load_texts"]

DEFAULT_TOKENS: Final = 50_000
PAGES_FOLDER: Final = Path(__file__).parent / "data" / "texts"
_PAGES_SHARE: Final = 1 / 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Windows of both kinds of text.

    Args:
        own: answers that the model wrote.
        pages: pages in the public domain.
        own_written_by: precision of the bundle that wrote the model's own.
    """

    own: tuple[Window, ...]
    pages: tuple[Window, ...]
    own_written_by: str

    @property
    def kinds(self) -> tuple[tuple[str, tuple[Window, ...]], ...]:
        """Name and windows of each kind that there is any of."""
        both = (("the model's own answers", self.own), ("pages in the public domain", self.pages))
        return tuple((kind, windows) for kind, windows in both if windows)


def load_texts(
    engine: Engine, *, num_tokens: int = DEFAULT_TOKENS, progress: Progress | None = None
) -> Texts:
    """The windows of a model: the same ones for every bundle of the same source.

    At most a fifth of the tokens are pages', the rest the model's own. What it has not written
    yet it writes now, and that is kept for the next time.

    Args:
        engine: an opened bundle.
        num_tokens: tokens that count, of all texts together.
        progress: is told how many tokens have been written, if any must be.

    Raises:
        UsageError: the model writes nothing.
        HostError: what it wrote cannot be kept.
    """
    pages = limit_windows(_read_pages(engine), int(num_tokens * _PAGES_SHARE))
    wanted = num_tokens - count_scored(pages)
    own = find_own_text(engine.bundle.manifest)
    if own is None or count_scored(own.windows) < wanted:
        own = write_own_text(engine, wanted, begun=own, progress=progress or _tell_nobody)
        keep_own_text(own)
    return Texts(own=limit_windows(own.windows, wanted), pages=pages, own_written_by=own.written_by)


def _read_pages(engine: Engine) -> Iterator[Window]:
    """Each page by itself, in the order of their names."""
    tokenizer = engine.tokenizer
    prefix = tokenizer.encode("", add_special_tokens=True)
    size = min(WINDOW, engine.bundle.manifest.model.context)
    for path in sorted(PAGES_FOLDER.glob("*.txt")):
        token_ids = tokenizer.encode(path.read_text("utf-8"), add_special_tokens=False)
        yield from cut_windows(token_ids, size=size, prefix=prefix)


def _tell_nobody(num_tokens: int) -> None:
    del num_tokens
