"""What ONNX Runtime has bound for the passes over one cache in NumPy memory.

Owns the memory that scores are written to. ONNX Runtime borrows all memory, so what is bound is
held here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_runtime.backends.array_scores import ArrayScores
from la_runtime.backends.availability import explain_import_error
from la_runtime.backends.base import StepInputs
from la_runtime.contract import Axis, Contract, KvOrder, Name, TensorSpec
from la_runtime.storage import storage_dtype

try:
    import onnxruntime as ort
except ImportError as error:
    raise explain_import_error(error, backend="ort-cpu") from error

__all__ = ["PassBinding", "ReusedBuffer"]

_KEPT_BYTES = 8 << 20
_KEPT_TIMES = 4
_MOST_KEPT_SHAPES = 64
# As many as a `BlockWriter` has in turn, and no wide mask.
_MOST_KEPT_ARRAYS = 48
_MOST_KEPT_BYTES = 1 << 20

# Every step reads them, and an enumeration calls a function to find a member.
_INPUT_IDS: Final = Name.INPUT_IDS
_POSITION_IDS: Final = Name.POSITION_IDS
_ATTENTION_MASK: Final = Name.ATTENTION_MASK
_SLIDING_ATTENTION_MASK: Final = Name.SLIDING_ATTENTION_MASK
_LOGITS_ROWS: Final = Name.LOGITS_ROWS
_LOOKAHEAD_EMBEDDINGS: Final = Name.LOOKAHEAD_EMBEDDINGS


class ReusedBuffer:
    """Memory that is reused for every shape it can hold, and given back when far too large.

    So a long prompt's block is not kept while its answer is decoded row by row.

    Args:
        dtype: of its elements.
    """

    def __init__(self, dtype: np.dtype[np.generic]) -> None:
        self.dtype = dtype
        self._flat = np.empty(0, dtype=dtype)

    def shaped(self, shape: tuple[int, ...]) -> NDArray[np.generic]:
        """The memory in this shape; what it holds is undefined."""
        size = math.prod(shape)
        if not self.fits(size):
            self._flat = np.empty(size, dtype=self._flat.dtype)
        return self._flat[:size].reshape(shape)

    def fits(self, size: int) -> bool:
        """Whether there is memory for so many elements, and not far too much."""
        is_wasteful = self._flat.nbytes > _KEPT_BYTES and self._flat.size > _KEPT_TIMES * size
        return size <= self._flat.size and not is_wasteful


class _ScoreMemory:
    """Memory for one output with scores. What was bound for a shape is kept for the next time.

    Args:
        spec: the output.
    """

    def __init__(self, spec: TensorSpec) -> None:
        self._buffer = ReusedBuffer(storage_dtype(spec.dtype))
        self._width = tuple(axis for axis in spec.axes if isinstance(axis, int))
        self._kept: dict[tuple[int, int], tuple[NDArray[np.generic], ort.OrtValue]] = {}

    def shaped(self, rows: tuple[int, int]) -> tuple[NDArray[np.generic], ort.OrtValue]:
        """The memory for the scored rows of a batch, and the same as ONNX Runtime knows it."""
        found = self._kept.get(rows)
        if found is None:
            shape = (*rows, *self._width)
            if not self._buffer.fits(math.prod(shape)) or len(self._kept) == _MOST_KEPT_SHAPES:
                self._kept.clear()  # nothing else may hold on to memory that is given back
            array = self._buffer.shaped(shape)
            self._kept[rows] = found = (array, ort.OrtValue.ortvalue_from_numpy(array))
        return found

    def clear(self) -> None:
        """Give it back."""
        self._kept.clear()
        self._buffer = ReusedBuffer(self._buffer.dtype)


class _KeptValues:
    """Arrays as ONNX Runtime knows them. Kept, for the arrays of a few blocks take turns.

    Making one takes longer than binding it.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[NDArray[np.generic], ort.OrtValue]] = {}

    def of(self, array: NDArray[np.generic]) -> ort.OrtValue:
        """An array as ONNX Runtime knows it."""
        kept = self._values.get(id(array))
        if kept is not None:
            return kept[1]
        assert array.flags.c_contiguous, "of any other the value would be a copy"
        value = ort.OrtValue.ortvalue_from_numpy(array)
        if 0 < array.nbytes <= _MOST_KEPT_BYTES:  # an empty one is made anew by every pass
            if len(self._values) == _MOST_KEPT_ARRAYS:
                self._values.pop(next(iter(self._values)))  # the one made longest ago
            self._values[id(array)] = (array, value)  # an id is an array's as long as that lives
        return value

    def clear(self) -> None:
        """Let go of them."""
        self._values.clear()


