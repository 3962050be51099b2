"""Gives every `Reshape` a constant shape where the axes it keeps stay in place.

Tracing computes each shape from the inputs' sizes. With 0 for "as it was" the shape is a
constant, which compilers plan better and which leaves no size arithmetic in the graph.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from la_export.graph.step_graph import StepGraph

__all__ = ["make_reshapes_constant"]

_PREFIX: Final = "shape."


def make_reshapes_constant(step_graph: StepGraph) -> None:
    """Replace computed shapes that only copy leading axes by constants."""
    constants: dict[tuple[int, ...], ir.Value] = {}
    for node in step_graph.graph:
        if node.op_type != "Reshape" or node.inputs[1] is None:
            continue
        if node.inputs[1].const_value is not None:
            continue
        target = _constant_shape(node)
        if target is None:
            continue
        if target not in constants:
            constants[target] = _add_constant(step_graph.graph, target)
        node.replace_input_with(1, constants[target])
        node.attributes["allowzero"] = ir.AttrInt64("allowzero", 0)


def _constant_shape(node: ir.Node) -> tuple[int, ...] | None:
    """0 for each leading axis kept, sizes for the rest; nothing when an axis is unknown."""
    source, result = node.inputs[0], node.outputs[0]
    if source is None or source.shape is None or result.shape is None:
        return None
    target: list[int] = []
    for place, size in enumerate(result.shape):
        if isinstance(size, int):
            target.append(size)
        elif place < len(source.shape) and source.shape[place] == size:
            target.append(0)
        else:
            return None
    return tuple(target)


def _add_constant(graph: ir.Graph, target: tuple[int, ...]) -> ir.Value:
    name = _PREFIX + "x".join(str(size) for size in target)
    value = ir.Value(
        name=name,
        type=ir.TensorType(ir.DataType.INT64),
        shape=ir.Shape([len(target)]),
        const_value=ir.tensor(list(target), dtype=ir.DataType.INT64, name=name),
    )
    graph.register_initializer(value)
    return value
