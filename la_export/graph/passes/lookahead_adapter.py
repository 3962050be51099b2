"""Adds the adapter to the products of a graph, in the rows of lookaheads alone.

    y = Where(id >= vocab_size, W x + expand (reduce x), W x)

so that a token's row is, bit for bit, what it is without one.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from la_export.adapter import Adapter, AdapterPair, expand_name
from la_export.graph.passes.constants import add_integers, add_scalar
from la_export.graph.passes.names import TRANSPOSED_SUFFIX, joined_name
from la_export.graph.step_graph import StepGraph, WeightSource
from la_runtime.contract import Name
from la_runtime.errors import UsageError

__all__ = ["add_adapter"]

_WEIGHT: Final = ".weight"


def add_adapter(step_graph: StepGraph, adapter: Adapter) -> None:
    """Rewrite what reads the products of the adapter's layers.

    Args:
        step_graph: weights stored as `MatMul` reads them; layers may be merged.
        adapter: its names are the model's; nothing is done where it has no pair.

    Raises:
        UsageError: it is made for other layers.
    """
    if not adapter.pairs:
        return
    gate = _add_gate(step_graph)
    pairs = {layer: pair for pair in adapter.pairs for layer in pair.layers}
    middles: dict[str, ir.Value] = {}
    found: set[str] = set()
    for node in list(step_graph.graph):
        layers = _layers(step_graph, node)
        if not layers or layers[0] not in pairs:
            continue
        pair = pairs[layers[0]]
        if not set(layers) <= set(pair.layers):
            raise UsageError(
                f"the lookaheads adapt {layers[0]} apart from {layers[-1]}, which reads the same; "
                "tune them again with la-export tune"
            )
        name = pair.reduce_name
        if name not in middles:
            middles[name] = _add_middle(step_graph, node, name, pair)
        _add_difference(step_graph, node, layers, gate, middles[name], pair)
        found |= set(layers)
    if missing := sorted(pairs.keys() - found):
        raise UsageError(
            f"the lookaheads adapt {missing[0]}, which is no product of every row; tune them again "
            "with la-export tune"
        )


def _layers(step_graph: StepGraph, node: ir.Node) -> tuple[str, ...]:
    """The linear layers that a node computes; none if it is no product with a weight."""
    if node.op_type != "MatMul" or node.inputs[1] is None:
        return ()
    source = step_graph.weights.get(str(node.inputs[1].name))
    if source is None or not all(name.endswith(_WEIGHT) for name in source.parameters):
        return ()
    return tuple(name.removesuffix(_WEIGHT) for name in source.parameters)


def _add_gate(step_graph: StepGraph) -> ir.Value:
    """[batch, block, 1] whether a row is a lookahead's."""
    graph = step_graph.graph
    ids = next(value for value in graph.inputs if value.name == Name.INPUT_IDS)
    vocab_size = add_scalar(graph, np.int64(step_graph.contract.vocab_size))
    is_lookahead = ir.node("GreaterOrEqual", [ids, vocab_size], name="adapter.is_lookahead.node")
    column = ir.node(
        "Unsqueeze",
        [is_lookahead.outputs[0], add_integers(graph, [-1])],
        name="adapter.gate.node",
    )
    is_lookahead.outputs[0].name, column.outputs[0].name = "adapter.is_lookahead", "adapter.gate"
    graph.insert_before(graph[0], [is_lookahead, column])
    return column.outputs[0]


def _add_middle(step_graph: StepGraph, product: ir.Node, name: str, pair: AdapterPair) -> ir.Value:
    """[batch, block, rank] of what the pair's layers read."""
    activation = product.inputs[0]
    assert activation is not None, "a product has two factors"
    weight = _add_weight(step_graph, (name,), pair.reduce.shape[::-1], activation)
    node = ir.node("MatMul", [activation, weight], name=f"{name}.node")
    output = node.outputs[0]
    output.name, output.type = f"{name}.output", activation.type
    step_graph.graph.insert_before(product, node)
    return output


def _add_difference(
    step_graph: StepGraph,
    product: ir.Node,
    layers: tuple[str, ...],
    gate: ir.Value,
    middle: ir.Value,
    pair: AdapterPair,
) -> None:
    """Whoever read the product reads what the gate lets through."""
    plain, activation = product.outputs[0], product.inputs[0]
    assert activation is not None, "a product has two factors"
    assert activation.shape is not None, f"{activation.name} has no shape"
    names = tuple(expand_name(layer) for layer in layers)
    width = sum(
        size for layer, size in zip(pair.layers, pair.sizes, strict=True) if layer in layers
    )
    weight = _add_weight(step_graph, names, (pair.rank, width), activation)
    readers = list(plain.uses())
    difference = ir.node("MatMul", [middle, weight])
    total = ir.node("Add", [plain, difference.outputs[0]])
    chosen = ir.node("Where", [gate, total.outputs[0], plain])
    for kind, node in (("difference", difference), ("total", total), ("chosen", chosen)):
        node.name = f"{names[0]}.{kind}.node"
        node.outputs[0].name = f"{names[0]}.{kind}"
        node.outputs[0].type = activation.type
        node.outputs[0].shape = ir.Shape([*activation.shape[:-1], width])
    step_graph.graph.insert_after(product, [difference, total, chosen])
    for reader, index in readers:
        reader.replace_input_with(index, chosen.outputs[0])


def _add_weight(
    step_graph: StepGraph, parameters: tuple[str, ...], shape: tuple[int, ...], like: ir.Value
) -> ir.Value:
    """[in, out] in the dtype of an activation."""
    name = joined_name(parameters) + TRANSPOSED_SUFFIX
    value = ir.Value(name=name, type=like.type, shape=ir.Shape(shape))
    step_graph.graph.inputs.append(value)
    step_graph.weights[name] = WeightSource(parameters=parameters, transposed=True)
    return value
