"""What ONNX Runtime has bound for the passes over one cache in NumPy memory.

Owns the memory that scores are written to. ONNX Runtime borrows all memory, so what is bound is
held here. Knows nothing of sessions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from la_runtime.backends.base import StepInputs
from la_runtime.contract import Contract, KvOrder, Name
from la_runtime.storage import storage_dtype

if TYPE_CHECKING:
    import onnxruntime as ort

__all__ = ["PassBinding", "ReusedBuffer"]

_KEPT_BYTES = 8 << 20
_KEPT_TIMES = 4


class ReusedBuffer:
    """Memory that is reused for every shape it can hold, and given back when far too large.

    So a long prompt's block is not kept while its answer is decoded row by row.

    Args:
        dtype: of its elements.
    """

    def __init__(self, dtype: np.dtype[np.generic]) -> None:
        self.dtype = dtype
        self._resize(0)

    def _resize(self, size: int) -> None:
        self._flat = np.empty(size, dtype=self.dtype)
        self.address: int = self._flat.ctypes.data

    def shaped(self, shape: tuple[int, ...]) -> NDArray[np.generic]:
        """The memory in this shape; what it holds is undefined."""
        size = math.prod(shape)
        is_wasteful = self._flat.nbytes > _KEPT_BYTES and self._flat.size > _KEPT_TIMES * size
        if size > self._flat.size or is_wasteful:
            self._resize(size)
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
        self._has_lines = contract.kv_order is KvOrder.HEAD_MAJOR
        self._inputs: dict[str, NDArray[np.generic]] = {}
        self._past: NDArray[np.generic] | None = None
        self._written: NDArray[np.generic] | None = None
        # Asked for once: a contract makes the specs of all its layers at every call.
        specs = contract.outputs
        self._score_buffers = {spec.name: ReusedBuffer(storage_dtype(spec.dtype)) for spec in specs}
        self._score_widths = {
            spec.name: tuple(axis for axis in spec.axes if isinstance(axis, int)) for spec in specs
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
        """Bind the cache, [2 * layers, batch, lines, places, width] as in `HostPlaces`."""
        if past is not self._past:
            self._past = past
            for name, places in zip(self._contract.past_names, past, strict=True):
                self.io_binding.bind_cpu_input(name, self._in_order(places))

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
            written: [2 * layers, batch, lines, rows, width] their memory.
            rows: batch, and scored rows of each sequence.
            names: the scores to compute.
        """
        if names != self._names:
            self.io_binding.clear_binding_outputs()
            self._names, self._written, self.scores = names, None, {}
        if written is not self._written:
            self._written = written
            shape = self._in_order(written[0]).shape
            # Asking each array for its address costs as much as binding it.
            first, step = written.ctypes.data, written.strides[0]
            for index, name in enumerate(written_names):
                self._bind_output(name, written.dtype, shape, first + index * step)
        if rows != self._rows or not self.scores:
            self._rows = rows
            for name in names:
                buffer = self._score_buffers[name]
                shape = (*rows, *self._score_widths[name])
                self.scores[name] = buffer.shaped(shape)
                self._bind_output(name, buffer.dtype, shape, buffer.address)

    def _in_order(self, lines: NDArray[np.generic]) -> NDArray[np.generic]:
        """The graph's axes of [batch, lines, rows, width]."""
        return lines if self._has_lines else lines[:, 0]

    def _bind_output(
        self, name: str, dtype: np.dtype[np.generic], shape: tuple[int, ...], address: int
    ) -> None:
        self.io_binding.bind_output(name, "cpu", 0, dtype.type, shape, address)

    def clear(self) -> None:
        """Let go of everything."""
        self.io_binding.clear_binding_inputs()
        self.io_binding.clear_binding_outputs()
        self.scores, self._inputs, self._names = {}, {}, ()
        self._past = self._written = None
