"""K/V of some sequences in NumPy memory, with room to grow in.

Owns where each sequence's places lie. Knows nothing of passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from la_runtime.contract import Contract, KvOrder
from la_runtime.storage import storage_dtype

__all__ = ["HostPlaces"]


class HostPlaces:
    """Zeroed places of `batch` sequences, in memory reserved for more of them.

    A layer's keys or values of a sequence are *lines*, in each of which places are neighbours:
    one per head in `head-major`, a single one with all heads in `sequence-major`. The lines of all
    sequences lie in reserved memory one behind the other, and move apart when places are added;
    so the cache is never in memory twice. One line alone has nowhere to move: its places are added
    for nothing. Reserved memory that was never written costs nothing.

    Args:
        contract: the graph's contract.
        batch: sequences.
        capacity: places per sequence to begin with.
        reserved: places per sequence that there is memory for, if more.
    """

    def __init__(
        self, contract: Contract, batch: int, *, capacity: int = 0, reserved: int = 0
    ) -> None:
        heads, head_dim = contract.num_kv_heads, contract.head_dim
        is_head_major = contract.kv_order is KvOrder.HEAD_MAJOR
        self._lines, self._width = (heads, head_dim) if is_head_major else (1, heads * head_dim)
        self.batch = batch
        self.reserved = max(reserved, capacity)
        size = batch * self._lines * self.reserved * self._width
        self._memory = np.zeros(
            (2 * contract.num_layers, size), dtype=storage_dtype(contract.kv_dtype)
        )
        self.capacity = capacity
        """Places per sequence. Read only."""
        self.view = self._lay_out(capacity)
        """[2 * layers, batch, lines, capacity, width]; the places of one layer are contiguous."""

    def _lay_out(self, capacity: int) -> NDArray[np.generic]:
        shape = (self.batch, self._lines, capacity, self._width)
        return self._memory[:, : math.prod(shape)].reshape(len(self._memory), *shape)

    def resize(self, capacity: int) -> None:
        """Have so many places per sequence, at most `reserved`; those added are zero."""
        assert capacity <= self.reserved, "there is memory for these places"
        before, kept = self.view, min(capacity, self.capacity)
        self.view = after = self._lay_out(capacity)
        self.capacity = capacity
        lines = list(np.ndindex(before.shape[1:3]))
        if capacity > kept:
            lines.reverse()  # so that no line moves over one that has yet to move
        for line in lines:
            if any(line):
                for old, new in zip(before, after, strict=True):
                    new[line][:kept] = old[line][:kept]
            after[:, *line, kept:] = 0

    def copy_from(self, sequences: Sequence[tuple[HostPlaces, int, int]]) -> None:
        """Fill the first places of every sequence.

        Args:
            sequences: per sequence whose places, of which sequence there, and how many.
        """
        for sequence, (other, index, count) in enumerate(sequences):
            self.view[:, sequence, :, :count] = other.view[:, index, :, :count]
