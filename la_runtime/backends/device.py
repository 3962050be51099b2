"""What a backend that keeps its memory on a device asks of it.

Everything happens in the order it was asked for, and after the call returns: only `synchronize`
waits. Until then, host memory that is copied from must not change, and what is copied to says
nothing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["ALIGNMENT", "Device", "DeviceGraph", "DeviceMemory", "Rows", "aligned_rows"]

ALIGNMENT: Final = 256
"""Bytes to which TensorRT wants the address of every tensor aligned."""


class DeviceMemory:
    """A piece of device memory; it goes back when nothing refers to it any more.

    Args:
        address: of its first byte, a multiple of `ALIGNMENT`.
        size_bytes: at least 1.
        release: takes the address; called once.
    """

    def __init__(self, address: int, size_bytes: int, release: Callable[[int], None]) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.free = weakref.finalize(self, release, address)


class DeviceGraph(Protocol):
    """Work that was captured, to be launched any number of times."""

    def close(self) -> None:
        """Release it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows at equal distances in device memory, in planes at equal distances.

    Args:
        address: of the first row.
        pitch_bytes: from a row to the next.
        plane_rows: rows from a plane to the next.
    """

    address: int
    pitch_bytes: int
    plane_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much of `Rows`: bytes of each row, rows of each plane, planes."""

    width_bytes: int
    rows: int
    planes: int

    def __bool__(self) -> bool:
        return 0 not in (self.width_bytes, self.rows, self.planes)


class Device(Protocol):
    """One stream of work on one device, and the memory it works on."""

    @property
    def stream(self) -> int:
        """The stream's handle, for libraries that put work on it."""
        ...

    def allocate(self, size_bytes: int, purpose: str) -> DeviceMemory:
        """Zeroed memory, aligned to `ALIGNMENT`.

        Args:
            size_bytes: how much; 0 gives the smallest piece.
            purpose: named when there is not enough.

        Raises:
            HostError: the device has not that much free.
        """
        ...

    def allocate_host(self, size_bytes: int) -> NDArray[np.uint8]:
        """Page-locked host memory, the only kind that is copied without another copy.

        Raises:
            HostError: the host cannot lock that much.
        """
        ...

    def zero(self, rows: Rows, extent: Extent) -> None:
        """Zero these rows."""
        ...

    def copy(self, destination: Rows, source: Rows, extent: Extent) -> None:
        """Copy rows of device memory to others that do not overlap them."""
        ...

    def upload(self, address: int, source: NDArray[np.generic]) -> None:
        """Copy a C-ordered host array to the device."""
        ...

    def download(self, destination: NDArray[np.generic], address: int) -> None:
        """Fill a C-ordered host array from the device."""
        ...

    def synchronize(self) -> None:
        """Wait until all of it is done.

        Raises:
            HostError: some of it failed.
        """
        ...

    def capture(self, work: Callable[[], None]) -> DeviceGraph:
        """Record what `work` puts on the stream instead of doing it.

        Raises:
            HostError: it does something that cannot be captured.
        """
        ...

    def launch(self, graph: DeviceGraph) -> None:
        """Do captured work."""
        ...

    def describe_memory(self) -> str:
        """Free and total memory, in words."""
        ...

    def close(self) -> None:
        """Wait, then give back the stream and all memory that is still out.

        It never raises: after an error of the device there is nothing left to give back.
        """
        ...


def aligned_rows(num_rows: int, pitch_bytes: int) -> int:
    """The fewest rows, at least `num_rows`, that take a multiple of `ALIGNMENT` bytes."""
    step = ALIGNMENT // math.gcd(pitch_bytes, ALIGNMENT)
    return -(-num_rows // step) * step
