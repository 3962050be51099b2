"""The operators of our portable graphs, all of ONNX's own domain.

A list, because doctor builds no graph; a test compares it with graphs of every family, precision
and cache form.
"""

from __future__ import annotations

from typing import Final

__all__ = ["PORTABLE_OPERATORS"]

PORTABLE_OPERATORS: Final = (
    "Add",
    "Attention",
    "Cast",
    "Concat",
    "Cos",
    "Expand",
    "Gather",
    "GatherElements",
    "Gemm",
    "GreaterOrEqual",
    "MatMul",
    "Mul",
    "RMSNormalization",
    "ReduceLogSumExp",
    "Reshape",
    "RotaryEmbedding",
    "Shape",
    "Sigmoid",
    "Sin",
    "Sub",
    "TensorScatter",
    "TopK",
    "Transpose",
    "Unsqueeze",
    "Where",
)
