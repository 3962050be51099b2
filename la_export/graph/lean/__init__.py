"""The lean graph for ONNX Runtime's CPU: its own operators allowed, one pass a file.

Each pass takes the portable graph as it was written, weights by reference. What comes out has the
same inputs and outputs but for the cache, and is checked as the portable graph is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from la_export.graph.lean.fused_silu import fuse_silu
from la_export.graph.lean.integer_kernels import fuse_integer_products
from la_export.graph.lean.lookahead_rows import adapt_lookahead_rows
from la_export.graph.lean.sequence_major import store_sequence_major
from la_export.graph.lean.skip_norms import fuse_skip_norms
from la_export.graph.lean.spare_row import attend_with_spare_row
from la_export.graph.step_graph import CONTRIB_DOMAIN, OPSET_VERSIONS
from la_export.options import Precision
from la_runtime.contract import CacheForm, Contract

__all__ = ["make_lean"]


# The fused norm rounds more than `RMSNormalization`: in float32 slots of SmolLM2-135M would leave
# the 1e-4 within which `tests/test_smollm2.py` wants them. Beside steps of integers it is nothing.
_FUSIONS: Final[Mapping[Precision, tuple[Callable[[ir.Graph], None], ...]]] = {
    Precision.FP32: (fuse_silu,),
    Precision.INT8: (fuse_skip_norms, fuse_silu, fuse_integer_products),
    Precision.INT4: (fuse_skip_norms, fuse_silu, fuse_integer_products),
}

# Products of int4 weights with a single row have a kernel of their own as well, and two rows take
# twice its time.
_INVARIANT: Final = frozenset({Precision.FP32, Precision.INT8})


def make_lean(model: ir.Model, portable: Contract, lean: Contract, *, precision: Precision) -> None:
    """Run every pass, in the one order in which they work.

    Args:
        model: the portable graph; changed in place.
        portable: its contract.
        lean: the contract of what it becomes.
        precision: of the graph; one that computes in float32.
    """
    model.opset_imports[""] = OPSET_VERSIONS[CacheForm.SCATTER]
    model.opset_imports[CONTRIB_DOMAIN] = 1
    store_sequence_major(model.graph, portable, lean)
    adapt_lookahead_rows(model.graph, portable.vocab_size)
    common_passes.RemoveUnusedNodesPass()(model)  # the attention that it replaces
    if precision in _INVARIANT:
        attend_with_spare_row(model.graph)
    for fuse in _FUSIONS[precision]:
        fuse(model.graph)
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.TopologicalSortPass()(model)
