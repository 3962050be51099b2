"""Joins a graph with its weights on disk, one tensor in memory at a time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from la_export.adapter import NO_ADAPTER, Adapter, is_of_adapter
from la_export.byte_progress import ByteProgress, ignore_bytes
from la_export.graph.passes.contract_names import IR_DTYPES
from la_export.graph.step_graph import StepGraph, WeightPart, WeightSource
from la_export.options import Precision
from la_export.quantize.integers import (
    BLOCK_SIZE,
    QuantizedBlocks,
    QuantizedRows,
    quantize_blocks,
    quantize_rows,
)
from la_export.quantize.rotation import ROTATION_PRODUCTS
from la_export.quantize.smoothing import Smoothing
from la_runtime.contract import Dtype
from la_runtime.errors import CheckpointError
from la_runtime.storage import to_stored

__all__ = ["GRAPH_FILE", "WEIGHTS_FILE", "SmoothedReader", "TensorReader", "write_graph"]

GRAPH_FILE: Final = "model.onnx"
WEIGHTS_FILE: Final = "model.onnx.data"
# Page-aligned offsets let a runtime map each large tensor straight from the file.
_ALIGNMENT_BYTES: Final = 4096
_SMALLEST_ALIGNED_BYTES: Final = 1 << 20
# They stay in the graph.
_LARGEST_INLINE_BYTES: Final = 256
_DTYPES: Final = {ir_dtype: dtype for dtype, ir_dtype in IR_DTYPES.items()}
# From here on numbers round to infinity. Both types end half a step below a power of two: of 11
# bits in float16, of 8 in bfloat16.
_LIMITS: Final = {
    Dtype.FLOAT32: math.inf,
    Dtype.FLOAT16: 2.0**16 * (1 - 2.0**-12),
    Dtype.BFLOAT16: 2.0**128 * (1 - 2.0**-9),
}

logger = logging.getLogger(__name__)


class TensorReader(Protocol):
    """Gives out a model's tensors by parameter name."""

    def read(self, parameter: str) -> NDArray[np.float32]:
        """One tensor as float32; nothing is kept."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SmoothedReader:
    """Reads tensors as the smoothed model has them, and those of its adapter.

    Args:
        source: of the model's own.
        smoothing: of them.
        adapter: of the smoothed model.
    """

    source: TensorReader
    smoothing: Smoothing
    adapter: Adapter = NO_ADAPTER

    def read(self, parameter: str) -> NDArray[np.float32]:
        """One tensor as float32; nothing is kept."""
        rotation = self.smoothing.rotation
        if rotation is not None and parameter in ROTATION_PRODUCTS:
            return rotation.product(parameter)
        if is_of_adapter(parameter):
            return dict(self.adapter.parameters())[parameter]
        return self.smoothing.apply(parameter, self.source.read(parameter))


def write_graph(
    step_graph: StepGraph,
    reader: TensorReader,
    folder: Path,
    *,
    report: ByteProgress = ignore_bytes,
) -> Path:
    """Write the graph and its weights; memory holds one matrix at a time.

    Args:
        step_graph: an optimized graph; its weights become initializers.
        reader: gives every weight the graph asks for.
        folder: receives `GRAPH_FILE` and `WEIGHTS_FILE`.
        report: is told how many bytes of the weights are written.

    Returns:
        Path of the graph.

    Raises:
        CheckpointError: a tensor is missing or has another shape than the model expects.
        OSError: the files cannot be written.
    """
    maker = _Maker(reader)
    for name, value in step_graph.weight_values().items():
        _join_weight(step_graph, name, value, maker)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / GRAPH_FILE
    _write_weights(step_graph.graph, folder, report)
    ir.save(step_graph.model, path)
    return path


def _write_weights(graph: ir.Graph, folder: Path, report: ByteProgress) -> None:
    """One behind the other, in the graph's order: integers and their scales are made together."""
    stored = {
        value: value.const_value
        for value in graph.initializers.values()
        if value.const_value is not None and value.const_value.nbytes > _LARGEST_INLINE_BYTES
    }
    total = sum(tensor.nbytes for tensor in stored.values())
    done = 0
    with (folder / WEIGHTS_FILE).open("wb") as file:
        for value, tensor in stored.items():
            report(done, total)
            if tensor.nbytes >= _SMALLEST_ALIGNED_BYTES:
                file.write(bytes(-file.tell() % _ALIGNMENT_BYTES))
            offset = file.tell()
            file.write(tensor.tobytes())
            value.const_value = ir.ExternalTensor(
                WEIGHTS_FILE,
                offset,
                file.tell() - offset,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=str(value.name),
                base_dir=folder,
            )
            done += tensor.nbytes
    report(done, total)


