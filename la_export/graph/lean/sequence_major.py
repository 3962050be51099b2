"""Keeps K/V as the projections give them, a row of all heads per place, and writes them in place.

`Attention` takes rows of all heads too, so no head is moved to the front and back. The cache is
neither joined with the block nor copied: `ScatterND` over shared memory writes the block's rows
alone, each into the place that was chosen for it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from la_export.graph.passes.constants import add_integers, add_scalar
from la_export.graph.passes.contract_names import state_value
from la_runtime.contract import Contract, Name, TensorSpec

__all__ = ["store_sequence_major"]

_JOINS: Final = ("Concat", "TensorScatter")
_HEADS_TO_FRONT: Final = [0, 2, 1, 3]


def store_sequence_major(graph: ir.Graph, portable: Contract, lean: Contract) -> None:
    """Rewrite every layer between its projections, and the graph's edge.

    Args:
        graph: the portable graph.
        portable: its contract.
        lean: with K/V sequence-major in cache form `scatter`.
    """
    inputs = {str(value.name): value for value in graph.inputs}
    write_index = inputs.get(Name.WRITE_INDEX) or ir.Value(name=Name.WRITE_INDEX)
    places = _make_places(graph, write_index)
    written: dict[str, ir.Value] = {}
    pasts: dict[str, ir.Value] = {}
    for layer in range(portable.num_layers):
        _Layer(graph, portable, layer, places).rewrite(lean, pasts, written)
    edge = {**inputs, Name.WRITE_INDEX: write_index, **pasts}
    _set_inputs(graph, [(edge[spec.name], spec) for spec in lean.inputs])
    scores = {str(value.name): value for value in graph.outputs}
    _set_outputs(graph, [(scores | written, spec) for spec in lean.outputs])


class _Layer:
    """One layer of the portable graph, found from its cache inputs."""

    def __init__(self, graph: ir.Graph, portable: Contract, layer: int, places: ir.Value) -> None:
        self._graph = graph
        self._contract = portable
        self._places = places
        inputs = {str(value.name): value for value in graph.inputs}
        self._names = portable.past_names[2 * layer : 2 * layer + 2]
        self._pasts = [inputs[name] for name in self._names]
        self._joins = [_only_consumer(past, *_JOINS) for past in self._pasts]
        self._present_names = (2 * layer, 2 * layer + 2)
        self.attention = _only_consumer(self._joins[0].outputs[0], "Attention")

    def rewrite(
        self, lean: Contract, pasts: dict[str, ir.Value], written: dict[str, ir.Value]
    ) -> None:
        """New nodes in front of the layer's attention; what they replace is left unused."""
        places = []
        present_names = lean.present_names[slice(*self._present_names)]
        for name, old, present_name, join in zip(
            self._names, self._pasts, present_names, self._joins, strict=True
        ):
            past = pasts[name] = ir.Value(name=name)
            _read_batch_from(old, past)
            block = join.inputs[1]
            assert block is not None, "the block joins the past"
            present = self._add(
                "ScatterND", [past, self._places, self._rows_of_all_heads(block)], {}
            )
            written[present_name] = present
            places.append(present)
        query, _, _, mask = self.attention.inputs
        assert query is not None, "attention has a query"
        to_back = _only_consumer(self.attention.outputs[0], "Transpose")
        flattened = _only_consumer(to_back.outputs[0], "Reshape")
        width = _constant(flattened.inputs[1])[-1]
        attributes = dict(self.attention.attributes.items())
        attended = self._add(
            "Attention",
            [self._rows_of_all_heads(query), *places, mask],
            {
                **attributes,
                "q_num_heads": width // self._contract.head_dim,
                "kv_num_heads": self._contract.num_kv_heads,
            },
        )
        flattened.outputs[0].replace_all_uses_with(attended)

    def _rows_of_all_heads(self, value: ir.Value) -> ir.Value:
        """[batch, block, heads * head_dim] of what is [batch, heads, block, head_dim]."""
        node = value.producer()
        assert node is not None, f"{value.name} is computed"
        source = node.inputs[0]
        assert source is not None, f"{node.op_type} has an input"
        if node.op_type == "RotaryEmbedding":
            rows = self._rows_of_all_heads(source)
            num_heads = _num_heads(source)
            attributes = {**dict(node.attributes.items()), "num_heads": num_heads}
            return self._add("RotaryEmbedding", [rows, *node.inputs[1:]], attributes)
        is_turned = node.op_type == "Transpose" and (
            list(node.attributes["perm"].as_ints()) == _HEADS_TO_FRONT
        )
        if not is_turned:  # rotations computed in the open, on heads
            turned = self._add("Transpose", [value], {"perm": _HEADS_TO_FRONT})
            flat = add_integers(self._graph, [0, 0, -1])
            return self._add("Reshape", [turned, flat], {})
        split = source.producer()
        if split is not None and split.op_type == "Reshape":
            assert split.inputs[0] is not None, "what is reshaped is there"
            return split.inputs[0]
        width = _num_heads(value) * self._contract.head_dim
        return self._add("Reshape", [source, add_integers(self._graph, [0, 0, width])], {})

    def _add(
        self, operator: str, inputs: list[ir.Value | None], attributes: dict[str, object]
    ) -> ir.Value:
        node = ir.node(operator, inputs, attributes)  # type: ignore[arg-type]
        self._graph.insert_before(self.attention, node)
        return node.outputs[0]


