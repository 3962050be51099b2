"""Gives attention a row more than the block has, so that a row has the same bits in every block.

ONNX Runtime multiplies a single row by a kernel of its own, which sums in another order. From two
rows on a row's result depends neither on how many there are nor on the keys behind those it sees;
products with stored weights are like that from one row on. So with a spare row a whole pass is, as
long as a head has no more than 128 channels: more are summed in parts, whose size is that of the
keys.

Query heads that share a key head could be rows of one product instead. That is faster with one
thread, but threads share out products, and with few key heads some of them have nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import onnx_ir as ir

from la_export.graph.passes.constants import add_integers

__all__ = ["attend_with_spare_row"]

_ROWS_AXIS: Final = 1
_MASK_ROWS_AXIS: Final = 2


def attend_with_spare_row(graph: ir.Graph) -> None:
    """Rewrite every `Attention` over rows of all heads; all layers share one mask."""
    masks: dict[ir.Value, ir.Value] = {}
    for node in [node for node in graph if node.op_type == "Attention"]:
        query, key, value, mask = node.inputs
        assert query is not None, "attention has a query"
        assert mask is not None, "attention has a mask"
        writer = _Writer(graph, node)
        if mask not in masks:
            masks[mask] = writer.first_again(mask, _MASK_ROWS_AXIS)
        rows = writer.first_again(query, _ROWS_AXIS)
        attended = writer.add("Attention", [rows, key, value, masks[mask]], node.attributes)
        node.outputs[0].replace_all_uses_with(writer.cut(attended, 0, -1, _ROWS_AXIS))
        graph.remove(node, safe=True)


class _Writer:
    """Adds nodes in front of one."""

    def __init__(self, graph: ir.Graph, before: ir.Node) -> None:
        self._graph = graph
        self._before = before

    def first_again(self, rows: ir.Value, axis: int) -> ir.Value:
        """One row more, at the end; `Pad` would take longer."""
        return self.add("Concat", [rows, self.cut(rows, 0, 1, axis)], {"axis": axis})

    def cut(self, value: ir.Value, start: int, end: int, axis: int) -> ir.Value:
        """A range of an axis."""
        bounds = [add_integers(self._graph, [number]) for number in (start, end, axis)]
        return self.add("Slice", [value, *bounds], {})

    def add(
        self, operator: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, object]
    ) -> ir.Value:
        """One node; its only output."""
        node = ir.node(operator, inputs, dict(attributes))  # type: ignore[arg-type]
        self._graph.insert_before(self._before, node)
        return node.outputs[0]
