"""How numbers of the contract's dtypes lie in NumPy memory.

NumPy has no bfloat16: such numbers are held as their 16 bits, which are the upper half of those
of the nearest float32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from la_runtime.contract import Dtype, masked_value

__all__ = ["from_stored", "round_to", "storage_dtype", "stored_masked_value", "to_stored"]

_HALF_BITS = np.uint32(16)
_ROUND_DOWN = np.uint32(0x7FFF)
_ODD = np.uint32(1)


def storage_dtype(dtype: Dtype) -> np.dtype[np.generic]:
    """The NumPy dtype whose arrays hold numbers of this dtype: ``uint16`` for bfloat16."""
    return np.dtype("uint16" if dtype is Dtype.BFLOAT16 else dtype.value)


def to_stored(values: NDArray[np.floating], dtype: Dtype) -> NDArray[np.generic]:
    """Round finite numbers to a dtype, ties to even; a fresh C-ordered array.

    Args:
        values: any shape.
        dtype: a floating one.
    """
    if dtype is not Dtype.BFLOAT16:
        return np.array(values, dtype=storage_dtype(dtype), order="C")
    bits = np.array(values, dtype=np.float32, order="C").view(np.uint32)
    rounded = bits + _ROUND_DOWN + ((bits >> _HALF_BITS) & _ODD)
    return (rounded >> _HALF_BITS).astype(np.uint16)


def from_stored(stored: NDArray[np.generic], dtype: Dtype) -> NDArray[np.float32]:
    """The float32 numbers that an array of `storage_dtype` holds, exactly."""
    if dtype is not Dtype.BFLOAT16:
        return stored.astype(np.float32)
    return (stored.astype(np.uint32) << _HALF_BITS).view(np.float32)


def round_to(values: NDArray[np.floating], dtype: Dtype) -> NDArray[np.float32]:
    """The float32 numbers that are left of these when they are stored in a dtype."""
    return from_stored(to_stored(values, dtype), dtype)


def stored_masked_value(dtype: Dtype) -> np.generic:
    """`contract.masked_value` as an element of `storage_dtype`; "seen" is zero in every dtype."""
    element: np.generic = to_stored(np.array([masked_value(dtype)]), dtype)[0]
    return element
