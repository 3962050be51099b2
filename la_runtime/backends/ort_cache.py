"""Caches in NumPy memory, one class per cache form, for ONNX Runtime on the CPU.

Owns which places a pass presents, and how a commit gets the accepted rows into them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from la_runtime.backends.base import CacheSizing, CacheState, StepInputs
from la_runtime.backends.host_places import HostPlaces
from la_runtime.backends.ort_binding import PassBinding, ReusedBuffer
from la_runtime.backends.places import grown_capacity, make_spoiled
from la_runtime.contract import CacheForm, Contract, Name, RowPlaces
from la_runtime.storage import from_stored, storage_dtype, to_stored

__all__ = [
    "ConcatCache",
    "GrowingScatterCache",
    "HostCache",
    "ScatterCache",
    "make_host_cache",
]

# A sequence alone gets further places for nothing but binding them, and attention reads them all.
_STEP_ALONE = 32
# Places to reserve behind those that are expected to fill: a pass writes its whole block.
_BLOCK_ROOM = 128


class HostCache:
    """A cache as `CacheState` wants it, in `HostPlaces`. One of its subclasses.

    Not an `ABC`: every step asks whether a cache is one of these, which then calls functions.

    Args:
        contract: the graph's contract.
        make_binding: makes the binding of a new cache.
        batch: sequences.
        sizing: see `CacheSizing`.
    """

    def __init__(
        self,
        contract: Contract,
        make_binding: Callable[[], PassBinding],
        *,
        batch: int,
        sizing: CacheSizing,
    ) -> None:
        self.binding = make_binding()
        self._other_binding: PassBinding | None = None
        self.sizing = sizing
        self._is_exact = sizing is CacheSizing.EXACT
        self.lengths = np.zeros(batch, dtype=np.int64)
        self._make_binding = make_binding
        self._contract = contract
        self.memory = HostPlaces(contract, batch, capacity=contract.capacity or 0)

    @property
    def places(self) -> NDArray[np.generic]:
        """[2 * layers, batch, lines, places, width], see `HostPlaces`."""
        return self.memory.view

    @property
    def past_len(self) -> int:
        """See `CacheState.past_len`."""
        return self.memory.capacity

    @property
    def _longest(self) -> int:
        longest: int = max(self.lengths.tolist(), default=0)
        return longest

    @abstractmethod
    def num_keys(self, num_columns: int) -> int:
        """See `CacheState.num_keys`."""

    @abstractmethod
    def bind(self, inputs: StepInputs, names: tuple[Name, ...]) -> None:
        """Bind the cache, and memory for what a pass over this block writes.

        Args:
            inputs: the block.
            names: the scores to compute.
        """

    @abstractmethod
    def commit(self, rows: Sequence[Sequence[int]]) -> None:
        """See `Backend.commit`."""

    @abstractmethod
    def reserve(self, places: int) -> None:
        """See `CacheState.reserve`."""

    @abstractmethod
    def _capacity_for(self, places: int) -> int:
        """Places to lay out anew for sequences of up to so many."""

    def bind_for(self, session: object, make_binding: Callable[[], PassBinding]) -> None:
        """Bind for one of two sessions from here on; what is bound for the other is kept.

        Args:
            session: the one that will run.
            make_binding: makes a binding of it.
        """
        other = self._other_binding
        if other is None or other.session is not session:
            other = make_binding()
        self.binding, self._other_binding = other, self.binding

    def keep(self, indices: Sequence[int]) -> None:
        """See `CacheState.keep`."""
        kept = [(self, index) for index in indices]
        self._gather(kept, reserved=self.memory.reserved)

    def take(self, indices: Sequence[int]) -> HostCache:
        """See `CacheState.take`."""
        taken = type(self)(self._contract, self._make_binding, batch=0, sizing=self.sizing)
        taken._gather([(self, index) for index in indices], reserved=0)
        return taken

    def absorb(self, other: CacheState) -> None:
        """See `CacheState.absorb`."""
        assert isinstance(other, type(self)), "caches of one backend"
        if self.memory.batch == 0:
            self.lengths, self.memory = other.lengths, other.memory
        else:
            joined = [(cache, i) for cache in (self, other) for i in range(cache.memory.batch)]
            self._gather(joined, reserved=max(self.memory.reserved, other.memory.reserved))
        other.close()

    def _bind_past(self, past: NDArray[np.generic]) -> None:
        """Nothing may hold on to memory that the cache has left."""
        self.binding.bind_past(past)
        if self._other_binding is not None:
            self._other_binding.let_go_of_all_but(past)

    def _gather(self, sequences: Sequence[tuple[HostCache, int]], *, reserved: int) -> None:
        """Hold copies of these sequences, each given by its cache and its place there.

        A long sequence that left does not make the others' passes wide for ever.
        """
        sources = [(cache.memory, i, int(cache.lengths[i])) for cache, i in sequences]
        self.lengths = np.array([length for _, _, length in sources], dtype=np.int64)
        widest = max((memory.capacity for memory, _, _ in sources), default=0)
        capacity = min(widest, self._capacity_for(self._longest))
        self._move(sources, capacity=capacity, reserved=reserved)

    def _move(
        self, sources: Sequence[tuple[HostPlaces, int, int]], *, capacity: int, reserved: int
    ) -> None:
        """Hold copies of these places in memory of their own, see `HostPlaces.copy_from`."""
        memory = HostPlaces(self._contract, len(sources), capacity=capacity, reserved=reserved)
        memory.copy_from(sources)
        self.memory = memory

    def _reserve(self, places: int, *, capacity: int) -> None:
        """Have memory for so many places, and `capacity` of them laid out."""
        sources = [(self.memory, i, int(length)) for i, length in enumerate(self.lengths)]
        self._move(sources, capacity=capacity, reserved=places)

    def truncate(self, lengths: Sequence[int]) -> None:
        """See `CacheState.truncate`."""
        for sequence, length in enumerate(lengths):
            assert 0 <= length <= self.lengths[sequence], "truncation never grows a cache"
            self.places[:, sequence, :, length : self.lengths[sequence]] = 0
            self.lengths[sequence] = length

    def spoil_unused(self, seed: int) -> None:
        """See `CacheState.spoil_unused`."""
        dtype = self._contract.kv_dtype
        for sequence, length in enumerate(self.lengths):
            used = from_stored(self.places[:, sequence, :, :length], dtype)
            unused = self.places[:, sequence, :, length:]
            spoiled = make_spoiled(used, unused.shape, seed + sequence)
            unused[:] = to_stored(spoiled, dtype)

    def read(self, sequence: int) -> NDArray[np.float32]:
        """See `CacheState.read`."""
        contract, length = self._contract, self.lengths[sequence]
        used = from_stored(self.places[:, sequence, :, :length], contract.kv_dtype)
        heads_of_line = used.shape[3] // contract.head_dim
        by_head = used.reshape(*used.shape[:3], heads_of_line, contract.head_dim)
        # One of the two is 1: lines, and heads of a line. So they can change places.
        read = by_head.swapaxes(2, 3).reshape(
            2 * contract.num_layers, contract.num_kv_heads, length, contract.head_dim
        )
        return np.ascontiguousarray(read)

    def close(self) -> None:
        """See `CacheState.close`."""
        self.binding.clear()
        if self._other_binding is not None:
            self._other_binding.clear()
        self.lengths = np.zeros(0, dtype=np.int64)
        self.memory = HostPlaces(self._contract, 0)


class ConcatCache(HostCache):
    """The cache of a graph that returns the block's K/V; a commit copies the accepted rows.

    Places grow in steps inside reserved memory, so that a long prompt never has its cache in
    memory twice, while passes present few columns more than there are tokens.
    """

    def __init__(
        self,
        contract: Contract,
        make_binding: Callable[[], PassBinding],
        *,
        batch: int,
        sizing: CacheSizing,
    ) -> None:
        super().__init__(contract, make_binding, batch=batch, sizing=sizing)
        self._block_names = contract.block_names
        self._block_buffer = ReusedBuffer(storage_dtype(contract.kv_dtype))
        self.block = self.places

    @property
    def past_len(self) -> int:
        """See `CacheState.past_len`."""
        return self._longest if self._is_exact else self.memory.capacity

    def num_keys(self, num_columns: int) -> int:
        """See `CacheState.num_keys`."""
        return self.past_len + num_columns

    def bind(self, inputs: StepInputs, names: tuple[Name, ...]) -> None:
        """See `HostCache.bind`."""
        past = self.places
        if self._is_exact:
            past = np.ascontiguousarray(past[:, :, :, : self.past_len])
        batch, block_len = inputs.input_ids.shape
        shape = (*past.shape[:3], block_len, past.shape[4])
        if self.block.shape != shape:
            self.block = self._block_buffer.shaped(shape)
        self._bind_past(past)
        self.binding.bind_outputs(
            self._block_names,
            self.block,
            rows=(batch, inputs.logits_rows.shape[1]),
            names=names,
        )

    def _capacity_for(self, places: int) -> int:
        return grown_capacity(places)

    def reserve(self, places: int) -> None:
        """See `CacheState.reserve`."""
        if places > self.memory.reserved:
            self._reserve(places, capacity=self.memory.capacity)

    def commit(self, rows: Sequence[Sequence[int]]) -> None:
        """See `Backend.commit`."""
        self._grow(max(int(n) + len(r) for n, r in zip(self.lengths, rows, strict=True)))
        for sequence, accepted in enumerate(rows):
            if accepted:
                self._append(sequence, accepted)

    def _grow(self, needed: int) -> None:
        """Make room for `needed` places per sequence."""
        if needed <= self.memory.capacity:
            return
        capacity = self._capacity_for(needed)
        if needed > self.memory.reserved:
            self._reserve(capacity, capacity=capacity)
        else:
            self.memory.resize(min(capacity, self.memory.reserved))

    def _append(self, sequence: int, rows: Sequence[int]) -> None:
        """Copy these rows of the last block behind the sequence's committed places."""
        start = int(self.lengths[sequence])
        stop = start + len(rows)
        block = self.block[:, sequence]  # [2 * layers, lines, block, width]
        first = rows[0]
        if rows[-1] - first + 1 == len(rows):
            accepted = block[:, :, first : first + len(rows)]
        else:
            accepted = np.take(block, rows, axis=2)
        self.places[:, sequence, :, start:stop] = accepted
        self.lengths[sequence] = stop


