"""Ways of decoding a prompt, and the answers they gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from la_export.bench.speed.record import Selection
from la_runtime.layout import Layout
from la_runtime.sampling import SamplingParams, Select
from la_runtime.source_names import SourceName
from la_runtime.stats import GenerationStats

__all__ = ["PLAINLY", "Answer", "Way", "make_ways"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How to decode.

    Args:
        selection: how proposals become output.
        k: lookahead length; 0 is plain.
        layout: of `exact`; None for the others.
        sources: of `planned`; none for the others.
        tau: of `threshold`; None for the others.
    """

    selection: Selection
    k: int
    layout: Layout | None = None
    sources: tuple[SourceName, ...] = ()
    tau: float | None = None

    @property
    def lossless(self) -> bool:
        """Whether the tokens have to be those of plain decoding."""
        return self.selection is not Selection.THRESHOLD

    def params(self, new_tokens: int) -> SamplingParams:
        """Greedy, until the end of the text or so many tokens."""
        select = Select.THRESHOLD if self.selection is Selection.THRESHOLD else Select.EXACT
        return SamplingParams(
            max_new_tokens=new_tokens,
            k=self.k,
            select=select,
            layout=self.layout,
            sources=self.sources or None,
            tau=self.tau,
        )


PLAINLY: Final = Way(selection=Selection.PLAIN, k=0)


def make_ways(
    lengths: Sequence[int],
    *,
    layouts: Sequence[Layout],
    selections: Sequence[Selection],
    sources: Sequence[Sequence[SourceName]] = (),
    tau: float | None,
) -> tuple[Way, ...]:
    """Plain decoding, then with every set of sources, then every k in every layout and selection.

    Args:
        lengths: values of k; 0 adds nothing.
        layouts: of exact decoding.
        selections: other than plain.
        sources: sets of them, for `planned`.
        tau: of `threshold`.
    """
    ways = [PLAINLY]
    if Selection.PLANNED in selections:
        k = max(lengths, default=0)
        ways += [Way(selection=Selection.PLANNED, k=k, sources=tuple(some)) for some in sources]
    for k in (length for length in lengths if length > 0):
        if Selection.EXACT in selections:
            ways += [Way(selection=Selection.EXACT, k=k, layout=layout) for layout in layouts]
        if Selection.THRESHOLD in selections:
            ways.append(Way(selection=Selection.THRESHOLD, k=k, tau=tau))
    return tuple(ways)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a bundle said to a question, and what that took.

    Args:
        question: its name.
        category: of the question.
        token_ids: the answer.
        stats: counts and times.
    """

    question: str
    category: str
    token_ids: tuple[int, ...]
    stats: GenerationStats
