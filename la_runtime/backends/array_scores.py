"""Which of the graph's outputs a pass asks for, and how they are read from arrays."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_runtime.backends.base import Outputs
from la_runtime.contract import Name

__all__ = ["ArrayScores", "DeviceScores", "score_names"]

# Every step reads them, and an enumeration calls a function to find a member.
_TOP_IDS: Final = Name.TOP_IDS
_TOP_LOGITS: Final = Name.TOP_LOGITS


@cache
def score_names(outputs: Outputs, omits: tuple[str, ...]) -> tuple[Name, ...]:
    """The outputs to compute, each once. Remembered, for every pass asks.

    Args:
        outputs: what will be read.
        omits: outputs that the graph does not have; `logsumexp` is then made from the logits.
    """
    logsumexp_from = Name.LOGITS if Name.LOGSUMEXP in omits else Name.LOGSUMEXP
    names_of = {
        Outputs.TOP: (Name.TOP_IDS, Name.TOP_LOGITS),
        Outputs.LOGSUMEXP: (logsumexp_from,),
        Outputs.LOGITS: (Name.LOGITS,),
    }
    return tuple(dict.fromkeys(name for flag in outputs for name in names_of[flag]))


class ArrayScores:
    """Scores in host memory that is reused, see `Scores`.

    Args:
        scores: what the pass computed, by output.
    """

    def __init__(self, scores: Mapping[str, NDArray[np.generic]]) -> None:
        self._scores = scores

    def top(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """See `Scores.top`."""
        return self._scores[_TOP_IDS], self._scores[_TOP_LOGITS]  # type: ignore[return-value]

    def logsumexp(self) -> NDArray[np.float32]:
        """See `Scores.logsumexp`."""
        if Name.LOGSUMEXP in self._scores:
            return self._scores[Name.LOGSUMEXP]  # type: ignore[return-value]
        logits = self.logits()
        peak = logits.max(axis=-1, keepdims=True)  # [batch, rows, 1]
        summed = np.exp(logits - peak).sum(axis=-1, dtype=np.float64)
        return np.asarray(np.log(summed) + peak[..., 0], dtype=np.float32)

    def logits(self) -> NDArray[np.float32]:
        """See `Scores.logits`."""
        return self._scores[Name.LOGITS]  # type: ignore[return-value]


class DeviceScores(ArrayScores):
    """Scores that came from a device, where the best tokens' order is open among equal logits."""

    def top(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """See `Scores.top`; which of several tokens tied for the last place is there stays open."""
        ids, logits = super().top()
        _order_ties(ids, logits)
        return ids, logits


def _order_ties(ids: NDArray[np.int64], logits: NDArray[np.float32]) -> None:
    """Put the ids of equal neighbours in ascending order, in place; a NaN equals nothing."""
    differs = logits[..., 1:] != logits[..., :-1]
    if differs.all():
        return
    runs = np.zeros(logits.shape, dtype=np.int64)
    np.cumsum(differs, axis=-1, out=runs[..., 1:])
    ids[:] = np.take_along_axis(ids, np.lexsort((ids, runs), axis=-1), axis=-1)
