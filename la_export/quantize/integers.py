"""How floats become integers. Pure functions of arrays; knows no graph and no model.

The rules are the operators' own (`QuantizeLinear`, `MatMulNBits`): symmetric, scale times integer,
ties to even. Weights are quantized here, once; activations by the graph, by `quantize_rows`' rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_export.quantize.chunks import for_each_chunk

__all__ = [
    "BLOCK_SIZE",
    "LEAST_SCALE",
    "QuantizedBlocks",
    "QuantizedRows",
    "quantize_blocks",
    "quantize_rows",
]

BLOCK_SIZE: Final = 32
# The scale of a row that holds zeros alone: any positive number does, and no row's scale is lower,
# so that nothing is divided by zero or by a subnormal.
LEAST_SCALE: Final = np.float32(2.0**-100)
# Rows at a time: what stands between a matrix and its integers is as large as itself.
_CHUNK: Final = 512
_LARGEST_INT8: Final = 127
_LARGEST_INT4: Final = 7
_LEAST_INT4: Final = -8


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedRows:
    """A matrix in int8, a scale for each row.

    Args:
        values: [rows, columns] int8, -127 to 127.
        scales: [rows] float32, at least `LEAST_SCALE`.
    """

    values: NDArray[np.int8]
    scales: NDArray[np.float32]

    def to_float(self) -> NDArray[np.float32]:
        """[rows, columns] the numbers that it stands for."""
        return self.values.astype(np.float32) * self.scales[:, np.newaxis]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedBlocks:
    """A matrix in int4, a scale for each block of columns of each row.

    Args:
        values: [rows, columns] int8, -8 to 7.
        scales: [rows, columns / block_size] float32, at least `LEAST_SCALE` in size.
    """

    values: NDArray[np.int8]
    scales: NDArray[np.float32]

    def to_float(self) -> NDArray[np.float32]:
        """[rows, columns] the numbers that it stands for."""
        block_size = self.values.shape[1] // self.scales.shape[1]
        return self.values.astype(np.float32) * np.repeat(self.scales, block_size, axis=1)


def quantize_rows(matrix: NDArray[np.float32]) -> QuantizedRows:
    """Each row by its largest number: that becomes 127 or -127.

    Of weights, rows are output channels; of activations, what one token is.

    Args:
        matrix: [rows, columns] finite.
    """
    values = np.empty(matrix.shape, np.int8)
    scales = np.empty(len(matrix), np.float32)

    def quantize(here: slice) -> None:
        largest = np.abs(matrix[here]).max(axis=1, initial=0)  # [rows]
        scales[here] = np.maximum(largest * np.float32(1 / _LARGEST_INT8), LEAST_SCALE)
        rounded = np.rint(matrix[here] / scales[here, np.newaxis])
        values[here] = np.clip(rounded, -_LARGEST_INT8, _LARGEST_INT8)

    for_each_chunk(len(matrix), _CHUNK, quantize)
    return QuantizedRows(values=values, scales=scales)


def quantize_blocks(
    matrix: NDArray[np.float32], *, block_size: int = BLOCK_SIZE
) -> QuantizedBlocks:
    """Each block of a row by its number of largest size: that becomes -8.

    The scale is negative where that number is positive, so that all sixteen values are used, as
    llama.cpp's Q4_0 does.

    Args:
        matrix: [rows, columns] finite; columns are a multiple of `block_size`.
        block_size: columns that share a scale.
    """
    rows, columns = matrix.shape
    assert columns % block_size == 0, f"{columns} columns are not blocks of {block_size}"
    values = np.empty((rows, columns // block_size, block_size), np.int8)
    scales = np.empty((rows, columns // block_size), np.float32)

    def quantize(here: slice) -> None:
        blocks = matrix[here].reshape(-1, columns // block_size, block_size)
        place = np.abs(blocks).argmax(axis=2)[..., np.newaxis]
        extreme = np.take_along_axis(blocks, place, axis=2)[..., 0]  # [rows, blocks]
        found = extreme * np.float32(1 / _LEAST_INT4)
        scales[here] = np.where(np.abs(found) < LEAST_SCALE, LEAST_SCALE, found)
        rounded = np.rint(blocks / scales[here][..., np.newaxis])
        values[here] = np.clip(rounded, _LEAST_INT4, _LARGEST_INT4)

    for_each_chunk(rows, _CHUNK, quantize)
    return QuantizedBlocks(values=values.reshape(rows, columns), scales=scales)
