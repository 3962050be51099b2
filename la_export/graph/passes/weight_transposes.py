"""Stores weights the way `MatMul` reads them, so that no weight is transposed at load.

ONNX Runtime would fold `Transpose(weight)` when it opens the graph, and hold both copies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import onnx_ir as ir

from la_export.graph.passes.names import TRANSPOSED_SUFFIX
from la_export.graph.step_graph import StepGraph

__all__ = ["store_weights_transposed"]

# Of a matrix, and of one matrix for each expert.
_SWAPS: Final = ([1, 0], [0, 2, 1])


def store_weights_transposed(step_graph: StepGraph) -> None:
    """Replace each `Transpose(weight)` by a weight stored with its axes exchanged."""
    for name, value in step_graph.weight_values().items():
        transposes = [node for node in value.consumers() if _is_swap(node)]
        if not transposes:
            continue
        stored = _add_transposed(step_graph, name, value)
        for node in transposes:
            node.outputs[0].replace_all_uses_with(stored)
            step_graph.graph.remove(node, safe=True)


def _is_swap(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and (list(node.attributes["perm"].as_ints()) in _SWAPS)


def _add_transposed(step_graph: StepGraph, name: str, value: ir.Value) -> ir.Value:
    assert value.shape is not None, f"weight {name} has no shape"
    *experts, rows, columns = value.shape
    stored = ir.Value(
        name=name + TRANSPOSED_SUFFIX, type=value.type, shape=ir.Shape([*experts, columns, rows])
    )
    step_graph.graph.inputs.append(stored)
    source = step_graph.weights[name]
    step_graph.weights[name + TRANSPOSED_SUFFIX] = replace(source, transposed=not source.transposed)
    return stored
