"""Takes perplexities of every kind of text, and states them as a manifest holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from la_export.perplexity.scoring import Perplexity, ScoreWindows, perplexity_of
from la_export.perplexity.texts import Texts
from la_export.perplexity.windows import WINDOW
from la_runtime.bundle import PerplexityFacts, TextPerplexity

__all__ = ["SOURCE_ARITHMETIC", "Progress", "make_facts", "measure"]

SOURCE_ARITHMETIC: Final = "PyTorch, float32"

Progress = Callable[[str, Perplexity], None]


def measure(
    score_windows: ScoreWindows, texts: Texts, progress: Progress
) -> tuple[Perplexity, ...]:
    """Perplexity of one scorer on each kind of text.

    Args:
        score_windows: scores; see `scoring.ScoreWindows`.
        texts: what it reads.
        progress: is told of each kind of text when it is done.

    Raises:
        NonFiniteScoreError: a log-probability is NaN or infinite.
    """
    found = []
    for kind, windows in texts.kinds:
        found.append(perplexity_of(score_windows, windows))
        progress(kind, found[-1])
    return tuple(found)


def make_facts(
    texts: Texts,
    of_bundle: Sequence[Perplexity],
    of_source: Sequence[Perplexity] | None,
    *,
    backend: str,
    source: str,
) -> PerplexityFacts:
    """What was measured, for the manifest.

    Args:
        texts: that were read.
        of_bundle: its perplexity on each kind.
        of_source: likewise; None where the source was not at hand.
        backend: that ran the bundle.
        source: what the source is.
    """
    sources = [None] * len(of_bundle) if of_source is None else [p.value for p in of_source]
    return PerplexityFacts(
        utc=datetime.now(UTC).isoformat(timespec="seconds"),
        backend=backend,
        source=None if of_source is None else f"{source} in {SOURCE_ARITHMETIC}",
        window=WINDOW,
        own_written_by=texts.own_written_by,
        texts=tuple(
            TextPerplexity(
                text=kind,
                num_tokens=perplexity.num_tokens,
                perplexity=perplexity.value,
                source_perplexity=of_the_source,
            )
            for (kind, _), perplexity, of_the_source in zip(
                texts.kinds, of_bundle, sources, strict=True
            )
        ),
    )
