"""Lets a tied embedding table serve the lookup and the head from one copy.

The lookup reads rows of [vocab_size, hidden]; `MatMul` would need [hidden, vocab_size]. `Gemm`
multiplies by the transpose without storing it.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from la_export.graph.step_graph import StepGraph
from la_runtime.contract import Name

__all__ = ["share_tied_head"]

_PREFIX: Final = "tied_head."


def share_tied_head(step_graph: StepGraph) -> None:
    """Rewrite `MatMul(x, Transpose(table))` as `Gemm` where the table is also looked up."""
    for value in step_graph.weight_values().values():
        if not any(node.op_type == "Gather" for node in value.consumers()):
            continue
        for transpose in value.consumers():
            if transpose.op_type != "Transpose":
                continue
            for matmul in list(transpose.outputs[0].consumers()):
                if matmul.op_type == "MatMul":
                    _replace_by_gemm(step_graph, matmul, value)


def _replace_by_gemm(step_graph: StepGraph, matmul: ir.Node, table: ir.Value) -> None:
    """[batch, rows, hidden] is flattened for `Gemm` and its result gets its rows back."""
    graph, contract = step_graph.graph, step_graph.contract
    hidden = matmul.inputs[0]
    old_output = matmul.outputs[0]
    rows_input = next(value for value in graph.inputs if value.name == Name.LOGITS_ROWS)
    flat_shape = _constant(graph, "flat_shape", [-1, contract.hidden_size])
    vocab_size = _constant(graph, "vocab_size", [contract.vocab_size])
    flat = ir.node("Reshape", [hidden, flat_shape])
    gemm = ir.node("Gemm", [flat.outputs[0], table], {"transB": 1})
    row_axes = ir.node("Shape", [rows_input])
    full_shape = ir.node("Concat", [row_axes.outputs[0], vocab_size], {"axis": 0})
    # A block without wanted rows has an axis of size zero; it must not mean "copy the input's".
    logits = ir.node("Reshape", [gemm.outputs[0], full_shape.outputs[0]], {"allowzero": 1})
    new_nodes = [flat, gemm, row_axes, full_shape, logits]
    for node, label in zip(
        new_nodes, ("flat", "gemm", "row_axes", "full_shape", "logits"), strict=True
    ):
        node.name = _PREFIX + label + "_node"
        node.outputs[0].name = _PREFIX + label
    logits.outputs[0].type = old_output.type
    logits.outputs[0].shape = old_output.shape
    ir.convenience.replace_nodes_and_values(
        graph, matmul, [matmul], new_nodes, [old_output], [logits.outputs[0]]
    )


def _constant(graph: ir.Graph, label: str, numbers: list[int]) -> ir.Value:
    tensor = ir.tensor(numbers, dtype=ir.DataType.INT64, name=_PREFIX + label)
    value = ir.Value(
        name=_PREFIX + label,
        type=ir.TensorType(ir.DataType.INT64),
        shape=ir.Shape([len(numbers)]),
        const_value=tensor,
    )
    graph.register_initializer(value)
    return value
