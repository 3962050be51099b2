"""Which tokens of a row may be drawn: `top_k`, `top_p`, `min_p`, and how close each was to a cut.

Pure functions of scores. They read a row block by block: no array of the vocabulary's size is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "NEAR",
    "Filtered",
    "filter_scores",
    "find_above",
    "rank_best",
    "sum_exp",
    "vocabulary_blocks",
]

# Cut tokens farther from their cut than this are not listed: no rounding brings them back.
NEAR: Final = 0.05
_BLOCK: Final = 8192
_STRETCH: Final = 64
_LOWEST_FINITE: Final = float(np.finfo(np.float32).min)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """What the filters left of a row. Distances are differences between two scores.

    Args:
        ids: [survivors] token ids that may be drawn, ascending.
        slack: [survivors] how far each is from being cut; infinite when no filter is near.
        cut_ids: tokens that were cut by less than `NEAR`.
        cut_by: how far each of those is from surviving.
    """

    ids: NDArray[np.int64]
    slack: NDArray[np.float64]
    cut_ids: NDArray[np.int64]
    cut_by: NDArray[np.float64]


def filter_scores(
    scores: NDArray[np.float32], *, top_k: int, top_p: float, min_p: float
) -> Filtered:
    """Apply the filters, each over what the one before it left. Ties at a cut go to low ids.

    The distance to the cut of `top_p` is the difference between the log-odds of the probability
    before a token and those of `top_p`: moving every score by at most d moves it by at most 2 d,
    as it does the difference between two scores.

    Args:
        scores: [vocab_size], already divided by the temperature; -inf never survives.
        top_k: see `SamplingParams`; so the others.
        top_p: in (0, 1].
        min_p: in [0, 1].
    """
    top_k = 0 if top_k >= len(scores) else top_k
    best = float(scores.max())
    kth = _kth_best(scores, top_k) if top_k else -math.inf
    floors = [kth]
    total = 0.0
    if top_p < 1.0:
        total = sum_exp(scores, best)
        # All tokens of less than (1 - top_p) / vocab_size together cannot fill what is left over.
        floors.append(best + math.log(total) + math.log1p(-top_p) - math.log(len(scores)))
    if min_p > 0.0:
        floors.append(best + math.log(min_p))
    ranked = _rank_above(scores, (kth if top_k else max(floors)) - NEAR)
    values = scores[ranked].astype(np.float64)  # best first
    cuts = _Cuts(len(ranked))
    if top_k:
        cuts.add_after(values, top_k)
    if top_p < 1.0:
        weights = np.exp(values - best)
        if top_k:
            weights[top_k:] = 0.0
            total = float(weights.sum())
        before = np.cumsum(weights) - weights
        is_kept = before < top_p * total
        cuts.add_after(values, int(np.count_nonzero(is_kept)))
        cuts.add_either(is_kept, np.abs(_log_odds(before / total) - _log_odds(np.array(top_p))))
    if min_p > 0.0:
        least = best + math.log(min_p)
        cuts.add(values >= least, np.abs(values - least))
    return cuts.apply(ranked)


class _Cuts:
    """The filters' verdicts over ranked tokens, and the distance of each token to its verdict."""

    def __init__(self, count: int) -> None:
        self._is_kept = np.ones(count, dtype=np.bool_)
        self._slack = np.full(count, np.inf)
        self._cut_by = np.zeros(count)

    def add(self, is_kept: NDArray[np.bool_], distance: NDArray[np.float64]) -> None:
        self._is_kept &= is_kept
        self._slack[is_kept] = np.minimum(self._slack, distance)[is_kept]
        self._cut_by[~is_kept] = np.maximum(self._cut_by, distance)[~is_kept]

    def add_after(self, values: NDArray[np.float64], count: int) -> None:
        """Keep the first `count`; a token changes sides by changing places at the cut."""
        is_kept = np.arange(len(values)) < count
        distance = np.full(len(values), np.inf)
        if count < len(values):
            distance = np.where(is_kept, values - values[count], values[count - 1] - values)
        self.add(is_kept, distance)

    def add_either(self, is_kept: NDArray[np.bool_], distance: NDArray[np.float64]) -> None:
        """Another way to the other side of the filter added last: the shorter one counts."""
        self._slack[is_kept] = np.minimum(self._slack, distance)[is_kept]
        self._cut_by[~is_kept] = np.minimum(self._cut_by, distance)[~is_kept]

    def apply(self, ranked: NDArray[np.int64]) -> Filtered:
        kept = np.flatnonzero(self._is_kept)
        kept = kept[np.argsort(ranked[kept])]
        near = np.flatnonzero(~self._is_kept & (self._cut_by < NEAR))
        return Filtered(
            ids=ranked[kept],
            slack=self._slack[kept],
            cut_ids=ranked[near],
            cut_by=self._cut_by[near],
        )


def _log_odds(share: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        share = np.clip(share, 0.0, 1.0)
        return np.asarray(np.log(share) - np.log1p(-share))


def rank_best(scores: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The `count` best finite ids, best first, ties to the lowest id."""
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    return _rank_above(scores, _kth_best(scores, min(count, len(scores))))[:count]


def sum_exp(scores: NDArray[np.float32], peak: float) -> float:
    """Sum of exp(score - peak) over a row."""
    return sum(
        float(np.exp(scores[block] - np.float32(peak)).sum(dtype=np.float64))
        for block in vocabulary_blocks(len(scores))
    )


def vocabulary_blocks(vocab_size: int) -> Iterator[slice]:
    """Slices that cover a row, each small enough to stay in a cache."""
    for start in range(0, vocab_size, _BLOCK):
        yield slice(start, min(start + _BLOCK, vocab_size))


def find_above(scores: NDArray[np.float32], floor: float) -> NDArray[np.int64]:
    """Finite ids with at least this score, ascending."""
    least = max(floor, _LOWEST_FINITE)
    return np.concatenate(
        [
            block.start + np.flatnonzero(scores[block] >= least)
            for block in vocabulary_blocks(len(scores))
        ]
    )


def _kth_best(scores: NDArray[np.float32], k: int) -> float:
    """The k-th highest score, k from 1 to the row's length; -inf when fewer are finite.

    The k-th highest of the peaks of stretches of the row has k scores above it or equal, and few
    more.
    """
    floor, num_stretches = -math.inf, len(scores) // _STRETCH
    if k <= num_stretches:
        peaks = scores[: num_stretches * _STRETCH].reshape(-1, _STRETCH).max(axis=1)
        floor = float(np.partition(peaks, -k)[-k])
    ids = find_above(scores, floor)
    return float(np.partition(scores[ids], -k)[-k]) if len(ids) >= k else -math.inf


def _rank_above(scores: NDArray[np.float32], floor: float) -> NDArray[np.int64]:
    """Finite ids with at least this score, best first, ties to the lowest id."""
    ids = find_above(scores, floor)
    return ids[np.argsort(-scores[ids], kind="stable")]
