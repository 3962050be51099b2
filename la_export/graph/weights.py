"""Joins a graph with its weights on disk, one tensor in memory at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from la_export.graph.passes.contract_names import IR_DTYPES
from la_export.graph.step_graph import StepGraph, WeightSource
from la_runtime.errors import CheckpointError

__all__ = ["GRAPH_FILE", "WEIGHTS_FILE", "TensorReader", "write_graph"]

GRAPH_FILE: Final = "model.onnx"
WEIGHTS_FILE: Final = "model.onnx.data"
# Page-aligned offsets let a runtime map each large tensor straight from the file.
_ALIGNMENT_BYTES: Final = 4096

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
    _join_weights(step_graph, reader)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / GRAPH_FILE
    ir.save(
        step_graph.model,
        path,
        external_data=WEIGHTS_FILE,
        alignment=_ALIGNMENT_BYTES,
    )
    return path


def _join_weights(step_graph: StepGraph, reader: TensorReader) -> None:
    graph = step_graph.graph
    for name, value in step_graph.weight_values().items():
        assert value.shape is not None, f"weight {name} has no shape"
        shape = value.shape.numpy()
        dtype = IR_DTYPES[step_graph.contract.compute_dtype]
        value.const_value = ir.LazyTensor(
            _make_loader(reader, step_graph.weights[name], shape),
            dtype=dtype,
            shape=ir.Shape(shape),
            name=name,
            cache=False,
        )
        value.type = ir.TensorType(dtype)
        graph.inputs.remove(value)
        graph.register_initializer(value)


def _make_loader(
    reader: TensorReader, source: WeightSource, shape: tuple[int, ...]
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
        return ir.Tensor(np.ascontiguousarray(array.T) if source.transposed else array)

    return load
