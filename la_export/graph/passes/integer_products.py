"""Multiplies in integers: int8 weights, and activations that each row quantizes for itself.

A row's scale never depends on another row, so what a row gives is the same in every block. Its
integers lie around 128, because the fast kernels multiply unsigned by signed integers.

    scale  = max |x| / 127                       of each row x
    y      = scale * (weight_scale * sum((q - 128) * w)),   q = QuantizeLinear(x, scale, 128)

A row of zeros has scale 0: whatever integers a division by it gives, the product with 0 is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from la_export.graph.passes.constants import add_integers, add_scalar
from la_export.graph.passes.integer_weights import IntegerWeights
from la_export.graph.step_graph import StepGraph
from la_runtime.contract import Name

__all__ = ["ZERO_POINT", "multiply_in_integers"]

ZERO_POINT = np.uint8(128)
_PER_STEP = np.float32(1 / 127)


def multiply_in_integers(step_graph: StepGraph, products: Sequence[ir.Node]) -> None:
    """Rewrite `MatMul`s of activations with stored weights.

    Args:
        step_graph: changed in place.
        products: which, in the order of the graph.
    """
    graph = step_graph.graph
    weights = IntegerWeights(step_graph)
    rows = _RowQuantizer(graph)
    for node in products:
        activation, weight = node.inputs
        assert activation is not None, "a product has two factors"
        assert weight is not None, "a product has two factors"
        quantized = rows.quantize(activation, before=node, features=weights.rows(weight))
        product = ir.node(
            "MatMulInteger",
            [quantized.values, weights.values(weight), rows.zero_point],
        )
        as_float = ir.node("Cast", [product.outputs[0]], {"to": ir.DataType.FLOAT})
        by_column = ir.node("Mul", [as_float.outputs[0], weights.scales(weight)])
        by_row = ir.node("Mul", [by_column.outputs[0], quantized.scales])
        _replace(graph, node, [product, as_float, by_column, by_row])


@dataclass(frozen=True, slots=True, kw_only=True)
class _QuantizedActivation:
    """[batch, rows, features] uint8 around the zero point, and [batch, rows, 1] scales."""

    values: ir.Value
    scales: ir.Value


class _RowQuantizer:
    """Quantizes each activation once, whoever multiplies it."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._done: dict[ir.Value, _QuantizedActivation] = {}
        self._zero_points: dict[str, ir.Value] = {}
        self.zero_point = add_scalar(graph, ZERO_POINT)

    def quantize(
        self, activation: ir.Value, *, before: ir.Node, features: int
    ) -> _QuantizedActivation:
        """Nodes in front of the first that needs it."""
        if activation not in self._done:
            self._done[activation] = self._add(activation, before, features)
        return self._done[activation]

    def _add(self, activation: ir.Value, before: ir.Node, features: int) -> _QuantizedActivation:
        graph = self._graph
        size = ir.node("Abs", [activation])
        largest = ir.node(
            "ReduceMax", [size.outputs[0], add_integers(graph, [-1])], {"keepdims": 1}
        )
        scale = ir.node("Mul", [largest.outputs[0], add_scalar(graph, _PER_STEP)])
        integers = ir.node(
            "QuantizeLinear",
            [activation, scale.outputs[0], self._zero_points_like(activation)],
            {"axis": -1, "block_size": features},
        )
        nodes = [size, largest, scale, integers]
        _name(nodes, f"{activation.name}.quantized")
        graph.insert_before(before, nodes)
        scale.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        integers.outputs[0].type = ir.TensorType(ir.DataType.UINT8)
        return _QuantizedActivation(values=integers.outputs[0], scales=scale.outputs[0])

    def _zero_points_like(self, activation: ir.Value) -> ir.Value:
        """[batch, rows, 1]: an operator wants as many zero points as scales."""
        like = _row_input(self._graph, activation)
        if like.name not in self._zero_points:
            graph = self._graph
            column = ir.node("Unsqueeze", [like, add_integers(graph, [-1])])
            shape = ir.node("Shape", [column.outputs[0]])
            expanded = ir.node("Expand", [self.zero_point, shape.outputs[0]])
            nodes = [column, shape, expanded]
            _name(nodes, f"{like.name}.zero_points")
            graph.insert_before(graph[0], nodes)
            self._zero_points[str(like.name)] = expanded.outputs[0]
        return self._zero_points[str(like.name)]


def _row_input(graph: ir.Graph, activation: ir.Value) -> ir.Value:
    """The input that has one entry for each of the activation's rows."""
    by_name = {str(value.name): value for value in graph.inputs}
    assert activation.shape is not None, f"activation {activation.name} has no shape"
    for name in (Name.INPUT_IDS, Name.LOGITS_ROWS):
        candidate = by_name[name]
        assert candidate.shape is not None, f"input {name} has no shape"
        if list(activation.shape[:-1]) == list(candidate.shape):
            return candidate
    raise AssertionError(f"{activation.name} has rows of no known kind: {activation.shape}")


def _replace(graph: ir.Graph, old: ir.Node, new: list[ir.Node]) -> None:
    output = old.outputs[0]
    _name(new, f"{output.name}.integers")
    result = new[-1].outputs[0]
    result.type, result.shape, name = output.type, output.shape, output.name
    ir.convenience.replace_nodes_and_values(graph, old, [old], new, [output], [result])
    result.name = name


def _name(nodes: list[ir.Node], prefix: str) -> None:
    for place, node in enumerate(nodes):
        node.outputs[0].name = f"{prefix}.{place}.{node.op_type}"
        node.name = f"{prefix}.{place}.{node.op_type}.node"
