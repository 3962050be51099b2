"""Puts back `RotaryEmbedding` where cosine and sine are scaled, or rounded, or rows are widened.

Angles are computed in float32. YaRN and LongRoPE scale cosine and sine; a model in half precision
rounds them.
"""

from __future__ import annotations

from typing import Any, Final

from onnxscript.rewriter import RewriteRule, RewriteRuleSet
from onnxscript.rewriter.rules.fusion._rotary_embedding import RotaryEmbedding23Fusion

from la_export.graph.step_graph import StepGraph

__all__ = ["fuse_more_rotary"]


def fuse_more_rotary(step_graph: StepGraph) -> None:
    """Fuse every rotation that `fusion` leaves; of most models in float32 there is none."""
    _RULES.apply_to_model(step_graph.model)


def _rounded(
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
    cos, sin = op.Cast(op.Cos(angles), to=dtype), op.Cast(op.Sin(angles), to=dtype)
    return _rotate(op, x, (cos, one1), (sin, one2), (start1, end1), (start2, end2))


def _scaled(
    op: Any,
    x: Any,
    freqs: Any,
    start1: Any,
    end1: Any,
    start2: Any,
    end2: Any,
    one1: Any,
    one2: Any,
    scale: Any,
) -> Any:
    angles = op.Concat(freqs, freqs, axis=-1)
    cos, sin = op.Cos(angles) * scale, op.Sin(angles) * scale
    return _rotate(op, x, (cos, one1), (sin, one2), (start1, end1), (start2, end2))


def _scaled_and_rounded(
    op: Any,
    x: Any,
    freqs: Any,
    start1: Any,
    end1: Any,
    start2: Any,
    end2: Any,
    one1: Any,
    one2: Any,
    scale: Any,
    dtype: Any,
) -> Any:
    angles = op.Concat(freqs, freqs, axis=-1)
    cos = op.Cast(op.Cos(angles) * scale, to=dtype)
    sin = op.Cast(op.Sin(angles) * scale, to=dtype)
    return _rotate(op, x, (cos, one1), (sin, one2), (start1, end1), (start2, end2))


def _widened(
    op: Any,
    x: Any,
    freqs: Any,
    start1: Any,
    end1: Any,
    start2: Any,
    end2: Any,
    one1: Any,
    one2: Any,
    wide: Any,
) -> Any:
    """As OLMo 2 has it: nothing is rounded, and rows in half precision are widened instead."""
    angles = op.Concat(freqs, freqs, axis=-1)
    start, behind = op.Slice(x, start1, end1, [3], [1]), op.Slice(x, start2, end2, [3], [1])
    turned = op.Cast(op.Concat(op.Neg(behind), start, axis=-1), to=wide)
    cos, sin = op.Unsqueeze(op.Cos(angles), one1), op.Unsqueeze(op.Sin(angles), one2)
    return op.Cast(x, to=wide) * cos + turned * sin


def _rotate(
    op: Any,
    x: Any,
    cos: tuple[Any, Any],
    sin: tuple[Any, Any],
    first: tuple[Any, Any],
    second: tuple[Any, Any],
) -> Any:
    """Cosine and sine with the axis that they lack, and the bounds of each half of a head."""
    start, behind = op.Slice(x, *first, [3], [1]), op.Slice(x, *second, [3], [1])
    turned = op.Concat(op.Neg(behind), start, axis=-1)
    return x * op.Unsqueeze(*cos) + turned * op.Unsqueeze(*sin)


def _fuse(
    op: Any, x: Any, freqs: Any, scale: Any = None, dtype: Any = None, wide: Any = None, **_: Any
) -> Any:
    """What each pattern found, in the operator's place."""
    cos, sin = op.Cos(freqs), op.Sin(freqs)
    if scale is not None:
        cos, sin = op.Mul(cos, scale), op.Mul(sin, scale)
    if dtype is not None:
        cos, sin = op.Cast(cos, to=dtype), op.Cast(sin, to=dtype)
    rows = x if wide is None else op.Cast(x, to=wide)
    return op.RotaryEmbedding(rows, cos, sin, interleaved=0, num_heads=x.shape[1])


# The float32 rule's own conditions: two equal halves, known heads.
_CONDITIONS: Final = RotaryEmbedding23Fusion().check
_RULES: Final = RewriteRuleSet(
    [
        RewriteRule(pattern, _fuse, _CONDITIONS, remove_nodes=False)
        for pattern in (_rounded, _scaled, _scaled_and_rounded, _widened)
    ]
)