class PassBinding:
    """What the passes over one cache have bound. Binds what changed since the last one.

    Args:
        session: that will run.
        contract: the graph's contract.
    """

    def __init__(self, session: ort.InferenceSession, contract: Contract) -> None:
        self.session = session
        self.io_binding = session.io_binding()
        self.scores: dict[str, NDArray[np.generic]] = {}
        self.read_scores = ArrayScores(self.scores)
        """What reads them."""
        self._names: tuple[Name, ...] = ()
        self._rows = (0, 0)
        self._contract = contract
        self._has_lines = contract.kv_order is KvOrder.HEAD_MAJOR
        self._values = _KeptValues()
        self._inputs: dict[str, NDArray[np.generic]] = {}
        self._past: NDArray[np.generic] | None = None
        self._written: NDArray[np.generic] | None = None
        self._score_memory = {
            spec.name: _ScoreMemory(spec) for spec in contract.outputs if Axis.ROWS in spec.axes
        }

    def bind_inputs(self, inputs: StepInputs, vectors: NDArray[np.generic]) -> None:
        """Bind a block and the lookahead vectors."""
        self.bind_input(_INPUT_IDS, inputs.input_ids)
        self.bind_input(_POSITION_IDS, inputs.position_ids)
        self.bind_input(_ATTENTION_MASK, inputs.attention_mask)
        if inputs.sliding_attention_mask is not None:
            self.bind_input(_SLIDING_ATTENTION_MASK, inputs.sliding_attention_mask)
        self.bind_input(_LOGITS_ROWS, inputs.logits_rows)
        self.bind_input(_LOOKAHEAD_EMBEDDINGS, vectors)

    def bind_input(self, name: str, array: NDArray[np.generic]) -> None:
        """Bind one input, unless it is this very array already."""
        if self._inputs.get(name) is not array:
            self._inputs[name] = array
            self.io_binding.bind_ortvalue_input(name, self._values.of(array))

    def bind_past(self, past: NDArray[np.generic]) -> None:
        """Bind the cache, [2 * layers, batch, lines, places, width] as in `HostPlaces`."""
        if past is not self._past:
            self._past = past
            for name, places in zip(self._contract.past_names, past, strict=True):
                self.io_binding.bind_cpu_input(name, self._in_order(places))

    def let_go_of_all_but(self, past: NDArray[np.generic]) -> None:
        """Let go of everything if what is bound as the cache is of other memory than this."""
        if self._past is not None and self._past.base is not past.base:
            self.clear()

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
            self._names, self._written = names, None
            self.scores.clear()
        if written is not self._written:
            self._written = written
            shape = self._in_order(written[0]).shape
            # Asking each array for its address costs as much as binding it.
            first, step = written.ctypes.data, written.strides[0]
            for index, name in enumerate(written_names):
                self.io_binding.bind_output(
                    name, "cpu", 0, written.dtype.type, shape, first + index * step
                )
        if rows != self._rows or len(self.scores) < len(names):
            for name in names:
                self.scores[name], value = self._score_memory[name].shaped(rows)
                self.io_binding.bind_ortvalue_output(name, value)
            self._rows = rows  # only once all are bound: memory may have run out before

    def _in_order(self, lines: NDArray[np.generic]) -> NDArray[np.generic]:
        """The graph's axes of [batch, lines, rows, width]."""
        return lines if self._has_lines else lines[:, 0]

    def clear(self) -> None:
        """Let go of everything."""
        self.io_binding.clear_binding_inputs()
        self.io_binding.clear_binding_outputs()
        self.scores.clear()
        for memory in self._score_memory.values():
            memory.clear()
        self._values.clear()
        self._inputs, self._names = {}, ()
        self._past = self._written = None