class ScatterCache(HostCache):
    """The cache, of fixed capacity, of a graph that writes the block's K/V into it.

    Past and present are one memory. ONNX Runtime's `TensorScatter` then copies nothing but the
    block's rows. Rows that are not committed are overwritten by the next pass.
    """

    def __init__(
        self,
        contract: Contract,
        make_binding: Callable[[], PassBinding],
        *,
        batch: int,
        sizing: CacheSizing,
    ) -> None:
        super().__init__(contract, make_binding, batch=batch, sizing=sizing)
        self._present_names = contract.present_names
        self._is_chosen = contract.row_places is RowPlaces.CHOSEN
        # What is bound stays while a commit advances.
        self._write_index = np.empty((batch, 0) if self._is_chosen else batch, dtype=np.int64)
        self._columns = np.zeros((batch, 0), dtype=np.int64)  # of the last block's rows

    def num_keys(self, num_columns: int) -> int:
        """See `CacheState.num_keys`; the capacity, however wide the block."""
        del num_columns
        return self.past_len

    def bind(self, inputs: StepInputs, names: tuple[Name, ...]) -> None:
        """See `HostCache.bind`."""
        self._columns = columns = inputs.columns
        batch, block_len = columns.shape
        self._bind_past(self.places)
        if self._is_chosen:
            if self._write_index.shape != columns.shape:
                self._write_index = np.empty_like(columns)
            np.add(self.lengths[:, None], columns, out=self._write_index)
        else:
            assert self._longest + block_len <= self.past_len, "the block fits behind all sequences"
            if len(self._write_index) != batch:
                self._write_index = np.empty(batch, dtype=np.int64)
            self._write_index[:] = self.lengths
        self.binding.bind_input(Name.WRITE_INDEX, self._write_index)
        self.binding.bind_outputs(
            self._present_names,
            self.places,
            rows=(batch, inputs.logits_rows.shape[1]),
            names=names,
        )

    def _capacity_for(self, places: int) -> int:
        del places
        assert self._contract.capacity is not None, "this class is for a fixed one"
        return self._contract.capacity

    def reserve(self, places: int) -> None:
        """See `CacheState.reserve`; there is room for the whole context."""

    def commit(self, rows: Sequence[Sequence[int]]) -> None:
        """See `Backend.commit`. Moves the accepted rows that do not lie in their places."""
        lengths: list[int] = self.lengths.tolist()
        for sequence, accepted in enumerate(rows):
            if accepted and self._columns[sequence, accepted[-1]] >= len(accepted):  # they ascend
                self._close_ranks(sequence, self._columns[sequence, list(accepted)].tolist())
            self.lengths[sequence] = lengths[sequence] + len(accepted)

    def _close_ranks(self, sequence: int, columns: Sequence[int]) -> None:
        """Move what stands in these columns of the block to the left, behind what is in place."""
        start = int(self.lengths[sequence])
        in_place = next(index for index, column in enumerate(columns) if column != index)
        moved = [start + column for column in columns[in_place:]]
        places = self.places[:, sequence]  # [2 * layers, lines, places, width]
        first = start + in_place
        places[:, :, first : first + len(moved)] = np.take(places, moved, axis=2)


