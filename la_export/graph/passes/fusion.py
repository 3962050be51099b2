"""Puts back the operators that tracing took apart: `RMSNormalization`, `RotaryEmbedding`."""

from __future__ import annotations

from onnxscript.rewriter.rules.fusion._rms_normalization import fuse_rms_normalization
from onnxscript.rewriter.rules.fusion._rotary_embedding import fuse_rotary_embedding

from la_export.graph.step_graph import StepGraph

__all__ = ["fuse_norms_and_rotary"]


def fuse_norms_and_rotary(step_graph: StepGraph) -> None:
    """Fuse every norm and every rotation; `check` counts what came out."""
    fuse_rms_normalization(step_graph.model)
    fuse_rotary_embedding(step_graph.model)
