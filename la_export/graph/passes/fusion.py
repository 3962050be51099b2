"""Puts back the operators that tracing took apart: `RMSNormalization`, `RotaryEmbedding`."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter.rules.fusion._rms_normalization import fuse_rms_normalization
from onnxscript.rewriter.rules.fusion._rotary_embedding import fuse_rotary_embedding

from la_export.graph.step_graph import StepGraph

__all__ = ["fuse_norms_and_rotary"]


def fuse_norms_and_rotary(step_graph: StepGraph) -> None:
    """Fuse every norm and every rotation; `check` counts what came out."""
    fuse_rms_normalization(step_graph.model)
    fuse_rotary_embedding(step_graph.model)
    for node in [node for node in step_graph.graph if node.op_type == "RMSNormalization"]:
        _widen_input(step_graph.graph, node)


def _widen_input(graph: ir.Graph, norm: ir.Node) -> None:
    """Give a norm with a wider gain an input as wide: what it gives out is the gain's type.

    Gemma's gain is one more than its weight, summed in float32. Type inference takes the output of
    a norm to be of its input's type.
    """
    rows, gain = norm.inputs[:2]
    assert rows is not None, "a norm has an input"
    assert gain is not None, "a norm has a gain"
    if rows.dtype == gain.dtype or gain.dtype is None:
        return
    wide = ir.node("Cast", [rows], {"to": gain.dtype})
    wide.outputs[0].type, wide.outputs[0].shape = ir.TensorType(gain.dtype), rows.shape
    graph.insert_before(norm, wide)
    norm.replace_input_with(0, wide.outputs[0])
