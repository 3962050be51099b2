"""Adapts the rows of lookaheads alone: those are gathered, multiplied, and added where they were.

The portable graph multiplies every row by the adapter and drops what it does not want. A pass
without a lookahead has nothing to gather, and multiplies nothing.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from la_export.adapter import is_expansion
from la_export.graph.passes.constants import add_scalar
from la_export.graph.passes.names import read_name
from la_runtime.contract import Name

__all__ = ["adapt_lookahead_rows"]

_PLACES: Final = "adapter.places"


def adapt_lookahead_rows(graph: ir.Graph, vocab_size: int) -> None:
    """Rewrite what `passes.lookahead_adapter` added; nothing where it added nothing.

    Args:
        graph: changed in place.
        vocab_size: ids from here on are lookaheads.
    """
    differences = [node for node in graph if _is_difference(node)]
    if not differences:
        return
    places = _add_places(graph, vocab_size)
    gathered: dict[ir.Value, ir.Value] = {}
    for node in differences:
        _rewrite(graph, node, places, gathered)


def _is_difference(node: ir.Node) -> bool:
    """Whether it multiplies the middle of an adapter's pair."""
    weight = node.inputs[1] if node.op_type == "MatMul" else None
    return weight is not None and is_expansion(read_name(str(weight.name)).parameters[0])


def _add_places(graph: ir.Graph, vocab_size: int) -> ir.Value:
    """[lookaheads, 2] sequence and row of each."""
    ids = next(value for value in graph.inputs if value.name == Name.INPUT_IDS)
    threshold = add_scalar(graph, np.int64(vocab_size))
    is_lookahead = ir.node("GreaterOrEqual", [ids, threshold])
    by_axis = ir.node("NonZero", [is_lookahead.outputs[0]])
    places = ir.node("Transpose", [by_axis.outputs[0]], {"perm": [1, 0]})
    for node in (is_lookahead, by_axis, places):
        node.name = f"{_PLACES}.{node.op_type}.node"
        node.outputs[0].name = f"{_PLACES}.{node.op_type}"
    graph.insert_before(graph[0], [is_lookahead, by_axis, places])
    return places.outputs[0]


def _rewrite(
    graph: ir.Graph, difference: ir.Node, places: ir.Value, gathered: dict[ir.Value, ir.Value]
) -> None:
    (total,) = difference.outputs[0].consumers()
    (chosen,) = total.outputs[0].consumers()
    plain = chosen.inputs[2]
    middle = difference.inputs[0]
    product = None if middle is None else middle.producer()
    assert product is not None, "the middle is computed"
    activation = product.inputs[0]
    assert activation is not None, "a product has two factors"
    assert middle is not None, "a product has two factors"
    if middle not in gathered:
        rows = ir.node("GatherND", [activation, places])
        narrow = ir.node("MatMul", [rows.outputs[0], product.inputs[1]])
        _insert(graph, difference, [rows, narrow], f"{product.name}.rows")
        gathered[middle] = narrow.outputs[0]
    wide = ir.node("MatMul", [gathered[middle], difference.inputs[1]])
    added = ir.node("ScatterND", [plain, places, wide.outputs[0]], {"reduction": "add"})
    _insert(graph, chosen, [wide, added], f"{difference.name}.rows")
    chosen.outputs[0].replace_all_uses_with(added.outputs[0])
    graph.remove([chosen, total, difference], safe=True)


def _insert(graph: ir.Graph, before: ir.Node, nodes: list[ir.Node], prefix: str) -> None:
    for node in nodes:
        node.name = f"{prefix}.{node.op_type}.node"
        node.outputs[0].name = f"{prefix}.{node.op_type}"
    graph.insert_before(before, nodes)
