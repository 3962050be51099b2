"""A device whose memory is NumPy's and whose work waits until somebody waits for it.

So host memory that is changed or read too early gives wrong numbers here as it does on a
GPU. An access outside of what is allocated fails, and so does a copy onto itself.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from la_runtime.backends.device import ALIGNMENT, DeviceMemory, Extent, Rows
from la_runtime.errors import HostError

__all__ = ["NumpyDevice", "NumpyGraph"]

_POISON = 0xA5

Work = Callable[[], None]


class NumpyGraph:
    """Captured work."""

    def __init__(self, work: list[Work]) -> None:
        self.work: list[Work] | None = work

    def close(self) -> None:
        self.work = None


class NumpyDevice:
    """See `Device`.

    Args:
        total_bytes: memory it has.
    """

    stream = 0x57EA

    def __init__(self, total_bytes: int = 1 << 30) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self.uploads: list[int] = []
        self.downloads: list[int] = []
        self.copies: list[Extent] = []
        self.num_captures = 0
        self.num_launches = 0
        self.is_capturing = False
        self.is_closed = False
        self._memory: dict[int, NDArray[np.uint8]] = {}
        self._addresses: list[int] = []
        self._returned: deque[int] = deque()
        self._queue: list[Work] = []

    def put(self, work: Work) -> None:
        """Put work on the stream."""
        assert not self.is_closed, "the device was closed"
        self._queue.append(work)

    def bytes_at(self, address: int, size: int) -> NDArray[np.uint8]:
        """A view of memory, all of one allocation."""
        index = bisect_right(self._addresses, address) - 1
        assert index >= 0, f"{address:#x} is not allocated"
        base = self._addresses[index]
        memory = self._memory[base]
        end = address - base + size
        assert end <= memory.size, f"{size} bytes at {address:#x} leave what is allocated"
        return memory[address - base : end]

    def allocate(self, size_bytes: int, purpose: str) -> DeviceMemory:
        assert not self.is_capturing, "allocated while capturing"
        self._free_returned()
        size = max(size_bytes, ALIGNMENT)
        if self.used_bytes + size > self.total_bytes:
            raise HostError(f"the GPU has not enough memory: {purpose} needs {size}")
        padded = np.full(size + ALIGNMENT, _POISON, dtype=np.uint8)
        skipped = -padded.ctypes.data % ALIGNMENT
        memory = padded[skipped : skipped + size]
        address = memory.ctypes.data
        self._memory[address] = memory
        insort(self._addresses, address)
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self.put(lambda: memory.fill(0))
        return DeviceMemory(address, size, self._returned.append)

    def allocate_host(self, size_bytes: int) -> NDArray[np.uint8]:
        assert not self.is_capturing, "allocated while capturing"
        return np.full(size_bytes, _POISON, dtype=np.uint8)

    def zero(self, rows: Rows, extent: Extent) -> None:
        def work() -> None:
            for address in _row_addresses(rows, extent):
                self.bytes_at(address, extent.width_bytes)[:] = 0

        if extent:
            self.put(work)

    def copy(self, destination: Rows, source: Rows, extent: Extent) -> None:
        def work() -> None:
            width = extent.width_bytes
            to, origin = _row_addresses(destination, extent), _row_addresses(source, extent)
            nearest = np.searchsorted(origin, to)
            for shift in (-1, 0):
                near = origin[np.clip(nearest + shift, 0, origin.size - 1)]
                assert (np.abs(near - to) >= width).all(), "a copy onto itself"
            for one, other in zip(to, origin, strict=True):
                self.bytes_at(int(one), width)[:] = self.bytes_at(int(other), width)

        if extent:
            self.copies.append(extent)
            self.put(work)

    def upload(self, address: int, source: NDArray[np.generic]) -> None:
        assert source.flags.c_contiguous
        raw = source.reshape(-1).view(np.uint8)
        self.uploads.append(raw.size)

        def work() -> None:
            self.bytes_at(address, raw.size)[:] = raw

        self.put(work)

    def download(self, destination: NDArray[np.generic], address: int) -> None:
        assert destination.flags.c_contiguous
        raw = destination.reshape(-1).view(np.uint8)
        raw[:] = _POISON
        self.downloads.append(raw.size)

        def work() -> None:
            raw[:] = self.bytes_at(address, raw.size)

        self.put(work)

    def synchronize(self) -> None:
        assert not self.is_capturing, "waited while capturing"
        self._free_returned()
        self._run_queue()

    def capture(self, work: Work) -> NumpyGraph:
        before, self._queue = self._queue, []
        self.is_capturing = True
        try:
            work()
            captured = self._queue
        finally:
            self._queue, self.is_capturing = before, False
        self.num_captures += 1
        return NumpyGraph(captured)

    def launch(self, graph: NumpyGraph) -> None:
        assert graph.work is not None, "launched after it was closed"
        self.num_launches += 1
        for work in graph.work:
            self.put(work)

    def describe_memory(self) -> str:
        return f"{self.total_bytes - self.used_bytes} of {self.total_bytes} bytes are free"

    def close(self) -> None:
        if not self.is_closed:
            self.synchronize()
            self.is_closed = True
            self._memory.clear()
            self._addresses.clear()

    def _run_queue(self) -> None:
        queue, self._queue = self._queue, []
        for work in queue:
            work()

    def _free_returned(self) -> None:
        while self._returned:
            address = self._returned.popleft()
            if address in self._memory:
                self.used_bytes -= self._memory[address].size
                self._queue.append(lambda address=address: self._forget(address))

    def _forget(self, address: int) -> None:
        self._memory.pop(address).fill(_POISON)
        self._addresses.remove(address)


def _row_addresses(rows: Rows, extent: Extent) -> NDArray[np.int64]:
    """Ascending, for the planes lie one after the other."""
    assert extent.width_bytes <= rows.pitch_bytes, "a row is no longer than the way to the next"
    plane = np.arange(extent.planes)[:, None] * rows.plane_rows
    row = np.arange(extent.rows)[None]
    return (rows.address + (plane + row) * rows.pitch_bytes).reshape(-1)
