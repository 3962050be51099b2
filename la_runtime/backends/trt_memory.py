"""Memory of the passes: what goes to the device, and what a pass over a cache gives."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_runtime.backends.device import Device, DeviceMemory, Rows
from la_runtime.backends.device_cache import Planes
from la_runtime.contract import Contract, TensorSpec
from la_runtime.storage import storage_dtype

__all__ = ["PassResults", "StagedInput"]

_KEPT_BYTES: Final = 8 << 20
_KEPT_TIMES: Final = 4


class StagedInput:
    """An input on the device, and page-locked memory on its way there.

    Args:
        device: where it goes.
        size_bytes: of the largest one.
        name: of the input.
    """

    def __init__(self, device: Device, size_bytes: int, name: str) -> None:
        self._device = device
        self._memory = device.allocate(size_bytes, f"input {name}")
        self._host = device.allocate_host(size_bytes)

    @property
    def address(self) -> int:
        """Where it is on the device."""
        return self._memory.address

    def put(self, array: NDArray[np.generic]) -> None:
        """Copy it to the device; not again before the device is done with it."""
        staged = self._host[: array.nbytes].view(array.dtype)
        staged[:] = array.reshape(-1)
        self._device.upload(self.address, staged)


class PassResults:
    """What the last pass over one cache gave: its block's K/V, and scores in page-locked memory.

    The memory is reused, but a long prompt's block is not kept while its answer is decoded.

    Args:
        device: where the passes run.
        contract: of the graph.
    """

    def __init__(self, device: Device, contract: Contract) -> None:
        self._device = device
        self._contract = contract
        self._block_memory: DeviceMemory | None = None
        self._scores: dict[str, NDArray[np.uint8]] = {}

    def lay_out_block(self, batch: int, block_len: int) -> None:
        """Memory for the K/V of a block, cache form `concat`."""
        self._planes = Planes.of(self._contract, batch=batch, columns=block_len)
        size = self._planes.size_bytes
        held = 0 if self._block_memory is None else self._block_memory.size_bytes
        if size > held or held > max(_KEPT_BYTES, _KEPT_TIMES * size):
            self._block_memory = None  # goes back before its successor comes
            self._block_memory = self._device.allocate(size, "the block's K/V")

    @property
    def block(self) -> Rows:
        """The block's K/V."""
        assert self._block_memory is not None, "a commit follows a forward"
        return self._planes.rows(self._block_memory.address)

    @property
    def block_addresses(self) -> list[int]:
        """Of each key's and value's plane."""
        return self._planes.addresses(self.block.address)

    def scores(self, spec: TensorSpec, rows: tuple[int, int]) -> NDArray[np.generic]:
        """Memory for the scores of so many sequences and rows."""
        shape = (*rows, *(axis for axis in spec.axes if isinstance(axis, int)))
        dtype = storage_dtype(spec.dtype)
        size = math.prod(shape) * dtype.itemsize
        if spec.name not in self._scores or self._scores[spec.name].nbytes < size:
            self._scores[spec.name] = self._device.allocate_host(size)
        return self._scores[spec.name][:size].view(dtype).reshape(shape)
