"""Fuses an integer product with the scaling of its columns, in the same order of operations."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from la_export.graph.passes.constants import add_scalar
from la_export.graph.step_graph import CONTRIB_DOMAIN

__all__ = ["fuse_integer_products"]

_ONE = np.float32(1)


def fuse_integer_products(graph: ir.Graph) -> None:
    """Rewrite `MatMulInteger`, `Cast`, `Mul` by the weights' scales; rows are scaled after it."""
    for product in list(graph):
        if product.op_type != "MatMulInteger":
            continue
        cast = _only_consumer(product.outputs[0], "Cast")
        scaled = _only_consumer(cast.outputs[0], "Mul")
        rows, weight, zero_point = product.inputs
        scales = next(value for value in scaled.inputs if value is not cast.outputs[0])
        fused = ir.node(
            "MatMulIntegerToFloat",
            [rows, weight, add_scalar(graph, _ONE), scales, zero_point],
            domain=CONTRIB_DOMAIN,
        )
        fused.outputs[0].name = scaled.outputs[0].name
        graph.insert_before(product, fused)
        scaled.outputs[0].replace_all_uses_with(fused.outputs[0])
        graph.remove([product, cast, scaled], safe=True)


def _only_consumer(value: ir.Value, operator: str) -> ir.Node:
    (node,) = value.consumers()
    assert node.op_type == operator, f"{value.name} is read by {node.op_type}, not {operator}"
    return node
