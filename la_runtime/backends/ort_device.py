"""A pass of ONNX Runtime over memory of a device: what it has bound, and the memory besides caches.

A pass copies its inputs to the device in one piece and the scores that were asked for back in one
piece. Keys and values stay where they are: ONNX Runtime is given addresses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from la_runtime.backends.base import StepInputs
from la_runtime.backends.device import ALIGNMENT, Device, DeviceMemory, Rows
from la_runtime.backends.device_cache import DeviceCache, Planes
from la_runtime.contract import CacheForm, Contract, Dtype, Name
from la_runtime.storage import storage_dtype

if TYPE_CHECKING:
    import onnxruntime as ort

__all__ = ["DevicePass", "Staging"]

# As ONNX numbers them; NumPy has no bfloat16 to name that one by.
_ELEMENT_TYPES: Final = {Dtype.FLOAT32: 1, Dtype.INT64: 7, Dtype.FLOAT16: 10, Dtype.BFLOAT16: 16}
_COPIED: Final = (
    Name.INPUT_IDS,
    Name.POSITION_IDS,
    Name.ATTENTION_MASK,
    Name.SLIDING_ATTENTION_MASK,
    Name.LOGITS_ROWS,
    Name.WRITE_INDEX,
)
_KEPT_BYTES: Final = 8 << 20
_KEPT_TIMES: Final = 4


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of one pass, by its shape."""

    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * storage_dtype(self.dtype).itemsize


class _Memory:
    """Device memory for whatever a pass asks; given back when far too large, see `_fits`."""

    def __init__(self, device: Device, purpose: str) -> None:
        self._device = device
        self._purpose = purpose
        self._memory: DeviceMemory | None = None

    def at_least(self, size_bytes: int) -> int:
        """The address of so much memory; another one than before if that did not fit."""
        if self._memory is None or not _fits(self._memory.size_bytes, size_bytes):
            self._memory = None
            self._memory = self._device.allocate(size_bytes, self._purpose)
        return self._memory.address


def _fits(held_bytes: int, needed_bytes: int) -> bool:
    """Whether memory is large enough, and not so large that it is better given back."""
    is_wasteful = held_bytes > _KEPT_BYTES and held_bytes > _KEPT_TIMES * needed_bytes
    return held_bytes >= needed_bytes and not is_wasteful


