"""Moves the size of activations into the weights that multiply them, channel by channel.

An activation whose channels differ in size by orders loses its small ones when a row shares one
scale. Dividing a channel by s before a linear layer and multiplying the layer's column by s changes
no product; what is divided is the norm's weight or the layer before, so nothing is computed for it
(SmoothQuant, Xiao et al. 2023, equation 4 with half the strength on either side).

Every s is a power of two: multiplying by it rounds nothing, so a smoothed model in floats gives the
very numbers that it gave before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "NO_SMOOTHING",
    "Seam",
    "Smoothing",
    "find_exponents",
    "make_smoothing",
]

# Far beyond what is ever needed, and far from where float32 ends.
_LARGEST_EXPONENT: Final = 24
_LEAST_SIZE: Final = np.float32(1e-6)
_WEIGHT: Final = ".weight"
_BIAS: Final = ".bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """A place where channels can be scaled: what makes them, and what multiplies them.

    Args:
        before: modules whose output features are divided: a norm, or a linear layer.
        after: linear layers whose columns are multiplied.
        repeats: how often a run of `width` channels of `before` is read in `after`: a value head
            is read by each query head of its group.
        width: channels of such a run; 0 when nothing repeats.
    """

    before: str
    after: tuple[str, ...]
    repeats: int = 1
    width: int = 0

    def spread(self, of_before: NDArray[np.int8]) -> NDArray[np.int8]:
        """Exponents of the channels as `after` reads them."""
        if self.repeats == 1:
            return of_before
        runs = of_before.reshape(-1, 1, self.width)
        return np.repeat(runs, self.repeats, axis=1).reshape(-1)

    def gather(self, of_after: NDArray[np.float32]) -> NDArray[np.float32]:
        """The largest size of each channel of `before` among its readers."""
        if self.repeats == 1:
            return of_after
        runs: NDArray[np.float32] = of_after.reshape(-1, self.repeats, self.width).max(axis=1)
        return runs.reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoothing:
    """Powers of two by parameter.

    Args:
        rows: exponents [output features] by which a parameter's rows are divided.
        columns: exponents [input features] by which its columns are multiplied.
    """

    rows: Mapping[str, NDArray[np.int8]] = field(default_factory=dict)
    columns: Mapping[str, NDArray[np.int8]] = field(default_factory=dict)

    def apply(self, parameter: str, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """The parameter as the smoothed model has it."""
        if (exponents := self.rows.get(parameter)) is not None:
            factors = -exponents.astype(np.int32)
            array = np.ldexp(array, factors if array.ndim == 1 else factors[:, np.newaxis])
        if (exponents := self.columns.get(parameter)) is not None:
            array = np.ldexp(array, exponents.astype(np.int32))
        return array

    @property
    def parameters(self) -> frozenset[str]:
        """Those that it changes."""
        return frozenset(self.rows) | frozenset(self.columns)


NO_SMOOTHING: Final = Smoothing()


def find_exponents(
    activations: NDArray[np.float32], weights: NDArray[np.float32]
) -> NDArray[np.int8]:
    """Exponents of s = sqrt(activations / weights), their mean at 0.

    Args:
        activations: [channels] the largest size of each.
        weights: [channels] the largest size of the weights that multiply it.
    """
    ratio = np.maximum(activations, _LEAST_SIZE) / np.maximum(weights, _LEAST_SIZE)
    logs = np.log2(ratio) / 2
    exponents = np.rint(logs - logs.mean())
    limited: NDArray[np.int8] = np.clip(exponents, -_LARGEST_EXPONENT, _LARGEST_EXPONENT).astype(
        np.int8
    )
    return limited


def make_smoothing(
    seams: Sequence[Seam],
    activations: Mapping[str, NDArray[np.float32]],
    weights: Mapping[str, NDArray[np.float32]],
) -> Smoothing:
    """Exponents for every seam.

    Args:
        seams: of the model; no layer is before two of them, nor after two.
        activations: by linear layer the largest size of each of its input channels.
        weights: likewise of its columns.
    """
    rows: dict[str, NDArray[np.int8]] = {}
    columns: dict[str, NDArray[np.int8]] = {}
    for seam in seams:
        sizes = np.maximum.reduce([weights[layer] for layer in seam.after])
        exponents = find_exponents(seam.gather(activations[seam.after[0]]), seam.gather(sizes))
        for suffix in (_WEIGHT, _BIAS):
            rows[seam.before + suffix] = exponents
        for layer in seam.after:
            columns[layer + _WEIGHT] = seam.spread(exponents)
    return Smoothing(rows=rows, columns=columns)
