"""The lean graph for ONNX Runtime's CPU: its own operators allowed, one pass a file.

Each pass takes the portable graph as it was written, weights by reference. What comes out has the
same inputs and outputs but for the cache, and is checked as the portable graph is.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from la_export.graph.lean.fused_silu import fuse_silu
from la_export.graph.lean.integer_kernels import fuse_integer_products
from la_export.graph.lean.sequence_major import store_sequence_major
from la_export.graph.lean.skip_norms import fuse_skip_norms
from la_export.graph.step_graph import CONTRIB_DOMAIN, OPSET_VERSIONS
from la_runtime.contract import CacheForm, Contract

__all__ = ["make_lean"]


def make_lean(model: ir.Model, portable: Contract, lean: Contract) -> None:
    """Run every pass, in the one order in which they work.

    Args:
        model: the portable graph; changed in place.
        portable: its contract.
        lean: the contract of what it becomes.
    """
    model.opset_imports[""] = OPSET_VERSIONS[CacheForm.SCATTER]
    model.opset_imports[CONTRIB_DOMAIN] = 1
    store_sequence_major(model.graph, portable, lean)
    fuse_skip_norms(model.graph)
    fuse_silu(model.graph)
    fuse_integer_products(model.graph)
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.TopologicalSortPass()(model)