class GrowingScatterCache(ScatterCache):
    """The same for a graph that takes any number of places: as many as the pass's mask has columns.

    They are added before a pass, inside reserved memory; a sequence alone has nothing to move.
    """

    def num_keys(self, num_columns: int) -> int:
        """See `CacheState.num_keys`."""
        needed = self._longest + num_columns
        if self._is_exact:
            return needed
        return self.past_len if needed <= self.past_len else self._capacity_for(needed)

    def bind(self, inputs: StepInputs, names: tuple[Name, ...]) -> None:
        """See `HostCache.bind`."""
        num_keys = inputs.attention_mask.shape[3]
        if num_keys > self.memory.reserved:
            self._reserve(grown_capacity(num_keys), capacity=num_keys)
        elif num_keys != self.past_len:
            self.memory.resize(num_keys)
        super().bind(inputs, names)

    def _capacity_for(self, places: int) -> int:
        grown = grown_capacity(places)
        room = self.memory.reserved if places <= self.memory.reserved else grown
        is_alone = len(self.lengths) == 1
        return min(room, -(-places // _STEP_ALONE) * _STEP_ALONE if is_alone else grown)

    def reserve(self, places: int) -> None:
        """See `CacheState.reserve`."""
        wanted = places + _BLOCK_ROOM
        if wanted > self.memory.reserved:
            self._reserve(wanted, capacity=self.past_len)

    def truncate(self, lengths: Sequence[int]) -> None:
        """See `CacheState.truncate`."""
        super().truncate(lengths)
        self.memory.resize(min(self.past_len, self._capacity_for(self._longest)))


def make_host_cache(
    contract: Contract,
    make_binding: Callable[[], PassBinding],
    *,
    batch: int,
    sizing: CacheSizing,
) -> HostCache:
    """An empty cache of the contract's form; see `HostCache`."""
    kind: type[HostCache] = ConcatCache
    if contract.cache_form is CacheForm.SCATTER:
        kind = GrowingScatterCache if contract.capacity is None else ScatterCache
    return kind(contract, make_binding, batch=batch, sizing=sizing)
