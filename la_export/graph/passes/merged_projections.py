"""Joins the projections that read one activation into one multiplication: q, k, v; gate, up.

One larger product costs less than several small ones, and its input is quantized and fetched once.
Each output feature is computed as before.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from la_export.graph.passes.constants import add_integers
from la_export.graph.passes.names import TRANSPOSED_SUFFIX, joined_name
from la_export.graph.step_graph import StepGraph, WeightPart, WeightSource

__all__ = ["merge_projections"]


def merge_projections(step_graph: StepGraph) -> None:
    """Replace `MatMul`s of one activation with stored weights by one, and a `Split`."""
    weights = step_graph.weight_values()
    groups: dict[ir.Value, list[ir.Node]] = {}
    for node in step_graph.graph:
        if _is_projection(node, step_graph):
            activation = node.inputs[0]
            assert activation is not None, "a product has two factors"
            groups.setdefault(activation, []).append(node)
    for activation, nodes in groups.items():
        if len(nodes) > 1:
            _merge(step_graph, activation, nodes, weights)


def _is_projection(node: ir.Node, step_graph: StepGraph) -> bool:
    if node.op_type != "MatMul" or node.inputs[1] is None:
        return False
    source = step_graph.weights.get(str(node.inputs[1].name))
    return source is not None and source.transposed and source.part is WeightPart.FLOATS


def _merge(
    step_graph: StepGraph,
    activation: ir.Value,
    nodes: Sequence[ir.Node],
    weights: dict[str, ir.Value],
) -> None:
    """One node in the place of the first; all read nothing but the activation and weights."""
    graph = step_graph.graph
    parts = [weights[str(node.inputs[1].name)] for node in nodes]  # type: ignore[union-attr]
    sources = [step_graph.weights[str(part.name)] for part in parts]
    parameters = tuple(name for source in sources for name in source.parameters)
    sizes = [int(part.shape[1]) for part in parts]  # type: ignore[index, arg-type]
    name = joined_name(parameters) + TRANSPOSED_SUFFIX
    merged = ir.Value(
        name=name,
        type=parts[0].type,
        shape=ir.Shape([parts[0].shape[0], sum(sizes)]),  # type: ignore[index]
    )
    graph.inputs.append(merged)
    step_graph.weights[name] = WeightSource(parameters=parameters, transposed=True)
    product = ir.node("MatMul", [activation, merged])
    split = ir.node(
        "Split",
        [product.outputs[0], add_integers(graph, sizes)],
        {"axis": -1},
        num_outputs=len(nodes),
    )
    for node, output in zip(nodes, split.outputs, strict=True):
        output.type, output.shape = node.outputs[0].type, node.outputs[0].shape
    product.outputs[0].type = nodes[0].outputs[0].type
    product.outputs[0].name = f"{nodes[0].outputs[0].name}.merged"
    graph.insert_before(nodes[0], [product, split])
    for node, output in zip(nodes, split.outputs, strict=True):
        output.name = node.outputs[0].name
        node.outputs[0].replace_all_uses_with(output)
        graph.remove(node, safe=True)
