"""Puts back the operators that tracing took apart: `RMSNormalization`, `RotaryEmbedding`."""

from __future__ import annotations

from typing import Any, Final

import onnx_ir as ir
from onnxscript.rewriter import RewriteRuleSet
from onnxscript.rewriter.rules.fusion._rms_normalization import fuse_rms_normalization
from onnxscript.rewriter.rules.fusion._rotary_embedding import (
    RotaryEmbedding23Fusion,
    fuse_rotary_embedding,
)

from la_export.graph.step_graph import StepGraph

__all__ = ["fuse_norms_and_rotary"]


class _RoundedRotaryFusion(RotaryEmbedding23Fusion):
    """The rotation of a half-precision model: angles in float32, cosine and sine rounded."""

    def pattern(  # noqa: PLR0913 - the names are the pattern's variables
        self,
        op: Any,
        x: ir.Value,
        freqs: ir.Value,
        start1: ir.Value,
        end1: ir.Value,
        start2: ir.Value,
        end2: ir.Value,
        one1: ir.Value,
        one2: ir.Value,
        dtype: ir.Attr,
    ) -> ir.Value:
        """As transformers computes it."""
        both_halves = op.Concat(freqs, freqs, axis=-1)
        cos = op.Unsqueeze(op.Cast(op.Cos(both_halves), to=dtype), one1)
        sin = op.Unsqueeze(op.Cast(op.Sin(both_halves), to=dtype), one2)
        first = op.Slice(x, start1, end1, [3], [1])
        second = op.Slice(x, start2, end2, [3], [1])
        return x * cos + op.Concat(op.Neg(second), first, axis=-1) * sin

    def rewrite(self, op: Any, x: ir.Value, freqs: ir.Value, dtype: ir.Attr, **_: Any) -> ir.Value:
        """One operator over the rounded tables."""
        cos = op.Cast(op.Cos(freqs), to=dtype)
        sin = op.Cast(op.Sin(freqs), to=dtype)
        assert x.shape is not None, "the inherited check has seen it"
        return op.RotaryEmbedding(x, cos, sin, interleaved=0, num_heads=x.shape[1])


_ROUNDED_ROTARY: Final = RewriteRuleSet([_RoundedRotaryFusion.rule()])


def fuse_norms_and_rotary(step_graph: StepGraph) -> None:
    """Fuse every norm and every rotation; `check` counts what came out."""
    fuse_rms_normalization(step_graph.model)
    fuse_rotary_embedding(step_graph.model)
    _ROUNDED_ROTARY.apply_to_model(step_graph.model)