def _join_weight(step_graph: StepGraph, name: str, value: ir.Value, maker: _Maker) -> None:
    """Make a trailing input an initializer, in the dtype that the trace or a pass gave it."""
    assert value.shape is not None, f"weight {name} has no shape"
    assert value.dtype is not None, f"weight {name} has no dtype"
    shape, dtype, source = value.shape.numpy(), value.dtype, step_graph.weights[name]
    value.const_value = ir.LazyTensor(
        lambda: maker.make(source, shape, dtype),
        dtype=dtype,
        shape=ir.Shape(shape),
        name=name,
        cache=False,
    )
    step_graph.graph.inputs.remove(value)
    step_graph.graph.register_initializer(value)


class _Maker:
    """Makes what a graph stores of the model's tensors.

    Args:
        reader: gives the model's.
    """

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self._of: tuple[str, ...] | None = None
        self._integers: QuantizedRows | QuantizedBlocks | None = None

    def make(
        self, source: WeightSource, shape: tuple[int, ...], dtype: ir.DataType
    ) -> ir.TensorProtocol:
        """One weight of the graph."""
        if source.part is WeightPart.FLOATS:
            return _make_floats(_read(self._reader, source, shape), source, dtype)
        # The scales are asked for behind the values; reading and turning again takes minutes.
        if self._integers is None or self._of != source.parameters:
            self._integers = None
            quantize = _QUANTIZERS[source.part]
            self._integers = quantize(_read(self._reader, source, shape))
            self._of = source.parameters
        is_values = source.part in (WeightPart.INT8_VALUES, WeightPart.INT4_VALUES)
        array = self._integers.values if is_values else self._integers.scales
        turned = np.ascontiguousarray(array.T if source.transposed else array)
        if source.part is WeightPart.INT4_VALUES:
            return ir.Tensor(turned.astype(dtype.numpy()))
        return ir.Tensor(turned)


def _read(
    reader: TensorReader, source: WeightSource, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """The parameters one behind the other, in their own axes."""
    parts = []
    for parameter in source.parameters:
        logger.debug("reading %s", parameter)
        part = reader.read(parameter)
        _check_finite(parameter, part)
        parts.append(part)
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
    del parts
    expected = _expected_shape(source, shape)
    found = joined.shape[: len(expected)]
    if found != expected:
        raise CheckpointError(
            f"tensor {' + '.join(source.parameters)} has shape {list(joined.shape)}, the "
            f"configuration expects {list(expected)}; config and weights do not belong together"
        )
    return joined


def _expected_shape(source: WeightSource, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The parameters' shape, as far as the shape of what the graph holds says it."""
    match source.part:
        case WeightPart.INT8_SCALES:
            return (math.prod(shape),)
        case WeightPart.INT4_SCALES:
            rows, blocks = shape[::-1] if source.transposed else shape
            return (rows, blocks * BLOCK_SIZE)
        case _:
            return (*shape[:-2], *shape[:-3:-1]) if source.transposed else shape


def _check_finite(parameter: str, array: NDArray[np.float32]) -> None:
    if not math.isfinite(_largest(array)):
        raise CheckpointError(
            f"tensor {parameter} holds values that are no finite numbers; the weights are damaged: "
            "copy them again"
        )


def _largest(array: NDArray[np.float32]) -> float:
    return max(float(array.max()), -float(array.min()))


def _make_floats(
    array: NDArray[np.float32], source: WeightSource, ir_dtype: ir.DataType
) -> ir.TensorProtocol:
    """Rounded once, unless that would make a number infinite."""
    dtype = _DTYPES[ir_dtype]
    if _largest(array) >= _LIMITS[dtype]:
        raise CheckpointError(
            f"tensor {source.parameters[0]} has a value of size {_largest(array):.4g}, which "
            f"{dtype} cannot hold; build with --precision {Precision.BF16} or {Precision.FP32}"
        )
    turned = array.swapaxes(-1, -2) if source.transposed else array
    if dtype is Dtype.FLOAT32:
        return ir.Tensor(np.ascontiguousarray(turned))
    return ir.Tensor(to_stored(turned, dtype), dtype=ir_dtype)


_QUANTIZERS: Final[
    dict[WeightPart, Callable[[NDArray[np.float32]], QuantizedRows | QuantizedBlocks]]
] = {
    WeightPart.INT8_VALUES: quantize_rows,
    WeightPart.INT8_SCALES: quantize_rows,
    WeightPart.INT4_VALUES: quantize_blocks,
    WeightPart.INT4_SCALES: quantize_blocks,
}
