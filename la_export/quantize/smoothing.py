"""Moves the size of activations into the weights that multiply them, channel by channel.

What a norm gives out is handled by `rotation`, and here what stands between two linear layers.

An activation whose channels differ in size by orders loses its small ones when a row shares one
scale. Dividing a channel by s before a linear layer and multiplying the layer's column by s changes
no product; what is divided is the layer before, so nothing is computed for it (SmoothQuant, Xiao
et al. 2023, equation 4, of root mean squares instead of extremes: over strengths from 0.3 to 0.45
SmolLM2-135M's loss hardly changes, where with extremes it does).

Every s is a power of two: multiplying by it rounds nothing, so a smoothed model in floats gives the
very numbers that it gave before, unless its residual stream is turned as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_export.adapter import Adapter, AdapterPair
from la_export.quantize.rotation import Rotation

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
_STRENGTH: Final = 0.4
_WEIGHT: Final = ".weight"
_BIAS: Final = ".bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """A place where channels can be scaled: what makes them, and what multiplies them.

    Args:
        before: linear layer whose output features are divided.
        after: linear layer whose columns are multiplied.
        repeats: how often a run of `width` channels of `before` is read in `after`: a value head
            is read by each query head of its group.
        width: channels of such a run; 0 when nothing repeats.
    """

    before: str
    after: str
    repeats: int = 1
    width: int = 0

    def spread(self, of_before: NDArray[np.int8]) -> NDArray[np.int8]:
        """Exponents of the channels as `after` reads them."""
        if self.repeats == 1:
            return of_before
        runs = of_before.reshape(-1, 1, self.width)
        return np.repeat(runs, self.repeats, axis=1).reshape(-1)

    def gather(self, of_after: NDArray[np.float32]) -> NDArray[np.float32]:
        """The mean square of each channel of `before` over its readers."""
        if self.repeats == 1:
            return of_after
        runs: NDArray[np.float32] = of_after.reshape(-1, self.repeats, self.width).mean(axis=1)
        return runs.reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoothing:
    """What is done to a model's parameters before they are quantized.

    Args:
        rows: exponents [output features] by which a parameter's rows are divided.
        columns: exponents [input features] by which its columns are multiplied.
        rotation: of the residual stream; None leaves it as it is.
    """

    rows: Mapping[str, NDArray[np.int8]] = field(default_factory=dict)
    columns: Mapping[str, NDArray[np.int8]] = field(default_factory=dict)
    rotation: Rotation | None = None

    def apply(self, parameter: str, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """The parameter as the smoothed model has it."""
        array = self._scale_inputs(parameter, self._scale_outputs(parameter, array))
        return array if self.rotation is None else self.rotation.apply(parameter, array)

    def adapt(self, adapter: Adapter) -> Adapter:
        """The adapter of the smoothed model: its products stand beside those of the weights."""
        return Adapter(pairs=tuple(map(self._adapt, adapter.pairs)))

    def _adapt(self, pair: AdapterPair) -> AdapterPair:
        """All layers of a pair read one activation, so any of them says how it is changed."""
        reader = pair.layers[0] + _WEIGHT
        reduce = self._scale_inputs(reader, pair.reduce)
        parts = []
        for layer, part in pair.parts():
            weight = layer + _WEIGHT
            scaled = self._scale_outputs(weight, part)
            if self.rotation is not None:
                scaled = self.rotation.turn_outputs(weight, scaled)
            parts.append(scaled)
        if self.rotation is not None:
            reduce = self.rotation.turn_inputs(reader, reduce)
        return replace(pair, reduce=reduce, expand=np.concatenate(parts))

    def _scale_outputs(self, parameter: str, array: NDArray[np.float32]) -> NDArray[np.float32]:
        if (exponents := self.rows.get(parameter)) is None:
            return array
        factors = -exponents.astype(np.int32)
        scaled: NDArray[np.float32] = np.ldexp(
            array, factors if array.ndim == 1 else factors[:, np.newaxis]
        )
        return scaled

    def _scale_inputs(self, parameter: str, array: NDArray[np.float32]) -> NDArray[np.float32]:
        if (exponents := self.columns.get(parameter)) is None:
            return array
        scaled: NDArray[np.float32] = np.ldexp(array, exponents.astype(np.int32))
        return scaled


NO_SMOOTHING: Final = Smoothing()


def find_exponents(
    activations: NDArray[np.float32], weights: NDArray[np.float32]
) -> NDArray[np.int8]:
    """Exponents of s = activations ** 0.4 / weights ** 0.6, their mean at 0.

    Args:
        activations: [channels] the mean square of each.
        weights: [channels] the mean square of the weights that multiply it.
    """
    sizes = [np.log2(np.maximum(np.sqrt(part), _LEAST_SIZE)) for part in (activations, weights)]
    logs = _STRENGTH * sizes[0] - (1 - _STRENGTH) * sizes[1]
    exponents = np.rint(logs - logs.mean())
    limited: NDArray[np.int8] = np.clip(exponents, -_LARGEST_EXPONENT, _LARGEST_EXPONENT).astype(
        np.int8
    )
    return limited


def make_smoothing(
    seams: Sequence[Seam],
    activations: Mapping[str, NDArray[np.float32]],
    weights: Mapping[str, NDArray[np.float32]],
    *,
    rotation: Rotation | None = None,
) -> Smoothing:
    """Exponents for every seam.

    Args:
        seams: of the model; no layer is before two of them, nor after two.
        activations: by linear layer the mean square of each of its input channels.
        weights: likewise of its columns.
        rotation: of the residual stream.
    """
    rows: dict[str, NDArray[np.int8]] = {}
    columns: dict[str, NDArray[np.int8]] = {}
    for seam in seams:
        exponents = find_exponents(
            seam.gather(activations[seam.after]), seam.gather(weights[seam.after])
        )
        for suffix in (_WEIGHT, _BIAS):
            rows[seam.before + suffix] = exponents
        columns[seam.after + _WEIGHT] = seam.spread(exponents)
    return Smoothing(rows=rows, columns=columns, rotation=rotation)
