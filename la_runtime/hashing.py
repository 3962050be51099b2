"""A hash of integers: the same number on every machine, for noise and for the toy model."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["mix"]

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer: a bijection of 64-bit integers that scatters them.

    Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    mixed = values + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