class Staging:
    """Tensors on the device and their copies in page-locked host memory, each side in one piece.

    Args:
        device: where they go to or come from.
        purpose: named when there is not enough memory.
    """

    def __init__(self, device: Device, purpose: str) -> None:
        self._device = device
        self._memory = _Memory(device, purpose)
        self._host = np.empty(0, dtype=np.uint8)
        self._tensors: dict[str, _Tensor] = {}
        self._base = self._size_bytes = 0
        self.arrays: dict[str, NDArray[np.generic]] = {}
        self.addresses: dict[str, int] = {}

    def lay_out(self, tensors: Mapping[str, _Tensor]) -> None:
        """Make room for these tensors; `arrays` and `addresses` then say where they are."""
        if self._tensors == tensors:
            return
        offsets: dict[str, int] = {}
        end = 0
        for name, tensor in tensors.items():
            offsets[name] = end
            end += -(-tensor.size_bytes // ALIGNMENT) * ALIGNMENT
        if not _fits(self._host.nbytes, end):
            self._host = self._device.allocate_host(end)
        self._base = self._memory.at_least(end)
        self._tensors, self._size_bytes = dict(tensors), end
        self.addresses = {name: self._base + offset for name, offset in offsets.items()}
        self.arrays = {
            name: self._host[offset : offset + tensors[name].size_bytes]
            .view(storage_dtype(tensors[name].dtype))
            .reshape(tensors[name].shape)
            for name, offset in offsets.items()
        }

    def upload(self) -> None:
        """Copy all of it to the device; `arrays` must not change until that is done."""
        self._device.upload(self._base, self._host[: self._size_bytes])

    def download(self) -> None:
        """Fill `arrays` from the device."""
        self._device.download(self._host[: self._size_bytes], self._base)


class DevicePass:
    """What the passes over one cache have bound. Binds what changed since the last one.

    Args:
        io_binding: of the session that will run.
        contract: the graph's contract.
        device: where all memory lies.
        device_type: ONNX Runtime's name of that device.
    """

    def __init__(
        self, io_binding: ort.IOBinding, contract: Contract, device: Device, device_type: str
    ) -> None:
        self.io_binding = io_binding
        self._contract = contract
        self._device = device
        self._device_type = device_type
        self._is_scatter = contract.cache_form is CacheForm.SCATTER
        self._past_names = contract.past_names
        self._written_names = contract.present_names if self._is_scatter else contract.block_names
        self._input_specs = [spec for spec in contract.inputs if spec.name in _COPIED]
        self._score_specs = [s for s in contract.outputs if s.name not in self._written_names]
        self._inputs = Staging(device, "a pass's inputs")
        self._scores = Staging(device, "a pass's scores")
        self._block = _Memory(device, "the K/V of a block")
        self._names: tuple[Name, ...] = ()
        self._bound_inputs: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._bound_scores: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._bound_cache: tuple[int, Planes] | None = None
        self._bound_written: tuple[int, Planes] | None = None

    @property
    def block(self) -> Rows:
        """Where the last pass put the K/V of its block."""
        assert self._bound_written is not None, "a pass has run"
        address, planes = self._bound_written
        return planes.rows(address)

    def bind(
        self, cache: DeviceCache, inputs: StepInputs, vectors_address: int, names: tuple[Name, ...]
    ) -> None:
        """Put the inputs on the device and bind everything the pass reads and writes.

        Args:
            cache: the past.
            inputs: the block.
            vectors_address: of the lookahead vectors.
            names: the scores to compute.
        """
        if names != self._names:
            self.io_binding.clear_binding_outputs()
            self._names, self._bound_scores, self._bound_written = names, {}, None
        self._bind_inputs(cache, inputs)
        vectors = _Tensor(
            self._contract.compute_dtype, (self._contract.k_max, self._contract.hidden_size)
        )
        self._bind_input(Name.LOOKAHEAD_EMBEDDINGS, vectors, vectors_address)
        self._bind_cache(cache, inputs.input_ids.shape[1])
        self._bind_scores(inputs.logits_rows.shape)

    def _bind_inputs(self, cache: DeviceCache, inputs: StepInputs) -> None:
        arrays: dict[str, NDArray[np.generic]] = {
            Name.INPUT_IDS: inputs.input_ids,
            Name.POSITION_IDS: inputs.position_ids,
            Name.ATTENTION_MASK: inputs.attention_mask,
            Name.LOGITS_ROWS: inputs.logits_rows,
            Name.WRITE_INDEX: cache.lengths,
        }
        if inputs.sliding_attention_mask is not None:
            arrays[Name.SLIDING_ATTENTION_MASK] = inputs.sliding_attention_mask
        tensors = {
            spec.name: _Tensor(spec.dtype, arrays[spec.name].shape) for spec in self._input_specs
        }
        self._inputs.lay_out(tensors)
        for name, tensor in tensors.items():
            self._inputs.arrays[name][...] = arrays[name]
            self._bind_input(name, tensor, self._inputs.addresses[name])
        self._inputs.upload()

    def _bind_cache(self, cache: DeviceCache, block_len: int) -> None:
        planes = cache.planes
        past = written = (cache.address, planes)
        if past != self._bound_cache:
            self._bound_cache = past
            for name, address in zip(
                self._past_names, planes.addresses(cache.address), strict=True
            ):
                self._bind_input(name, self._places(planes), address)
        if self._is_scatter:
            longest = int(cache.lengths.max(initial=0))
            assert longest + block_len <= planes.columns, "the block fits behind every sequence"
        else:
            block = Planes.of(self._contract, batch=planes.batch, columns=block_len)
            written = (self._block.at_least(block.size_bytes), block)
        if written != self._bound_written:
            self._bound_written = written
            base, planes = written
            for name, address in zip(self._written_names, planes.addresses(base), strict=True):
                self._bind_output(name, self._places(planes), address)

    def _places(self, planes: Planes) -> _Tensor:
        """One layer's keys or values."""
        contract = self._contract
        shape = (planes.batch, planes.num_heads, planes.columns, contract.head_dim)
        return _Tensor(contract.kv_dtype, shape)

    def _bind_scores(self, rows: tuple[int, ...]) -> None:
        tensors = {
            spec.name: _Tensor(
                spec.dtype, (*rows, *(axis for axis in spec.axes if isinstance(axis, int)))
            )
            for spec in self._score_specs
            if spec.name in self._names
        }
        self._scores.lay_out(tensors)
        for name, tensor in tensors.items():
            address = self._scores.addresses[name]
            if self._bound_scores.get(name) != (address, tensor.shape):
                self._bound_scores[name] = address, tensor.shape
                self._bind_output(name, tensor, address)

    def _bind_input(self, name: str, tensor: _Tensor, address: int) -> None:
        if self._bound_inputs.get(name) != (address, tensor.shape):
            self._bound_inputs[name] = address, tensor.shape
            self.io_binding.bind_input(
                name, self._device_type, 0, _ELEMENT_TYPES[tensor.dtype], tensor.shape, address
            )

    def _bind_output(self, name: str, tensor: _Tensor, address: int) -> None:
        self.io_binding.bind_output(
            name, self._device_type, 0, _ELEMENT_TYPES[tensor.dtype], tensor.shape, address
        )

    def fetch(self) -> dict[str, NDArray[np.generic]]:
        """Bring the scores of the pass that ran to the host; valid until the next one."""
        if self._names:
            self._scores.download()
        self._device.synchronize()
        return self._scores.arrays if self._names else {}
