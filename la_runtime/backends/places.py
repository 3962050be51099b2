"""Cache places of every backend: how many a pass presents, and what audits put into unused ones."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["grown_capacity", "make_spoiled"]

_CAPACITY_STEP = 128
_CAPACITY_SHARE = 0.12
_SPOILED_SCALE = 10.0
_SPOILED_LIMIT = 6e4  # finite in every dtype
_SPOILED_DRAWN = 1 << 20  # numbers to draw; more are repeats


def grown_capacity(needed: int) -> int:
    """Cache places to hold `needed`: the next step of 128 places, or of 12 % when that is more."""
    step = max(_CAPACITY_STEP, math.floor(_CAPACITY_SHARE * needed))
    return -(-needed // step) * step


def make_spoiled(
    used: NDArray[np.float32], shape: tuple[int, ...], seed: int
) -> NDArray[np.float32]:
    """Random K/V for places that hold nothing, see `CacheState.spoil_unused`.

    Args:
        used: the K/V they must outweigh, any shape.
        shape: of the result.
        seed: of the random numbers.
    """
    norm = float(np.sqrt(np.mean(np.square(used)))) if used.size else 1.0
    num_drawn = min(math.prod(shape), _SPOILED_DRAWN)
    drawn = (
        _SPOILED_SCALE * norm * np.random.default_rng(seed).standard_normal(num_drawn, np.float32)
    )
    return np.resize(np.clip(drawn, -_SPOILED_LIMIT, _SPOILED_LIMIT), shape)
