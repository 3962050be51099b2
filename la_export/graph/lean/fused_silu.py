"""Fuses x * sigmoid(x): `QuickGelu` with alpha 1."""

from __future__ import annotations

import onnx_ir as ir

from la_export.graph.step_graph import CONTRIB_DOMAIN

__all__ = ["fuse_silu"]


def fuse_silu(graph: ir.Graph) -> None:
    """Rewrite every product of a value with its own sigmoid."""
    for sigmoid in list(graph):
        source = sigmoid.inputs[0] if sigmoid.op_type == "Sigmoid" else None
        if source is None:
            continue
        for product in list(sigmoid.outputs[0].consumers()):
            if product.op_type != "Mul" or source not in product.inputs:
                continue
            fused = ir.node("QuickGelu", [source], {"alpha": 1.0}, domain=CONTRIB_DOMAIN)
            fused.outputs[0].name = product.outputs[0].name
            graph.insert_before(product, fused)
            product.outputs[0].replace_all_uses_with(fused.outputs[0])
            graph.remove(product, safe=True)
