"""The products of a graph with the model's weights: those of its layers, and its head's."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from la_export.adapter import is_of_adapter
from la_export.graph.step_graph import StepGraph
from la_runtime.contract import Name

__all__ = ["head_products", "layer_products"]


def layer_products(step_graph: StepGraph) -> tuple[ir.Node, ...]:
    """The `MatMul`s that multiply every row of the block."""
    head = head_products(step_graph)
    return tuple(node for node in _products(step_graph) if node not in head)


def head_products(step_graph: StepGraph) -> tuple[ir.Node, ...]:
    """The `MatMul`s that multiply the rows whose scores are wanted: one, of the head."""
    wanted = next(value for value in step_graph.graph.inputs if value.name == Name.LOGITS_ROWS)
    return tuple(node for node in _products(step_graph) if _row_axes(node) == wanted.shape)


def _products(step_graph: StepGraph) -> Iterator[ir.Node]:
    weights = {
        value
        for name, value in step_graph.weight_values().items()
        if not any(map(is_of_adapter, step_graph.weights[name].parameters))
    }
    for node in step_graph.graph:
        if node.op_type == "MatMul" and node.inputs[1] in weights:
            yield node


def _row_axes(node: ir.Node) -> ir.Shape:
    activation = node.inputs[0]
    assert activation is not None, "a product has two factors"
    assert activation.shape is not None, f"activation {activation.name} has no shape"
    return ir.Shape(activation.shape[:-1])
