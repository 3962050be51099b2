"""Looks tokens up in an int8 table: the head's own where both are one, stored once.

The head multiplies by the table's transpose, so that is what is stored; a token is then a column.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from la_export.graph.passes.constants import add_integers
from la_export.graph.passes.integer_weights import IntegerWeights
from la_export.graph.passes.names import TRANSPOSED_SUFFIX
from la_export.graph.step_graph import StepGraph
from la_runtime.contract import Name

__all__ = ["look_up_integers"]

_PREFIX: Final = "token_embedding."


def look_up_integers(step_graph: StepGraph) -> None:
    """Rewrite the lookup of tokens; lookahead vectors stay floats."""
    graph = step_graph.graph
    stored = step_graph.weight_values()
    weights = IntegerWeights(step_graph)
    for node in list(graph):
        table = node.inputs[0] if node.op_type == "Gather" else None
        if (
            table is None
            or str(table.name) not in stored
            or table.name == Name.LOOKAHEAD_EMBEDDINGS
        ):
            continue
        head = stored.get(str(table.name) + TRANSPOSED_SUFFIX)
        ids, output = node.inputs[1], node.outputs[0]
        assert ids is not None, "a lookup has indices"
        integers = (
            [ir.node("Gather", [weights.values(table), ids])]
            if head is None
            else _column_nodes(weights.values(head), ids)
        )
        as_float = ir.node("Cast", [integers[-1].outputs[0]], {"to": ir.DataType.FLOAT})
        scales = ir.node("Gather", [weights.scales(table), ids])
        column = ir.node("Unsqueeze", [scales.outputs[0], add_integers(graph, [-1])])
        scaled = ir.node("Mul", [as_float.outputs[0], column.outputs[0]])
        nodes = [*integers, as_float, scales, column, scaled]
        for index, new in enumerate(nodes):
            new.outputs[0].name = f"{_PREFIX}{index}.{new.op_type}"
            new.name = f"{_PREFIX}{index}.{new.op_type}.node"
        result = scaled.outputs[0]
        result.type, result.shape = output.type, output.shape
        ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [output], [result])


def _column_nodes(transposed: ir.Value, ids: ir.Value) -> list[ir.Node]:
    """Columns of [hidden, vocab_size] as rows [batch, block, hidden]."""
    columns = ir.node("Gather", [transposed, ids], {"axis": 1})  # [hidden, batch, block]
    rows = ir.node("Transpose", [columns.outputs[0]], {"perm": [1, 2, 0]})
    return [columns, rows]
