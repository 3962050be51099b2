"""Caches in NumPy memory, one class per cache form, and what ONNX Runtime has bound of them.

Owns the cache places, the memory that a pass writes K/V and scores to, and which of it is bound.
ONNX Runtime borrows that memory, so all of it is held here. Knows nothing of sessions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from la_runtime.backends.base import CacheSizing, CacheState, StepInputs
from la_runtime.backends.places import grown_capacity, make_spoiled
from la_runtime.contract import CacheForm, Contract, Name
from la_runtime.storage import from_stored, storage_dtype, to_stored

if TYPE_CHECKING:
    import onnxruntime as ort

__all__ = [
    "ConcatCache",
    "HostCache",
    "PassBinding",
    "ScatterCache",
    "make_host_cache",
]

_KEPT_BYTES = 8 << 20
_KEPT_TIMES = 4


class _Buffer:
    """Memory that is reused for every shape it can hold, and given back when far too large.

    So a long prompt's block is not kept while its answer is decoded row by row.
    """

    def __init__(self, dtype: np.dtype[np.generic]) -> None:
        self._flat = np.empty(0, dtype=dtype)

    def shaped(self, shape: tuple[int, ...]) -> NDArray[np.generic]:
        size = math.prod(shape)
        is_wasteful = self._flat.nbytes > _KEPT_BYTES and self._flat.size > _KEPT_TIMES * size
        if size > self._flat.size or is_wasteful:
            self._flat = np.empty(size, dtype=self._flat.dtype)
        return self._flat[:size].reshape(shape)


class PassBinding:
    """What the passes over one cache have bound. Binds what changed since the last one.

    Args:
        io_binding: of the session that will run.
        contract: the graph's contract.
    """

    def __init__(self, io_binding: ort.IOBinding, contract: Contract) -> None:
        self.io_binding = io_binding
        self.scores: dict[str, NDArray[np.generic]] = {}
        self._names: tuple[Name, ...] = ()
        self._rows = (0, 0)
        self._contract = contract
        self._inputs: dict[str, NDArray[np.generic]] = {}
        self._past: NDArray[np.generic] | None = None
        self._written: NDArray[np.generic] | None = None
        self._score_buffers = {
            spec.name: _Buffer(storage_dtype(spec.dtype)) for spec in contract.outputs
        }

    def bind_inputs(self, inputs: StepInputs, vectors: NDArray[np.generic]) -> None:
        """Bind a block and the lookahead vectors."""
        self.bind_input(Name.INPUT_IDS, inputs.input_ids)
        self.bind_input(Name.POSITION_IDS, inputs.position_ids)
        self.bind_input(Name.ATTENTION_MASK, inputs.attention_mask)
        self.bind_input(Name.LOGITS_ROWS, inputs.logits_rows)
        self.bind_input(Name.LOOKAHEAD_EMBEDDINGS, vectors)

    def bind_input(self, name: str, array: NDArray[np.generic]) -> None:
        """Bind one input, unless it is this very array already."""
        if self._inputs.get(name) is not array:
            self._inputs[name] = array
            self.io_binding.bind_cpu_input(name, array)

    def bind_past(self, past: NDArray[np.generic]) -> None:
        """Bind the cache, [2 * layers, ...]."""
        if past is not self._past:
            self._past = past
            for name, places in zip(self._contract.past_names, past, strict=True):
                self.io_binding.bind_cpu_input(name, places)

    def bind_outputs(
        self,
        written_names: Sequence[str],
        written: NDArray[np.generic],
        *,
        rows: tuple[int, int],
        names: tuple[Name, ...],
    ) -> None:
        """Bind memory for the K/V that the pass writes, and buffers for scores.

        Args:
            written_names: outputs with K/V.
            written: [2 * layers, ...] their memory.
            rows: batch, and scored rows of each sequence.
            names: the scores to compute.
        """
        if names != self._names:
            self.io_binding.clear_binding_outputs()
            self._names, self._written, self.scores = names, None, {}
        if written is not self._written:
            self._written = written
            for name, memory in zip(written_names, written, strict=True):
                self._bind_output(name, memory)
        if rows != self._rows or not self.scores:
            self._rows = rows
            for name in names:
                self.scores[name] = self._score_buffers[name].shaped(self._score_shape(name, rows))
                self._bind_output(name, self.scores[name])

    def _score_shape(self, name: Name, rows: tuple[int, int]) -> tuple[int, ...]:
        (axes,) = (spec.axes for spec in self._contract.outputs if spec.name == name)
        return (*rows, *(axis for axis in axes if isinstance(axis, int)))

    def _bind_output(self, name: str, array: NDArray[np.generic]) -> None:
        self.io_binding.bind_output(
            name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data
        )

    def clear(self) -> None:
        """Let go of everything."""
        self.io_binding.clear_binding_inputs()
        self.io_binding.clear_binding_outputs()
        self.scores, self._inputs, self._names = {}, {}, ()
        self._past = self._written = None


class HostCache(ABC):
    """Cache places [2 * layers, batch, kv_heads, places, head_dim], as `CacheState` wants them.

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
        self.sizing = sizing
        self.lengths = np.zeros(batch, dtype=np.int64)
        self.places: NDArray[np.generic] = np.empty(0)
        self._make_binding = make_binding
        self._contract = contract
        self._dtype = storage_dtype(contract.kv_dtype)

    @property
    @abstractmethod
    def past_len(self) -> int:
        """See `CacheState.past_len`."""

    @abstractmethod
    def bind(self, block_len: int, num_rows: int, names: tuple[Name, ...]) -> None:
        """Bind the cache and outputs for a block of so many rows, so many of them scored."""

    @abstractmethod
    def commit(self, rows: Sequence[Sequence[int]]) -> None:
        """See `Backend.commit`."""

    @abstractmethod
    def reserve(self, places: int) -> None:
        """See `CacheState.reserve`."""

    @abstractmethod
    def keep(self, indices: Sequence[int]) -> None:
        """See `CacheState.keep`."""

    @abstractmethod
    def absorb(self, other: CacheState) -> None:
        """See `CacheState.absorb`."""

    def take(self, indices: Sequence[int]) -> HostCache:
        """See `CacheState.take`."""
        taken = type(self)(self._contract, self._make_binding, batch=0, sizing=self.sizing)
        taken.lengths, taken.places = self.lengths, self.places
        taken.keep(indices)
        return taken

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
        used = self.places[:, sequence, :, : self.lengths[sequence]]
        return from_stored(used, self._contract.kv_dtype)

    def close(self) -> None:
        """See `CacheState.close`."""
        self.binding.clear()
        self.lengths = np.zeros(0, dtype=np.int64)


