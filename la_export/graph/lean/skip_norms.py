"""Fuses a sum of the residual stream with the normalization that reads it."""

from __future__ import annotations

import onnx_ir as ir

from la_export.graph.step_graph import CONTRIB_DOMAIN

__all__ = ["fuse_skip_norms"]

_OPERATOR = "SkipSimplifiedLayerNormalization"
_SUM = 3


def fuse_skip_norms(graph: ir.Graph) -> None:
    """Rewrite `Add` and `RMSNormalization`; whoever else reads the sum gets the fused one's."""
    for norm in list(graph):
        if norm.op_type != "RMSNormalization" or norm.inputs[0] is None:
            continue
        add = norm.inputs[0].producer()
        if add is None or not _is_sum_of_rows(add):
            continue
        fused = ir.node(
            _OPERATOR,
            [*add.inputs, norm.inputs[1]],
            {"epsilon": norm.attributes["epsilon"].as_float()},
            domain=CONTRIB_DOMAIN,
            num_outputs=_SUM + 1,
        )
        normalized, _, _, total = fused.outputs
        for unused in fused.outputs[1:_SUM]:
            unused.name = ""
        graph.insert_before(norm, fused)
        for old, new in ((norm.outputs[0], normalized), (add.outputs[0], total)):
            name = old.name
            old.replace_all_uses_with(new)
            old.name, new.name = f"{name}.unfused", name
        graph.remove([norm, add], safe=True)


def _is_sum_of_rows(node: ir.Node) -> bool:
    """A bias is a sum as well, but of a row with a constant."""
    return node.op_type == "Add" and not any(
        value is None or value.is_initializer() for value in node.inputs
    )
