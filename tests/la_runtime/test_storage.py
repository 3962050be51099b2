"""Numbers of the contract's dtypes in NumPy memory, against the reference implementation."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from la_runtime.contract import Dtype, masked_value
from la_runtime.storage import from_stored, storage_dtype, stored_masked_value, to_stored

FLOATS = (Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BFLOAT16)
REFERENCE = {
    Dtype.FLOAT32: np.dtype(np.float32),
    Dtype.FLOAT16: np.dtype(np.float16),
    Dtype.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
# Larger ones round to infinity in float16.
finite = st.floats(-60_000, 60_000, width=32)


@pytest.mark.parametrize("dtype", FLOATS)
@given(numbers=st.lists(finite, max_size=40))
def test_rounding_is_that_of_the_dtype_bit_for_bit(dtype, numbers):
    values = np.asarray(numbers, dtype=np.float32)

    stored = to_stored(values, dtype)

    assert stored.dtype == storage_dtype(dtype)
    assert stored.tobytes() == values.astype(REFERENCE[dtype]).tobytes()


def test_bfloat16_ties_go_to_the_even_neighbour():
    """Halfway between two neighbours, from both sides of an even one."""
    halfway = np.asarray([0x3F808000, 0x3F818000, 0xBF808000], dtype=np.uint32).view(np.float32)

    assert to_stored(halfway, Dtype.BFLOAT16).tolist() == [0x3F80, 0x3F82, 0xBF80]


@pytest.mark.parametrize("dtype", [Dtype.FLOAT16, Dtype.BFLOAT16])
def test_every_number_of_16_bits_survives_the_way_there_and_back(dtype):
    bits = np.arange(2**16, dtype=np.uint16)
    stored = bits.view(storage_dtype(dtype))
    numbers = from_stored(stored, dtype)
    finite = np.isfinite(numbers)

    assert numbers.dtype == np.float32
    assert np.array_equal(to_stored(numbers[finite], dtype).view(np.uint16), bits[finite])


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_masked_has_a_weight_of_exactly_zero_and_what_is_seen_is_zero(dtype):
    masked = stored_masked_value(dtype)

    assert masked.dtype == storage_dtype(dtype)
    (number,) = from_stored(np.asarray([masked]), dtype)
    assert np.isfinite(number)
    assert np.isclose(number, masked_value(dtype), rtol=2**-8)
    assert np.exp(number) == 0.0
    assert from_stored(np.zeros(1, storage_dtype(dtype)), dtype)[0] == 0.0


def test_stored_arrays_are_fresh_and_contiguous():
    values = np.ones((3, 2), dtype=np.float32).T

    for dtype in FLOATS:
        stored = to_stored(values, dtype)
        assert stored.flags.c_contiguous
        assert not np.shares_memory(stored, values)
