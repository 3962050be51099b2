"""A low-rank adapter: what lookahead rows add to the products of a model's linear layers.

    y = W x                          of a token's row: the model's own, never touched
    y = W x + expand (reduce x)      of a lookahead's row

Layers that read one activation share one `reduce` (LoRA, Hu et al. 2021, of the layers' joint
weight).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "NO_ADAPTER",
    "Adapter",
    "AdapterPair",
    "expand_name",
    "is_expansion",
    "is_of_adapter",
]

Matrix = NDArray[np.float32]

_REDUCE: Final = ".adapter_reduce"
_EXPAND: Final = ".adapter_expand"


def expand_name(layer: str) -> str:
    """What a layer's own part is called among a model's parameters."""
    return layer + _EXPAND


def is_expansion(parameter: str) -> bool:
    """Whether a parameter is a layer's own part of an adapter."""
    return parameter.endswith(_EXPAND)


def is_of_adapter(parameter: str) -> bool:
    """Whether a parameter is an adapter's."""
    return parameter.endswith((_REDUCE, _EXPAND))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPair:
    """What is added where some linear layers read one activation.

    Args:
        layers: names of the linear layers, in the order of their outputs in `expand`.
        sizes: output features of each.
        reduce: [rank, in_features] float32.
        expand: [sum of sizes, rank] float32.

    Raises:
        ValueError: the parts do not belong together.
    """

    layers: tuple[str, ...]
    sizes: tuple[int, ...]
    reduce: Matrix
    expand: Matrix

    def __post_init__(self) -> None:
        if not self.layers or len(self.layers) != len(self.sizes):
            raise ValueError(f"{len(self.layers)} layers have {len(self.sizes)} sizes")
        for name, matrix in (("reduce", self.reduce), ("expand", self.expand)):
            if matrix.ndim != 2 or not np.isfinite(matrix).all():
                raise ValueError(f"{name} of {self.layers[0]} is no matrix of finite numbers")
        expected = (sum(self.sizes), len(self.reduce))
        if self.expand.shape != expected:
            raise ValueError(
                f"expand of {self.layers[0]} has shape {list(self.expand.shape)}, expected "
                f"{list(expected)}"
            )

    @property
    def rank(self) -> int:
        """Width of the middle."""
        return len(self.reduce)

    @property
    def reduce_name(self) -> str:
        """What the shared part is called among a model's parameters."""
        return self.layers[0] + _REDUCE

    def parts(self) -> Iterator[tuple[str, Matrix]]:
        """Each layer with its own rows of `expand`."""
        bounds = np.cumsum(self.sizes)[:-1]
        yield from zip(self.layers, np.split(self.expand, bounds), strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Pairs, none of which share a layer; none at all leaves lookaheads to their vectors."""

    pairs: tuple[AdapterPair, ...] = ()

    def __post_init__(self) -> None:
        names = [name for pair in self.pairs for name in pair.layers]
        if len(set(names)) != len(names):
            raise ValueError("two pairs of an adapter are of one layer")

    @property
    def num_weights(self) -> int:
        """Numbers beside the model's."""
        return sum(pair.reduce.size + pair.expand.size for pair in self.pairs)

    def parameters(self) -> Iterator[tuple[str, Matrix]]:
        """Every array by the name that it has among a model's parameters."""
        for pair in self.pairs:
            yield pair.reduce_name, pair.reduce
            for layer, part in pair.parts():
                yield expand_name(layer), part


NO_ADAPTER: Final = Adapter()
