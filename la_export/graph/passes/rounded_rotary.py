"""Puts back `RotaryEmbedding` in half precision: angles in float32, cosine and sine rounded."""

from __future__ import annotations

from typing import Any, Final

from onnxscript.rewriter import RewriteRule, RewriteRuleSet
from onnxscript.rewriter.rules.fusion._rotary_embedding import RotaryEmbedding23Fusion

from la_export.graph.step_graph import StepGraph

__all__ = ["fuse_rounded_rotary"]


def fuse_rounded_rotary(step_graph: StepGraph) -> None:
    """Fuse every rotation whose tables are rounded; in float32 there is none."""
    _RULES.apply_to_model(step_graph.model)


def _rotation(
    op: Any,
    x: Any,
    freqs: Any,
    start1: Any,
    end1: Any,
    start2: Any,
    end2: Any,
    one1: Any,
    one2: Any,
    dtype: Any,
) -> Any:
    """What transformers' code traces to."""
    angles = op.Concat(freqs, freqs, axis=-1)
    cos = op.Unsqueeze(op.Cast(op.Cos(angles), to=dtype), one1)
    sin = op.Unsqueeze(op.Cast(op.Sin(angles), to=dtype), one2)
    first, second = op.Slice(x, start1, end1, [3], [1]), op.Slice(x, start2, end2, [3], [1])
    return x * cos + op.Concat(op.Neg(second), first, axis=-1) * sin


def _fused(op: Any, x: Any, freqs: Any, dtype: Any, **_: Any) -> Any:
    cos, sin = op.Cast(op.Cos(freqs), to=dtype), op.Cast(op.Sin(freqs), to=dtype)
    return op.RotaryEmbedding(x, cos, sin, interleaved=0, num_heads=x.shape[1])


# The float32 rule's own conditions: two equal halves, known heads.
_CONDITIONS: Final = RotaryEmbedding23Fusion().check
_RULES: Final = RewriteRuleSet([RewriteRule(_rotation, _fused, _CONDITIONS, remove_nodes=False)])
