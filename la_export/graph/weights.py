"""Joins a graph with its weights on disk, one tensor in memory at a time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from la_export.graph.passes.contract_names import IR_DTYPES
from la_export.graph.step_graph import StepGraph, WeightSource
from la_export.options import Precision
from la_runtime.contract import Dtype
from la_runtime.errors import CheckpointError
from la_runtime.storage import to_stored

__all__ = ["GRAPH_FILE", "WEIGHTS_FILE", "TensorReader", "write_graph"]

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
    """Make a trailing input an initializer, in the dtype that the trace gave it."""
    assert value.shape is not None, f"weight {name} has no shape"
    assert value.dtype is not None, f"weight {name} has no dtype"
    shape, dtype = value.shape.numpy(), _DTYPES[value.dtype]
    value.const_value = ir.LazyTensor(
        _make_loader(reader, step_graph.weights[name], shape, dtype),
        dtype=value.dtype,
        shape=ir.Shape(shape),
        name=name,
        cache=False,
    )
    step_graph.graph.inputs.remove(value)
    step_graph.graph.register_initializer(value)


def _make_loader(
    reader: TensorReader, source: WeightSource, shape: tuple[int, ...], dtype: Dtype
) -> Callable[[], ir.TensorProtocol]:
    stored_shape = shape[::-1] if source.transposed else shape

    def load() -> ir.TensorProtocol:
        logger.debug("reading %s", source.parameter)
        array = reader.read(source.parameter)
        if array.shape != stored_shape:
            raise CheckpointError(
                f"tensor {source.parameter} has shape {list(array.shape)}, the configuration "
                f"expects {list(stored_shape)}; config and weights do not belong together"
            )
        _check_range(source.parameter, array, dtype)
        if dtype is Dtype.FLOAT32:
            return ir.Tensor(np.ascontiguousarray(array.T) if source.transposed else array)
        stored = to_stored(array.T if source.transposed else array, dtype)
        return ir.Tensor(stored, dtype=IR_DTYPES[dtype])

    return load


def _check_range(parameter: str, array: NDArray[np.float32], dtype: Dtype) -> None:
    """Refuse what would become infinite, or already is no number."""
    largest = max(float(array.max()), -float(array.min()))
    if not math.isfinite(largest):
        raise CheckpointError(
            f"tensor {parameter} holds values that are no finite numbers; the weights are damaged: "
            "copy them again"
        )
    if largest >= _LIMITS[dtype]:
        raise CheckpointError(
            f"tensor {parameter} has a value of size {largest:.4g}, which {dtype} cannot hold; "
            f"build with --precision {Precision.BF16} or {Precision.FP32}"
        )
