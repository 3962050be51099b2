"""Turns what enters and leaves a turned residual stream: lookahead vectors, and the head's input.

See `quantize.rotation`; both products are of floats, and small beside the head's.
"""

from __future__ import annotations

import onnx_ir as ir

from la_export.graph.step_graph import StepGraph, WeightSource
from la_export.quantize.rotation import HEAD_ROTATION, LOOKAHEAD_ROTATION
from la_runtime.contract import Name

__all__ = ["turn_ends"]


def turn_ends(step_graph: StepGraph, head_input: ir.Value) -> None:
    """Multiply both by matrices that become weights of the graph.

    Args:
        step_graph: changed in place.
        head_input: [batch, rows, hidden] what the head multiplies.
    """
    graph = step_graph.graph
    vectors = next(value for value in graph.inputs if value.name == Name.LOOKAHEAD_EMBEDDINGS)
    _turn(step_graph, vectors, LOOKAHEAD_ROTATION)
    _turn(step_graph, head_input, HEAD_ROTATION)


def _turn(step_graph: StepGraph, value: ir.Value, name: str) -> None:
    graph, size = step_graph.graph, step_graph.contract.hidden_size
    matrix = ir.Value(
        name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([size, size])
    )
    graph.inputs.append(matrix)
    step_graph.weights[name] = WeightSource(parameters=(name,))
    product = ir.node("MatMul", [value, matrix], name=f"{name}.node")
    turned = product.outputs[0]
    turned.name, turned.type, turned.shape = f"{name}.turned", value.type, value.shape
    first = next(node for node in graph if value in node.inputs)
    value.replace_all_uses_with(turned)
    product.replace_input_with(0, value)
    graph.insert_before(first, product)
