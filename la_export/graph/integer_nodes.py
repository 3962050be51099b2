"""Finds the integer products of a written graph, portable or lean, node by node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import onnx_ir as ir

__all__ = ["IntegerProduct", "find_integer_products"]

_FUSED: Final = "MatMulIntegerToFloat"
_FUSED_SCALES: Final = 3
_OPERATORS: Final = frozenset({"MatMulInteger", _FUSED})


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerProduct:
    """One linear layer in integers, see `passes.integer_products`.

    Args:
        activation: [batch, rows, in] float32.
        row_scales: [batch, rows, 1] float32.
        product: the operator that multiplies.
        weight: [in, out] int8.
        scales: [out] float32 of the weight.
        by_row: the last `Mul`, whose output is the layer's.
    """

    activation: ir.Value
    row_scales: ir.Value
    product: ir.Node
    weight: ir.Value
    scales: ir.Value
    by_row: ir.Node

    @property
    def is_fused(self) -> bool:
        """Whether the product scales its columns itself."""
        return self.product.op_type == _FUSED


def find_integer_products(graph: ir.Graph) -> Iterator[IntegerProduct]:
    """Every product of the graph, in its order."""
    for node in list(graph):
        if node.op_type not in _OPERATORS:
            continue
        integers, weight = node.inputs[:2]
        quantizer = None if integers is None else integers.producer()
        assert quantizer is not None, "rows of integers are quantized in the graph"
        activation, row_scales = quantizer.inputs[:2]
        if node.op_type == _FUSED:
            scales, by_column = node.inputs[_FUSED_SCALES], node
        else:
            (cast,) = node.outputs[0].consumers()
            (by_column,) = cast.outputs[0].consumers()
            scales = next(v for v in by_column.inputs if v is not cast.outputs[0])
        by_row = next(
            reader for reader in by_column.outputs[0].consumers() if row_scales in reader.inputs
        )
        assert activation is not None, "a quantizer has an input"
        assert row_scales is not None, "a quantizer has scales"
        assert weight is not None, "a product has a weight"
        assert scales is not None, "a weight has scales"
        yield IntegerProduct(
            activation=activation,
            row_scales=row_scales,
            product=node,
            weight=weight,
            scales=scales,
            by_row=by_row,
        )
