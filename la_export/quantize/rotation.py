"""Turns what linear layers read, so that no channel of it is larger than the others.

Decoders keep a few channels that are ten times the size of the rest, and a row of integers has one
scale. Multiplied by an orthogonal matrix Q a row keeps its length, so `RMSNorm` without its weight
gives the turned row of what it gave; Q goes into every weight that writes or reads the stream, and
the norms' weights into those that read it (QuaRot, Ashkboos et al. 2024, section 4.1). In floats
the model says what it said, up to their rounding.

Three products of floats are left to compute. A lookahead vector is given unturned. The table of
tokens may be the head's too, and cannot hold the last norm's weight g for the one and not for the
other: what the head reads is turned back, scaled and turned again, M = Q^T diag(g) Q. And what the
last layer of an MLP reads comes from an activation function, so it is turned where it is, in short
blocks of channels by a Hadamard matrix: for one output feature the layer multiplies a channel once,
and the block of 64 multiplies it 64 times, 11 % of the layer with SmolLM2-135M's 576 features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_export.quantize.chunks import for_each_chunk

__all__ = [
    "BLOCK_ROTATION",
    "HEAD_ROTATION",
    "LOOKAHEAD_ROTATION",
    "ROTATION_PRODUCTS",
    "Basis",
    "Rotation",
    "largest_block",
    "make_basis",
]

HEAD_ROTATION: Final = "rotation.head"
LOOKAHEAD_ROTATION: Final = "rotation.lookaheads"
BLOCK_ROTATION: Final = "rotation.block"
ROTATION_PRODUCTS: Final = (LOOKAHEAD_ROTATION, HEAD_ROTATION, BLOCK_ROTATION)
_SEED: Final = 1729
# Rows turned at a time, in float64.
_CHUNK: Final = 256
# Of the last axis' matrix.
_LARGEST_FACTOR: Final = 64
# 32 and 128 lose about as little.
_LARGEST_BLOCK: Final = 64

Matrix = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """Q = diag(signs) (odd ⊗ H) / sqrt(p), with H the Hadamard matrix of size p, a power of two.

    Args:
        signs: [size] int8, 1 or -1.
        odd: [size / p, size / p] float64, orthogonal.

    Raises:
        ValueError: they are not.
    """

    signs: NDArray[np.int8]
    odd: NDArray[np.float64]

    def __post_init__(self) -> None:
        if self.signs.ndim != 1 or not np.all(np.abs(self.signs) == 1):
            raise ValueError("signs are a vector of 1 and -1")
        side = len(self.odd)
        if self.odd.shape != (side, side) or not side or self.size % side:
            raise ValueError(f"{list(self.odd.shape)} is no odd part of {self.size} channels")
        power = self.size // side
        if power & (power - 1):
            raise ValueError(f"{power} is no power of two")
        if not np.allclose(self.odd @ self.odd.T, np.eye(side), atol=1e-9):
            raise ValueError("the odd part is not orthogonal")

    @property
    def size(self) -> int:
        """Channels of the stream."""
        return len(self.signs)

    def turn(self, rows: Matrix) -> Matrix:
        """[rows, size] of rows times Q: in float64, rounded once."""
        turned = np.empty(rows.shape, np.float32)

        def turn(here: slice) -> None:
            turned[here] = self._turn(rows[here].astype(np.float64))

        for_each_chunk(len(rows), _CHUNK, turn)
        return turned

    def turn_columns(self, matrix: Matrix) -> Matrix:
        """[size, columns] of Q^T times a matrix."""
        return np.ascontiguousarray(self.turn(matrix.T).T)

    def matrix(self) -> Matrix:
        """Q itself, [size, size]."""
        return self.turn(np.eye(self.size, dtype=np.float32))

    def conjugate(self, diagonal: Matrix) -> Matrix:
        """Q^T diag(diagonal) Q, [size, size]."""
        return self.turn_columns(self.turn(np.diag(diagonal)))

    def _turn(self, rows: NDArray[np.float64]) -> Matrix:
        count, odd = len(rows), len(self.odd)
        turned = _transform((rows * self.signs).reshape(count, odd, -1))
        turned = np.matmul(self.odd.T, turned).reshape(count, self.size)
        rounded: Matrix = turned.astype(np.float32)
        return rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Which parameters the turn of the stream changes, and how.

    Args:
        basis: Q.
        gains: weights of norms by parameter, each [size]; the turned model's are 1.
        readers: by parameter that multiplies a normalized stream, the norm's parameter.
        tables: parameters whose rows are in the stream's channels: embedding and head.
        writers: parameters whose output features are the stream's: weights and biases.
        last: the norm's parameter before the head.
        blocked: weights whose input channels are turned in blocks.
        block: channels of such a block, a power of two.

    Raises:
        ValueError: the parts do not belong together.
    """

    basis: Basis
    gains: Mapping[str, Matrix]
    readers: Mapping[str, str]
    tables: frozenset[str]
    writers: frozenset[str]
    last: str
    blocked: frozenset[str]
    block: int

    def __post_init__(self) -> None:
        if self.block < 1 or self.block & (self.block - 1):
            raise ValueError(f"a block of {self.block} channels is no power of two")
        if unknown := {self.last, *self.readers.values()} - self.gains.keys():
            raise ValueError(f"there is no weight of {', '.join(sorted(unknown))}")
        for name, gain in self.gains.items():
            if gain.shape != (self.basis.size,) or not np.isfinite(gain).all():
                raise ValueError(f"{name} is no vector of {self.basis.size} finite numbers")

    def apply(self, parameter: str, array: Matrix) -> Matrix:
        """The parameter as the turned model has it."""
        if parameter in self.gains:
            return np.ones_like(array)
        array = self.turn_inputs(parameter, array)
        if parameter in self.tables:
            return self.basis.turn(array)
        return self.turn_outputs(parameter, array)

    def turn_inputs(self, parameter: str, array: Matrix) -> Matrix:
        """[rows, in_features] that multiply what this weight multiplies, as they are then."""
        if parameter in self.blocked:
            array = self._turn_blocks(array)
        if parameter in self.readers:
            array = self.basis.turn(array * self.gains[self.readers[parameter]])
        return array

    def _turn_blocks(self, array: Matrix) -> Matrix:
        turned = np.empty(array.shape, np.float32)

        def turn(here: slice) -> None:
            runs = array[here].astype(np.float64).reshape(-1, self.block)
            turned[here] = _transform(runs).reshape(-1, array.shape[1])

        for_each_chunk(len(array), _CHUNK, turn)
        return turned

    def turn_outputs(self, parameter: str, array: Matrix) -> Matrix:
        """[out_features, ...] that give what this parameter gives, as they are then."""
        if parameter in self.writers:
            turned = self.basis.turn_columns(array.reshape(self.basis.size, -1))
            return turned.reshape(array.shape)
        return array

    def product(self, name: str) -> Matrix:
        """One of `ROTATION_PRODUCTS`, the square matrices that stay in the graph."""
        if name == LOOKAHEAD_ROTATION:
            return self.basis.matrix()
        if name == HEAD_ROTATION:
            return self.basis.conjugate(self.gains[self.last])
        return _transform(np.eye(self.block)).astype(np.float32)


