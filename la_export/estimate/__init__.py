"""What a bundle will take, told from a model's configuration alone: disk, memory, rows.

`reading` makes a `shape` of the configuration, `formulas` are sums over it that name their source,
`estimate` puts them together for each target and lookahead length, `results` is what comes out.
"""

from __future__ import annotations

from la_export.estimate.estimate import build_host_bytes, estimate
from la_export.estimate.formulas import weight_bytes
from la_export.estimate.reading import make_shape, read_shape
from la_export.estimate.results import (
    Estimate,
    EstimateOptions,
    FileSize,
    Limits,
    Memory,
    StepEstimate,
    Target,
    TargetEstimate,
    is_plan,
    list_warnings,
)
from la_export.estimate.shape import ModelShape

__all__ = [
    "Estimate",
    "EstimateOptions",
    "FileSize",
    "Limits",
    "Memory",
    "ModelShape",
    "StepEstimate",
    "Target",
    "TargetEstimate",
    "build_host_bytes",
    "estimate",
    "is_plan",
    "list_warnings",
    "make_shape",
    "read_shape",
    "weight_bytes",
]
