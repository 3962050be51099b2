"""Small constants of a graph: added once, named by their numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

__all__ = ["add_integers", "add_scalar"]


def add_integers(graph: ir.Graph, numbers: Sequence[int]) -> ir.Value:
    """A vector of int64: a shape, axes or sizes."""
    name = "integers." + "x".join(str(number) for number in numbers)
    return _add(graph, name, np.array(numbers, np.int64))


def add_scalar(graph: ir.Graph, number: np.generic) -> ir.Value:
    """A single number, in its own dtype."""
    return _add(graph, f"scalar.{number.dtype}.{number}", np.asarray(number))


def _add(
    graph: ir.Graph, name: str, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
) -> ir.Value:
    if name in graph.initializers:
        return graph.initializers[name]
    tensor = ir.Tensor(array, name=name)
    value = ir.Value(
        name=name,
        type=ir.TensorType(tensor.dtype),
        shape=ir.Shape(array.shape),
        const_value=tensor,
    )
    graph.register_initializer(value)
    return value