def largest_block(num_channels: int) -> int:
    """Channels of a block where so many are turned."""
    return min(num_channels & -num_channels, _LARGEST_BLOCK)


def make_basis(size: int) -> Basis:
    """A basis of as many channels, the same every time.

    The odd part of the size gets a random orthogonal matrix, since no Hadamard matrix has it.
    """
    rng = np.random.default_rng(_SEED)
    power = size & -size
    odd, _ = np.linalg.qr(rng.standard_normal((size // power, size // power)))
    signs = rng.choice(np.array([-1, 1], np.int8), size)
    return Basis(signs=signs, odd=odd)


def _transform(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """[..., size] times the Hadamard matrix of that size over its root.

    The matrix is a Kronecker product of two, each of which multiplies an axis of its own.
    """
    size = rows.shape[-1]
    last = min(size, _LARGEST_FACTOR)
    parts = rows.reshape(-1, size // last, last) @ _hadamard(last)
    transformed = np.matmul(_hadamard(size // last), parts).reshape(rows.shape)
    scaled: NDArray[np.float64] = transformed / np.sqrt(size)
    return scaled


@cache
def _hadamard(side: int) -> NDArray[np.float64]:
    """[side, side] of 1 and -1, symmetric; Sylvester's construction."""
    matrix = np.ones((1, 1))
    while len(matrix) < side:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix
