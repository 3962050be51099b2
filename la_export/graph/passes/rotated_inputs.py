"""Turns what the graph's own inputs and activations bring, where no weight can do it.

See `quantize.rotation`. These are products of floats: of the lookahead vectors, of what the head
reads, and of what the last layer of each MLP reads, the latter in blocks of channels.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from la_export.graph.passes.constants import add_integers
from la_export.graph.step_graph import StepGraph, WeightSource
from la_export.quantize.rotation import (
    BLOCK_ROTATION,
    HEAD_ROTATION,
    LOOKAHEAD_ROTATION,
    Rotation,
)
from la_runtime.contract import Name

__all__ = ["TurnedInputs", "find_inputs", "turn_inputs"]

TurnedInputs = dict[str, list[ir.Value]]
"""Activations by the matrix that turns them."""


def find_inputs(
    step_graph: StepGraph,
    rotation: Rotation,
    *,
    layers: Sequence[ir.Node],
    head: Collection[ir.Node],
) -> TurnedInputs:
    """What has to be turned, found while products are still `MatMul`s.

    Args:
        step_graph: whose products these are.
        rotation: of its weights.
        layers: products of the layers.
        head: products of the head.
    """
    blocked = [node for node in layers if _parameters(step_graph, node) <= rotation.blocked]
    vectors = [v for v in step_graph.graph.inputs if v.name == Name.LOOKAHEAD_EMBEDDINGS]
    return {
        LOOKAHEAD_ROTATION: vectors,
        HEAD_ROTATION: [_activation(node) for node in head],
        BLOCK_ROTATION: [_activation(node) for node in blocked],
    }


def turn_inputs(step_graph: StepGraph, inputs: TurnedInputs, rotation: Rotation) -> None:
    """Multiply each by its matrix, which becomes a weight of the graph.

    Args:
        step_graph: changed in place.
        inputs: see `find_inputs`.
        rotation: of its weights.
    """
    graph, hidden = step_graph.graph, step_graph.contract.hidden_size
    for name, values in inputs.items():
        size = rotation.block if name == BLOCK_ROTATION else hidden
        matrix = ir.Value(
            name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([size, size])
        )
        graph.inputs.append(matrix)
        step_graph.weights[name] = WeightSource(parameters=(name,))
        for value in values:
            _turn(graph, value, matrix, size)


def _turn(graph: ir.Graph, value: ir.Value, matrix: ir.Value, size: int) -> None:
    """Whoever read the value reads its product."""
    assert value.shape is not None, f"{value.name} has no shape"
    channels = int(value.shape[-1])  # type: ignore[arg-type]
    readers, first = list(value.uses()), next(node for node in graph if value in node.inputs)
    nodes: list[ir.Node] = []

    def add(operator: str, inputs: list[ir.Value]) -> ir.Value:
        node = ir.node(operator, inputs)
        node.outputs[0].name = f"{value.name}.turned.{len(nodes)}.{operator}"
        node.name = f"{node.outputs[0].name}.node"
        nodes.append(node)
        return node.outputs[0]

    if channels == size:
        turned = add("MatMul", [value, matrix])
    else:
        blocks = add("Reshape", [value, add_integers(graph, [0, 0, channels // size, size])])
        product = add("MatMul", [blocks, matrix])
        turned = add("Reshape", [product, add_integers(graph, [0, 0, channels])])
    turned.type, turned.shape = value.type, value.shape
    graph.insert_before(first, nodes)
    for reader, index in readers:
        reader.replace_input_with(index, turned)


def _parameters(step_graph: StepGraph, product: ir.Node) -> set[str]:
    weight = product.inputs[1]
    assert weight is not None, "a product has two factors"
    return set(step_graph.weights[str(weight.name)].parameters)


def _activation(product: ir.Node) -> ir.Value:
    value = product.inputs[0]
    assert value is not None, "a product has two factors"
    return value