class ConcatCache(HostCache):
    """The cache of a graph that returns the block's K/V; a commit copies the accepted rows.

    The places lie in memory reserved for as many as the sequences may need. They grow inside it
    by moving apart, so that a long prompt never has its cache in memory twice, while passes
    present few columns more than there are tokens. Reserved memory that was never written costs
    nothing.
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
        self._lay_out(batch, capacity=0, reserved=0)
        self._block_names = contract.block_names
        self.block = self.places
        self._block_buffer = _Buffer(self._dtype)

    def _lay_out(self, batch: int, *, capacity: int, reserved: int) -> None:
        """Fresh zeroed places, in memory for up to `reserved` of them per sequence."""
        contract = self._contract
        self._reserved = max(reserved, capacity)
        size = batch * contract.num_kv_heads * self._reserved * contract.head_dim
        self._memory = np.zeros((2 * contract.num_layers, size), dtype=self._dtype)
        self.places = self._view(batch, capacity)

    def _view(self, batch: int, capacity: int) -> NDArray[np.generic]:
        """The reserved memory as places; each layer's are contiguous."""
        contract = self._contract
        shape = (batch, contract.num_kv_heads, capacity, contract.head_dim)
        return self._memory[:, : math.prod(shape)].reshape(2 * contract.num_layers, *shape)

    @property
    def past_len(self) -> int:
        """See `CacheState.past_len`."""
        if self.sizing is CacheSizing.EXACT:
            return int(self.lengths.max(initial=0))
        return int(self.places.shape[3])

    def bind(self, block_len: int, num_rows: int, names: tuple[Name, ...]) -> None:
        """See `HostCache.bind`."""
        contract, batch = self._contract, len(self.lengths)
        past = self.places
        if self.sizing is CacheSizing.EXACT:
            past = np.ascontiguousarray(past[:, :, :, : self.past_len])
        layers, heads, head_dim = 2 * contract.num_layers, contract.num_kv_heads, contract.head_dim
        shape = (layers, batch, heads, block_len, head_dim)
        if self.block.shape != shape:
            self.block = self._block_buffer.shaped(shape)
        self.binding.bind_past(past)
        self.binding.bind_outputs(
            self._block_names, self.block, rows=(batch, num_rows), names=names
        )

    def reserve(self, places: int) -> None:
        """See `CacheState.reserve`."""
        if places > self._reserved:
            self._replace(range(len(self.lengths)), self.places.shape[3], places)

    def commit(self, rows: Sequence[Sequence[int]]) -> None:
        """See `Backend.commit`."""
        self._grow(max(int(n) + len(r) for n, r in zip(self.lengths, rows, strict=True)))
        for sequence, accepted in enumerate(rows):
            if accepted:
                self._append(sequence, accepted)

    def _grow(self, needed: int) -> None:
        """Make room for `needed` places per sequence."""
        before = self.places
        if needed <= before.shape[3]:
            return
        capacity = grown_capacity(needed)
        if needed > self._reserved:
            self._replace(range(len(self.lengths)), capacity, capacity)
            return
        self.places = self._view(before.shape[1], min(capacity, self._reserved))
        # From the last row to the first: each moves away from where it and those after it were.
        for sequence, head in reversed(list(np.ndindex(before.shape[1:3]))):
            length = int(self.lengths[sequence])
            for old, new in zip(before, self.places, strict=True):
                new[sequence, head, :length] = old[sequence, head, :length]
                new[sequence, head, length:] = 0

    def _replace(self, kept: Sequence[int], capacity: int, reserved: int) -> None:
        """Move these sequences' places to memory of their own."""
        before = self.places
        copied = min(capacity, before.shape[3])
        self._lay_out(len(kept), capacity=capacity, reserved=reserved)
        for new, old in enumerate(kept):
            self.places[:, new, :, :copied] = before[:, old, :, :copied]

    def _append(self, sequence: int, rows: Sequence[int]) -> None:
        """Copy these rows of the last block behind the sequence's committed places."""
        start = int(self.lengths[sequence])
        stop = start + len(rows)
        block = self.block[:, sequence]  # [2 * layers, kv_heads, block, head_dim]
        first = rows[0]
        if rows[-1] - first + 1 == len(rows):
            accepted = block[:, :, first : first + len(rows)]
        else:
            accepted = np.take(block, rows, axis=2)
        self.places[:, sequence, :, start:stop] = accepted
        self.lengths[sequence] = stop

    def keep(self, indices: Sequence[int]) -> None:
        """See `CacheState.keep`."""
        kept = list(indices)
        self.lengths = self.lengths[kept]
        # A long sequence that left does not make the others' passes wide for ever.
        capacity = min(self.places.shape[3], grown_capacity(int(self.lengths.max(initial=0))))
        self._replace(kept, capacity, self._reserved)

    def absorb(self, other: CacheState) -> None:
        """See `CacheState.absorb`."""
        assert isinstance(other, ConcatCache), "caches of one backend"
        batch = len(self.lengths)
        if batch == 0:
            self._memory, self.places = other._memory, other.places
            self._reserved = other._reserved
        else:
            parts = (self.places, other.places)
            self._lay_out(
                batch + len(other.lengths),
                capacity=max(part.shape[3] for part in parts),
                reserved=max(self._reserved, other._reserved),
            )
            first = 0
            for part in parts:
                self.places[:, first : first + part.shape[1], :, : part.shape[3]] = part
                first += part.shape[1]
        self.lengths = np.concatenate([self.lengths, other.lengths])
        other.close()

    def close(self) -> None:
        """See `CacheState.close`."""
        super().close()
        self._lay_out(0, capacity=0, reserved=0)


