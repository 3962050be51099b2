"""Places keep what they hold, wherever they move."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from la_runtime.backends.host_places import HostPlaces
from la_runtime.contract import Contract, KvOrder

CONTRACT = Contract(
    num_layers=2, num_kv_heads=3, head_dim=4, hidden_size=1, vocab_size=1, k_max=1, top_c=1
)
RESERVED = 40


@pytest.fixture(params=KvOrder)
def contract(request) -> Contract:
    return replace(CONTRACT, kv_order=request.param)


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_resizing_keeps_what_stays_and_zeroes_what_is_added(contract, batch):
    """Against the slow way: fresh memory for every size."""
    rng = np.random.default_rng(batch)
    places = HostPlaces(contract, batch, capacity=5, reserved=RESERVED)
    for capacity in (5, 6, 40, 7, 0, 12, 11, 33, 33, 40, 1):
        before = places.view.copy()

        places.resize(capacity)

        kept = min(capacity, before.shape[3])
        expected = np.zeros((*before.shape[:3], capacity, before.shape[4]), np.float32)
        expected[:, :, :, :kept] = before[:, :, :, :kept]
        assert np.array_equal(places.view, expected)
        assert places.capacity == capacity
        assert all(layer.flags.c_contiguous for layer in places.view)
        places.view[:] = rng.normal(size=places.view.shape)


def test_a_sequence_alone_has_nothing_to_move():
    """Sequence-major places stay at their addresses whatever their number."""
    places = HostPlaces(
        replace(CONTRACT, kv_order=KvOrder.SEQUENCE_MAJOR), 1, capacity=3, reserved=RESERVED
    )
    addresses = [layer.ctypes.data for layer in places.view]
    for capacity in (9, 40, 2, 17):
        places.resize(capacity)

        assert [layer.ctypes.data for layer in places.view] == addresses


def test_copied_sequences_come_from_where_they_were(contract):
    rng = np.random.default_rng(1)
    source = HostPlaces(contract, 2, capacity=9)
    source.view[:] = rng.normal(size=source.view.shape)
    other = HostPlaces(contract, 3, capacity=6, reserved=RESERVED)

    other.copy_from([(source, 1, 4), (source, 0, 6), (source, 1, 0)])

    assert np.array_equal(other.view[:, 0, :, :4], source.view[:, 1, :, :4])
    assert np.array_equal(other.view[:, 1], source.view[:, 0, :, :6])
    assert not other.view[:, 0, :, 4:].any()
    assert not other.view[:, 2].any()


def test_there_is_memory_for_as_many_places_as_are_laid_out(contract):
    assert HostPlaces(contract, 1, capacity=7, reserved=3).reserved == 7
    assert HostPlaces(contract, 1, capacity=7, reserved=9).reserved == 9