def _make_places(graph: ir.Graph, write_index: ir.Value) -> ir.Value:
    """[batch, block, 2] sequence and place of every row, as `ScatterND` wants them.

    Args:
        graph: to add to.
        write_index: [batch, block] the places.
    """

    def add(operator: str, inputs: list[ir.Value | None], **attributes: int) -> ir.Value:
        node = ir.node(operator, inputs, attributes)
        graph.insert_before(first, node)
        return node.outputs[0]

    first = graph[0]
    last_axis, front = add_integers(graph, [2]), add_integers(graph, [1, 2])
    zero, one = add_scalar(graph, np.int64(0)), add_scalar(graph, np.int64(1))
    places = add("Unsqueeze", [write_index, last_axis])
    batch = add("Squeeze", [add("Shape", [write_index], start=0, end=1)])
    sequences = add("Unsqueeze", [add("Range", [zero, batch, one]), front])
    spread = add("Expand", [sequences, add("Shape", [places])])
    return add("Concat", [spread, places], axis=2)


def _num_heads(value: ir.Value) -> int:
    """Heads of a value that comes from a `Reshape` to [0, 0, heads, head_dim]."""
    node = value.producer()
    while node is not None and node.op_type != "Reshape":
        source = node.inputs[0]
        assert source is not None, f"{node.op_type} has an input"
        node = source.producer()
    assert node is not None, f"{value.name} is split into heads"
    return _constant(node.inputs[1])[2]


def _constant(value: ir.Value | None) -> list[int]:
    assert value is not None, "a shape is given"
    assert value.const_value is not None, f"{value.name} is a constant"
    return [int(number) for number in value.const_value.numpy()]


def _read_batch_from(old: ir.Value, new: ir.Value) -> None:
    """A batch's size that was read from the cache's shape is still its first axis."""
    for node, index in list(old.uses()):
        if node.op_type == "Shape":
            is_batch = node.attributes.get_int("start", 0) == 0 and (
                node.attributes.get_int("end", 0) == 1
            )
            assert is_batch, f"{node.name} reads the batch alone"
            node.replace_input_with(index, new)


def _only_consumer(value: ir.Value, *operators: str) -> ir.Node:
    """The only reader of a value, among readers of these kinds if any are given."""
    nodes = [n for n in value.consumers() if not operators or n.op_type in operators]
    assert len(nodes) == 1, f"{value.name} has {len(nodes)} readers, expected one"
    return nodes[0]


def _set_inputs(graph: ir.Graph, edge: list[tuple[ir.Value, TensorSpec]]) -> None:
    graph.inputs[:] = [value for value, _ in edge]
    for value, spec in edge:
        state_value(value, spec)


def _set_outputs(graph: ir.Graph, edge: list[tuple[dict[str, ir.Value], TensorSpec]]) -> None:
    outputs = [(values[spec.name], spec) for values, spec in edge if spec.name in values]
    graph.outputs[:] = [value for value, _ in outputs]
    for value, spec in outputs:
        state_value(value, spec)
