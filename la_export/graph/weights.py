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
from la_export.graph.passes.contract_names import IR_DTYPES
from la_export.graph.step_graph import StepGraph, WeightPart, WeightSource
from la_export.options import Precision
from la_export.quantize.integers import BLOCK_SIZE, quantize_blocks, quantize_rows
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


def write_graph(step_graph: StepGraph, reader: TensorReader, folder: Path) -> Path:
    """Write the graph and its weights; memory holds one tensor at a time.

    Args:
        step_graph: an optimized graph; its weights become initializers.
        reader: gives every weight the graph asks for.
        folder: receives `GRAPH_FILE` and `WEIGHTS_FILE`.

    Returns:
        Path of the graph.

    Raises:
        CheckpointError: a tensor is missing or has another shape than the model expects.
        OSError: the files cannot be written.
    """
    for name, value in step_graph.weight_values().items():
        _join_weight(step_graph, name, value, reader)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / GRAPH_FILE
    ir.save(
        step_graph.model,
        path,
        external_data=WEIGHTS_FILE,
        alignment=_ALIGNMENT_BYTES,
    )
    return path


def _join_weight(step_graph: StepGraph, name: str, value: ir.Value, reader: TensorReader) -> None:
    """Make a trailing input an initializer, in the dtype that the trace or a pass gave it."""
    assert value.shape is not None, f"weight {name} has no shape"
    assert value.dtype is not None, f"weight {name} has no dtype"
    shape, dtype, source = value.shape.numpy(), value.dtype, step_graph.weights[name]

    def load() -> ir.TensorProtocol:
        return _MAKERS[source.part](_read(reader, source, shape), source, dtype)

    value.const_value = ir.LazyTensor(
        load, dtype=dtype, shape=ir.Shape(shape), name=name, cache=False
    )
    step_graph.graph.inputs.remove(value)
    step_graph.graph.register_initializer(value)


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


def _make_int8_values(
    array: NDArray[np.float32], source: WeightSource, _: ir.DataType
) -> ir.TensorProtocol:
    values = quantize_rows(array).values
    return ir.Tensor(np.ascontiguousarray(values.T if source.transposed else values))


def _make_int8_scales(
    array: NDArray[np.float32], _: WeightSource, __: ir.DataType
) -> ir.TensorProtocol:
    return ir.Tensor(quantize_rows(array).scales)


def _make_int4_values(
    array: NDArray[np.float32], source: WeightSource, ir_dtype: ir.DataType
) -> ir.TensorProtocol:
    values = quantize_blocks(array).values
    turned = np.ascontiguousarray(values.T if source.transposed else values)
    return ir.Tensor(turned.astype(ir_dtype.numpy()))


def _make_int4_scales(
    array: NDArray[np.float32], source: WeightSource, _: ir.DataType
) -> ir.TensorProtocol:
    scales = quantize_blocks(array).scales
    return ir.Tensor(np.ascontiguousarray(scales.T if source.transposed else scales))


_MAKERS: Final[
    dict[
        WeightPart,
        Callable[[NDArray[np.float32], WeightSource, ir.DataType], ir.TensorProtocol],
    ]
] = {
    WeightPart.FLOATS: _make_floats,
    WeightPart.INT8_VALUES: _make_int8_values,
    WeightPart.INT8_SCALES: _make_int8_scales,
    WeightPart.INT4_VALUES: _make_int4_values,
    WeightPart.INT4_SCALES: _make_int4_scales,
}
