"""A cache on a device holds what lists of the same rows would, whatever happens to it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from la_runtime.backends.base import CacheSizing
from la_runtime.backends.device import ALIGNMENT, aligned_rows
from la_runtime.backends.device_cache import DeviceCache, Planes, Room
from la_runtime.contract import CacheForm, Contract, Dtype
from tests.la_runtime.backends.numpy_device import NumpyDevice

# Heads of 6 bytes: no size here is a multiple of an alignment by itself.
CONTRACT = Contract(
    num_layers=2,
    num_kv_heads=3,
    head_dim=3,
    hidden_size=9,
    vocab_size=10,
    k_max=2,
    top_c=2,
    kv_dtype=Dtype.FLOAT16,
)
CAPACITY = 75
SCATTER = replace(CONTRACT, cache_form=CacheForm.SCATTER, capacity=CAPACITY)
WIDEST = 8
ROOM = Room(least=0, most=200)


class Model:
    """A cache, beside the rows that each of its sequences should hold."""

    def __init__(self, contract: Contract, device: NumpyDevice, sizing: CacheSizing) -> None:
        self.contract = contract
        self.device = device
        self.cache = DeviceCache(contract, device, batch=0, sizing=sizing, room=ROOM)
        self.sequences: list[list[np.ndarray]] = []  # each row [2 * layers, heads, head_dim]

    def add(self, count: int) -> None:
        """Empty sequences."""
        sizing = self.cache._sizing
        other = DeviceCache(self.contract, self.device, batch=count, sizing=sizing, room=ROOM)
        self.cache.absorb(other)
        self.sequences += [[] for _ in range(count)]

    def step(self, rng: np.random.Generator, accepted: list[list[int]]) -> None:
        """A pass of random K/V, and the commit of these rows of it."""
        contract, cache = self.contract, self.cache
        batch = len(self.sequences)
        shape = (4, batch, contract.num_kv_heads, WIDEST, contract.head_dim)
        block = rng.standard_normal(shape).astype(np.float16)
        if contract.cache_form is CacheForm.SCATTER:
            planes, places = self.places()
            for sequence, length in enumerate(cache.lengths):
                places[:, sequence, :, length : length + WIDEST] = block[:, sequence]
            self.write(planes, places)
            cache.settle(accepted)
        else:
            planes = Planes.of(contract, batch=batch, columns=WIDEST)
            memory = self.device.allocate(planes.size_bytes, "block")
            self.write(planes, block, memory.address)
            cache.append(accepted, planes.rows(memory.address))
            self.device.synchronize()
        for sequence, rows in enumerate(accepted):
            self.sequences[sequence] += [block[:, sequence, :, row] for row in rows]

    def places(self) -> tuple[Planes, np.ndarray]:
        """[2 * layers, batch, heads, columns, head_dim] of the cache."""
        planes = self.cache.planes
        raw = np.empty((planes.num_planes, planes.plane_rows, planes.columns, 3), np.float16)
        self.device.download(raw, self.cache.address)
        self.device.synchronize()
        used = raw[:, : planes.batch * planes.num_heads]
        shape = (planes.num_planes, planes.batch, planes.num_heads, planes.columns, 3)
        return planes, used.reshape(shape)

    def write(self, planes: Planes, places: np.ndarray, address: int | None = None) -> None:
        raw = np.zeros((planes.num_planes, planes.plane_rows, planes.columns, 3), np.float16)
        heads = planes.batch * planes.num_heads
        raw[:, :heads] = places.reshape(planes.num_planes, heads, planes.columns, 3)
        self.device.upload(self.cache.address if address is None else address, raw)
        self.device.synchronize()

    def check(self) -> None:
        assert self.cache.lengths.tolist() == [len(rows) for rows in self.sequences]
        planes, places = self.places()
        assert all(a % ALIGNMENT == 0 for a in planes.addresses(self.cache.address))
        longest = max(map(len, self.sequences), default=0)
        if self.contract.cache_form is CacheForm.SCATTER:
            assert self.cache.past_len == CAPACITY
        elif self.cache._sizing is CacheSizing.EXACT:
            assert self.cache.past_len == longest
        else:
            assert longest <= self.cache.past_len <= max(longest + 128, 128)
        for sequence, rows in enumerate(self.sequences):
            held = places[:, sequence].transpose(2, 0, 1, 3)  # [columns, 2 * layers, heads, _]
            assert np.array_equal(held[: len(rows)], np.array(rows).reshape(len(rows), 4, 3, 3))
            if self.contract.cache_form is CacheForm.CONCAT:
                assert not held[len(rows) :].any(), "what is not used is zero"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("contract", "sizing"),
    [
        (CONTRACT, CacheSizing.STEPPED),
        (CONTRACT, CacheSizing.EXACT),
        (SCATTER, CacheSizing.STEPPED),
    ],
    ids=["stepped", "exact", "scatter"],
)
def test_a_cache_holds_what_was_committed_whatever_happens_to_it(contract, sizing, seed):
    rng = np.random.default_rng(seed)
    model = Model(contract, NumpyDevice(), sizing)
    most = CAPACITY - WIDEST if contract.capacity else 180
    model.add(int(rng.integers(1, 4)))
    for _ in range(60):
        batch = len(model.sequences)
        match rng.choice(["step", "step", "step", "keep", "absorb", "truncate", "take", "reserve"]):
            case "step":
                rows = [
                    sorted(rng.choice(WIDEST, rng.integers(0, WIDEST + 1), replace=False).tolist())
                    if len(sequence) + WIDEST <= most
                    else []
                    for sequence in model.sequences
                ]
                model.step(rng, rows)
            case "keep":
                kept = rng.integers(0, batch, rng.integers(1, 4)).tolist()
                model.cache.keep(kept)
                model.sequences = [list(model.sequences[index]) for index in kept]
            case "absorb":
                if batch < 4:
                    model.add(1)
            case "truncate":
                lengths = [int(rng.integers(0, len(rows) + 1)) for rows in model.sequences]
                model.cache.truncate(lengths)
                model.sequences = [
                    rows[:length] for rows, length in zip(model.sequences, lengths, strict=True)
                ]
            case "take":
                taken = rng.integers(0, batch, 2).tolist()
                other = model.cache.take(taken)
                model.cache.close()
                model.cache = other
                model.sequences = [list(model.sequences[index]) for index in taken]
            case "reserve":
                model.cache.reserve(int(rng.integers(0, 150)))
        model.check()


def test_growth_within_reserved_memory_needs_no_second_cache():
    """One plane more than the cache itself, whatever it grows to."""
    device = NumpyDevice()
    model = Model(CONTRACT, device, CacheSizing.STEPPED)
    model.add(2)
    model.cache.reserve(200)
    rng = np.random.default_rng(0)
    reserved = Planes.of(CONTRACT, batch=2, columns=200)
    device.peak_bytes = device.used_bytes
    before = device.used_bytes
    address = model.cache.address
    for _ in range(20):
        model.step(rng, [list(range(WIDEST)), [0, 3]])
    model.check()

    block = Planes.of(CONTRACT, batch=2, columns=WIDEST)
    assert model.cache.address == address
    assert device.peak_bytes <= before + reserved.plane_bytes + block.size_bytes + 2 * ALIGNMENT


def test_what_is_beyond_the_most_columns_is_not_presented_before_it_is_needed():
    model = Model(CONTRACT, NumpyDevice(), CacheSizing.STEPPED)
    model.add(1)
    rng = np.random.default_rng(0)
    widths = set()
    for _ in range(24):
        model.step(rng, [list(range(WIDEST))])
        widths.add(model.cache.past_len)

    assert widths == {128, ROOM.most}


@pytest.mark.parametrize("least", [0, 1, 40])
@pytest.mark.parametrize("sizing", CacheSizing)
def test_no_fewer_columns_are_presented_than_the_plan_takes(least, sizing):
    cache = DeviceCache(
        CONTRACT, NumpyDevice(), batch=2, sizing=sizing, room=Room(least=least, most=200)
    )

    assert cache.past_len == least
    cache.keep([1])
    assert cache.past_len == least


@pytest.mark.parametrize("contract", [CONTRACT, SCATTER], ids=["concat", "scatter"])
def test_spoiling_changes_every_unused_place_and_no_used_one(contract):
    model = Model(contract, NumpyDevice(), CacheSizing.STEPPED)
    model.add(2)
    model.step(np.random.default_rng(0), [[0, 1, 2], [0]])
    _, before = model.places()
    before = before.copy()

    model.cache.spoil_unused(1)

    _, after = model.places()
    for sequence, length in enumerate((3, 1)):
        used, unused = after[:, sequence, :, :length], after[:, sequence, :, length:]
        assert np.array_equal(used, before[:, sequence, :, :length])
        assert np.isfinite(unused).all()
        assert (unused != before[:, sequence, :, length:]).mean() > 0.99


def test_bfloat16_is_spoiled_as_such():
    contract = replace(SCATTER, kv_dtype=Dtype.BFLOAT16)
    device = NumpyDevice()
    cache = DeviceCache(contract, device, batch=1, sizing=CacheSizing.STEPPED, room=ROOM)
    cache.spoil_unused(1)
    raw = np.empty((4, cache.planes.plane_rows, CAPACITY, 3), np.uint16)
    device.download(raw, cache.address)
    device.synchronize()

    values = (raw[:, :3].astype(np.uint32) << 16).view(np.float32)
    assert 9 < values.std() < 11, "ten times the norm of an empty cache, which counts as 1"


@pytest.mark.parametrize(
    ("num_rows", "pitch", "rows"),
    [(3, 256, 3), (3, 128, 4), (1, 6, 128), (128, 6, 128), (129, 6, 256), (0, 6, 0), (5, 0, 5)],
)
def test_planes_are_filled_up_to_the_alignment_and_no_further(num_rows, pitch, rows):
    assert aligned_rows(num_rows, pitch) == rows