class ScatterCache(HostCache):
    """The cache of a graph that writes the block's K/V into it, behind what is committed.

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
        self.places = self._zeros(batch)

    def _zeros(self, batch: int) -> NDArray[np.generic]:
        """Places of empty sequences; memory that is never written costs nothing."""
        contract = self._contract
        shape = (batch, contract.num_kv_heads, self.past_len, contract.head_dim)
        return np.zeros((2 * contract.num_layers, *shape), dtype=self._dtype)

    @property
    def past_len(self) -> int:
        """See `CacheState.past_len`."""
        assert self._contract.capacity is not None, "checked by the contract"
        return self._contract.capacity

    def bind(self, block_len: int, num_rows: int, names: tuple[Name, ...]) -> None:
        """See `HostCache.bind`."""
        longest = int(self.lengths.max(initial=0))
        assert longest + block_len <= self.past_len, "the block fits behind every sequence"
        batch = len(self.lengths)
        self.binding.bind_past(self.places)
        self.binding.bind_input(Name.WRITE_INDEX, self.lengths)
        self.binding.bind_outputs(
            self._present_names, self.places, rows=(batch, num_rows), names=names
        )

    def reserve(self, places: int) -> None:
        """See `CacheState.reserve`; there is room for the whole context."""

    def commit(self, rows: Sequence[Sequence[int]]) -> None:
        """See `Backend.commit`. Moves the accepted rows that do not lie in their places."""
        for sequence, accepted in enumerate(rows):
            start = int(self.lengths[sequence])
            in_place = next(
                (index for index, row in enumerate(accepted) if row != index), len(accepted)
            )
            if moved := [start + row for row in accepted[in_place:]]:
                places = self.places[:, sequence]  # [2 * layers, kv_heads, places, head_dim]
                first = start + in_place
                places[:, :, first : first + len(moved)] = np.take(places, moved, axis=2)
            self.lengths[sequence] = start + len(accepted)

    def keep(self, indices: Sequence[int]) -> None:
        """See `CacheState.keep`."""
        kept, before = list(indices), self.places
        self.lengths = self.lengths[kept]
        self.places = self._zeros(len(kept))
        self._copy(before[:, kept_sequence] for kept_sequence in kept)

    def absorb(self, other: CacheState) -> None:
        """See `CacheState.absorb`."""
        assert isinstance(other, ScatterCache), "caches of one backend"
        parts = (self.places, other.places)
        self.lengths = np.concatenate([self.lengths, other.lengths])
        self.places = self._zeros(len(self.lengths))
        self._copy(part[:, sequence] for part in parts for sequence in range(part.shape[1]))
        other.close()

    def _copy(self, sequences: Iterable[NDArray[np.generic]]) -> None:
        """Copy what is committed of these sequences, in order."""
        for new, places in enumerate(sequences):
            length = int(self.lengths[new])
            self.places[:, new, :, :length] = places[:, :, :length]

    def close(self) -> None:
        """See `CacheState.close`."""
        super().close()
        self.places = self._zeros(0)


def make_host_cache(
    contract: Contract,
    make_binding: Callable[[], PassBinding],
    *,
    batch: int,
    sizing: CacheSizing,
) -> HostCache:
    """An empty cache of the contract's form; see `HostCache`."""
    kind = ScatterCache if contract.cache_form is CacheForm.SCATTER else ConcatCache
    return kind(contract, make_binding, batch=batch, sizing=sizing)
