"""A cache in device memory, in either cache form, as `CacheState` wants it.

Keys and values of all layers lie in one piece of memory, each layer's in a plane of its own, so
that one copy moves a run of places through all layers and heads. Nothing here waits for the
device, but for audits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from la_runtime.backends.base import CacheSizing, CacheState
from la_runtime.backends.device import Device, DeviceMemory, Extent, Rows, aligned_rows
from la_runtime.backends.places import grown_capacity, make_spoiled
from la_runtime.contract import CacheForm, Contract
from la_runtime.storage import from_stored, storage_dtype, to_stored

__all__ = ["DeviceCache", "Planes", "Room"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planes:
    """How [2 * layers, batch, kv_heads, columns, head_dim] lie in memory, a layer's K or V a plane.

    A plane ends with as many unused rows as its successor's alignment asks for.

    Args:
        num_planes: 2 * layers.
        batch: sequences.
        num_heads: key/value heads.
        columns: places, or rows of a block.
        column_bytes: of one head's key or value.
    """

    num_planes: int
    batch: int
    num_heads: int
    columns: int
    column_bytes: int

    @classmethod
    def of(cls, contract: Contract, *, batch: int, columns: int) -> Planes:
        """Planes for a contract's keys and values."""
        return cls(
            num_planes=2 * contract.num_layers,
            batch=batch,
            num_heads=contract.num_kv_heads,
            columns=columns,
            column_bytes=contract.head_dim * storage_dtype(contract.kv_dtype).itemsize,
        )

    @property
    def pitch_bytes(self) -> int:
        """From a head to the next."""
        return self.columns * self.column_bytes

    @property
    def plane_rows(self) -> int:
        """Heads of a plane, unused ones included."""
        return aligned_rows(self.batch * self.num_heads, self.pitch_bytes)

    @property
    def plane_bytes(self) -> int:
        """From a plane to the next."""
        return self.plane_rows * self.pitch_bytes

    @property
    def size_bytes(self) -> int:
        """Of all planes."""
        return self.num_planes * self.plane_bytes

    def addresses(self, base: int) -> list[int]:
        """Where each plane begins."""
        return [base + plane * self.plane_bytes for plane in range(self.num_planes)]

    def rows(self, base: int, *, sequence: int = 0, column: int = 0) -> Rows:
        """Heads from one sequence's first on, each from a column on, in every plane."""
        first_head = sequence * self.num_heads
        return Rows(
            address=base + first_head * self.pitch_bytes + column * self.column_bytes,
            pitch_bytes=self.pitch_bytes,
            plane_rows=self.plane_rows,
        )

    def of_sequence(self, columns: int) -> Extent:
        """So many columns of one sequence's heads, in every plane."""
        return Extent(
            width_bytes=columns * self.column_bytes, rows=self.num_heads, planes=self.num_planes
        )

    def of_plane(self, columns: int) -> Extent:
        """So many columns of all heads, in one plane."""
        return Extent(
            width_bytes=columns * self.column_bytes, rows=self.batch * self.num_heads, planes=1
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How many columns a past may have in cache form `concat`.

    Args:
        least: fewest that a pass presents.
        most: most that a pass presents.
    """

    least: int
    most: int


class DeviceCache:
    """Sequences' places on a device; see `CacheState`.

    In cache form `scatter` a pass writes its block behind what is committed, and a commit moves
    only rows that do not lie in their places. In `concat` it copies the accepted rows there from
    the block that the pass returned. Places grow inside memory reserved for as many as the
    sequences may need, one plane at a time, so that a long cache is never there twice.

    Args:
        contract: the graph's contract.
        device: where the cache lies.
        batch: sequences.
        sizing: see `CacheSizing`.
        room: see `Room`; of no account in cache form `scatter`.
    """

    def __init__(
        self, contract: Contract, device: Device, *, batch: int, sizing: CacheSizing, room: Room
    ) -> None:
        self.lengths = np.zeros(batch, dtype=np.int64)
        self._contract = contract
        self._device = device
        self._sizing = sizing
        self._room = room
        self._reserved = 0  # places per sequence, `concat` only
        self._planes = self._planes_of(batch, self._columns_for(0, at_most=0))
        self._memory = self._allocate(self._planes)

    @property
    def planes(self) -> Planes:
        """How the places lie in memory."""
        return self._planes

    @property
    def address(self) -> int:
        """Of the first plane."""
        return self._memory.address

    @property
    def past_len(self) -> int:
        """See `CacheState.past_len`."""
        return self._planes.columns

    def num_keys(self, num_columns: int) -> int:
        """See `CacheState.num_keys`."""
        return self.past_len + (0 if self._is_scatter else num_columns)

    @property
    def _is_scatter(self) -> bool:
        return self._contract.cache_form is CacheForm.SCATTER

    def _planes_of(self, batch: int, columns: int) -> Planes:
        return Planes.of(self._contract, batch=batch, columns=columns)

    def _columns_for(self, places: int, *, at_most: int) -> int:
        """Columns to present for so many places, no more than `at_most` if they suffice."""
        if self._contract.capacity is not None:
            return self._contract.capacity
        if self._sizing is CacheSizing.EXACT:
            return max(places, self._room.least)
        return max(places, self._room.least, min(grown_capacity(places), at_most))

    def _allocate(self, planes: Planes) -> DeviceMemory:
        """Zeroed memory for these planes, and for what they may grow to."""
        sizes = [planes.size_bytes]
        if not self._is_scatter:
            likely = max(self._reserved, min(grown_capacity(planes.columns), self._room.most))
            sizes.append(self._planes_of(planes.batch, likely).size_bytes)
        return self._device.allocate(max(sizes), "the cache")

    def reserve(self, places: int) -> None:
        """See `CacheState.reserve`; in `scatter` there is room for the whole context."""
        if self._is_scatter:
            return
        self._reserved = max(self._reserved, min(places, self._room.most))
        wanted = self._planes_of(self._planes.batch, self._reserved)
        if wanted.size_bytes > self._memory.size_bytes:
            self._gather(self._sequences(), self._planes)

    def append(self, rows: Sequence[Sequence[int]], block: Rows) -> None:
        """Copy accepted rows of a block behind each sequence's places (`concat`).

        Args:
            rows: of the block, per sequence and in order.
            block: the K/V that the pass returned.
        """
        self._fit(max(int(n) + len(r) for n, r in zip(self.lengths, rows, strict=True)))
        planes = self._planes
        for sequence, accepted in enumerate(rows):
            first_head = block.address + sequence * planes.num_heads * block.pitch_bytes
            for first, count in _runs(accepted):
                self._device.copy(
                    planes.rows(
                        self.address, sequence=sequence, column=int(self.lengths[sequence])
                    ),
                    replace(block, address=first_head + first * planes.column_bytes),
                    planes.of_sequence(count),
                )
                self.lengths[sequence] += count

    def settle(self, rows: Sequence[Sequence[int]]) -> None:
        """Take accepted rows that the pass wrote behind each sequence's places (`scatter`).

        Args:
            rows: of the block, per sequence and in order.
        """
        for sequence, accepted in enumerate(rows):
            block = int(self.lengths[sequence])
            for first, count in _runs(accepted):
                column = int(self.lengths[sequence])
                self._move(sequence, block + first, column, count)
                self.lengths[sequence] += count

    def _move(self, sequence: int, source: int, column: int, count: int) -> None:
        """Move columns of a sequence to the left, in pieces that do not overlap where they go."""
        planes = self._planes
        distance = source - column
        assert distance >= 0, "a row is behind all those before it on its path"
        for done in range(0, count, distance) if distance else ():
            self._device.copy(
                planes.rows(self.address, sequence=sequence, column=column + done),
                planes.rows(self.address, sequence=sequence, column=source + done),
                planes.of_sequence(min(distance, count - done)),
            )

    def _fit(self, places: int) -> None:
        """Present as many columns as so many places ask for (`concat`)."""
        if places <= self._planes.columns and self._sizing is CacheSizing.STEPPED:
            return
        at_most = self._room.most
        if places <= self._reserved:
            at_most = self._reserved
        planes = self._planes_of(self._planes.batch, self._columns_for(places, at_most=at_most))
        if planes.size_bytes > self._memory.size_bytes:
            self._gather(self._sequences(), planes)
        elif planes != self._planes:
            self._spread(planes)

    def _spread(self, planes: Planes) -> None:
        """Lay the places out anew where they are, plane by plane through a copy of each."""
        before = self._planes
        kept = before.of_plane(min(before.columns, planes.columns))
        scratch = self._device.allocate(before.plane_bytes, "growing the cache")
        copied = before.rows(scratch.address)
        moves = list(
            zip(before.addresses(self.address), planes.addresses(self.address), strict=True)
        )
        if planes.plane_bytes > before.plane_bytes:
            moves.reverse()  # so that no plane moves over one that has yet to move
        for old, new in moves:
            self._device.copy(copied, before.rows(old), kept)
            self._device.zero(planes.rows(new), planes.of_plane(planes.columns))
            self._device.copy(planes.rows(new), copied, kept)
        self._planes = planes

    def _sequences(self) -> list[tuple[DeviceCache, int]]:
        return [(self, sequence) for sequence in range(len(self.lengths))]

    def _gather(self, sequences: Sequence[tuple[DeviceCache, int]], planes: Planes) -> None:
        """Copy what these sequences have committed to memory of their own, laid out as said."""
        memory = self._allocate(planes)
        lengths = [int(cache.lengths[sequence]) for cache, sequence in sequences]
        for new, (cache, sequence) in enumerate(sequences):
            self._device.copy(
                planes.rows(memory.address, sequence=new),
                cache.planes.rows(cache.address, sequence=sequence),
                planes.of_sequence(lengths[new]),
            )
        self.lengths = np.array(lengths, dtype=np.int64)
        self._memory, self._planes = memory, planes

    def keep(self, indices: Sequence[int]) -> None:
        """See `CacheState.keep`."""
        self._gather_all([(self, sequence) for sequence in indices], at_most=self.past_len)

    def take(self, indices: Sequence[int]) -> DeviceCache:
        """See `CacheState.take`."""
        taken = DeviceCache(
            self._contract, self._device, batch=0, sizing=self._sizing, room=self._room
        )
        taken._gather_all([(self, sequence) for sequence in indices], at_most=self.past_len)
        return taken

    def absorb(self, other: CacheState) -> None:
        """See `CacheState.absorb`."""
        assert isinstance(other, DeviceCache), "caches of one backend"
        self._reserved = max(self._reserved, other._reserved)
        if len(self.lengths):
            widest = max(self.past_len, other.past_len)
            self._gather_all([*self._sequences(), *other._sequences()], at_most=widest)
        else:
            self.lengths, self._planes = other.lengths, other.planes
            self._memory, other._memory = other._memory, self._memory
        other.close()

    def _gather_all(self, sequences: Sequence[tuple[DeviceCache, int]], *, at_most: int) -> None:
        """As `_gather`, laid out as for fresh sequences of these lengths.

        So a long sequence that left does not make the others' passes wide for ever.
        """
        longest = max((int(cache.lengths[sequence]) for cache, sequence in sequences), default=0)
        columns = self._columns_for(longest, at_most=at_most)
        self._gather(sequences, self._planes_of(len(sequences), columns))

    def truncate(self, lengths: Sequence[int]) -> None:
        """See `CacheState.truncate`."""
        for sequence, length in enumerate(lengths):
            dropped = int(self.lengths[sequence]) - length
            assert length >= 0, "a length is no less than nothing"
            assert dropped >= 0, "truncation never grows a cache"
            self._device.zero(
                self._planes.rows(self.address, sequence=sequence, column=length),
                self._planes.of_sequence(dropped),
            )
            self.lengths[sequence] = length
        if not self._is_scatter:
            self._fit(int(self.lengths.max(initial=0)))

    def spoil_unused(self, seed: int) -> None:
        """See `CacheState.spoil_unused`."""
        planes, dtype = self._planes, self._contract.kv_dtype
        places = self._download()
        for sequence, length in enumerate(self.lengths):
            first = sequence * planes.num_heads
            own = places[:, first : first + planes.num_heads]  # [2 * layers, kv_heads, places, _]
            used, unused = own[:, :, :length], own[:, :, length:]
            unused[:] = to_stored(
                make_spoiled(from_stored(used, dtype), unused.shape, seed + sequence), dtype
            )
        self._device.upload(self.address, places)
        self._device.synchronize()

    def read(self, sequence: int) -> NDArray[np.float32]:
        """See `CacheState.read`."""
        first = sequence * self._planes.num_heads
        heads = slice(first, first + self._planes.num_heads)
        used = self._download()[:, heads, : self.lengths[sequence]]
        return from_stored(used, self._contract.kv_dtype)

    def _download(self) -> NDArray[np.generic]:
        """Every place, [2 * layers, batch * kv_heads, places, head_dim] as it is stored."""
        planes = self._planes
        places = np.empty(
            (planes.num_planes, planes.plane_rows, planes.columns, self._contract.head_dim),
            dtype=storage_dtype(self._contract.kv_dtype),
        )
        self._device.download(places, self.address)
        self._device.synchronize()
        return places

    def close(self) -> None:
        """See `CacheState.close`."""
        self._memory.free()
        self.lengths = np.zeros(0, dtype=np.int64)
        self._planes = self._planes_of(0, self._planes.columns)


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First row and length of each run of consecutive rows."""
    start = 0
    for stop in range(1, len(rows) + 1):
        if stop == len(rows) or rows[stop] != rows[stop - 1] + 1:
            yield rows[start], stop - start
            start = stop
