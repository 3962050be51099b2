"""What is asked of plans. Knows no TensorRT, so that a wrong value is refused at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from la_export.options import DEFAULT_PREFILL_CHUNK
from la_runtime.errors import UsageError
from la_runtime.plans import HardwareCompatibility

__all__ = [
    "BYTES_PER_MIB",
    "DEFAULT_MAX_BATCH",
    "PlanOptions",
    "PlanSharing",
    "Target",
]

BYTES_PER_MIB: Final = 1 << 20
DEFAULT_MAX_BATCH: Final = 4
_MOST_OPTIMIZATION: Final = 5
_COMPUTE_CAPABILITY: Final = re.compile(r"SM\d{2,3}")


class Target(StrEnum):
    """For what a bundle is built besides ONNX Runtime, which every bundle serves.

    ``auto``: TensorRT where it and a GPU are there, else TensorRT for RTX where it is installed.
    ``onnx``: nothing else.
    ``trt``, ``trt-rtx``: as in `plans.PlanTarget`; it is an error if it cannot be.
    """

    AUTO = "auto"
    ONNX = "onnx"
    TRT = "trt"
    TRT_RTX = "trt-rtx"


class PlanSharing(StrEnum):
    """Whether lookahead lengths share a plan.

    ``per-k``: a plan for each, with a profile for prompts and one for its steps.
    ``shared``: one plan with a profile for prompts and one for the steps of each, so that the
    weights are there once.
    """

    PER_K = "per-k"
    SHARED = "shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """How plans are built.

    Args:
        target: for which TensorRT.
        lookahead_lengths: the k to build for; those of the bundle when empty.
        sharing: a plan for each k, or one.
        max_batch: most sequences of a pass.
        prefill_chunk: most prompt tokens of a pass; fewer where the context or the cache's
            capacity has no room for so many.
        workspace_bytes: device memory a layer may take while it runs; TensorRT's default when not
            given.
        optimization_level: 0 (quickly built) to 5 (quickly run); TensorRT's default when not given.
        hardware_compatibility: on which other GPUs a plan of target `trt` loads.
        is_version_compatible: whether it also loads in later versions of TensorRT.
        is_stripped: whether it leaves the weights out, to be refitted when it is opened.
        compute_capabilities: GPUs that a plan of target `trt-rtx` is for, such as ``SM89``; its
            default when empty.
        timing_cache: folder of TensorRT's kernel timings; one in the user's cache folder when not
            given.

    Raises:
        UsageError: a value is out of range.
    """

    target: Target = Target.AUTO
    lookahead_lengths: tuple[int, ...] = ()
    sharing: PlanSharing = PlanSharing.PER_K
    max_batch: int = DEFAULT_MAX_BATCH
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    workspace_bytes: int | None = None
    optimization_level: int | None = None
    hardware_compatibility: HardwareCompatibility = HardwareCompatibility.NONE
    is_version_compatible: bool = False
    is_stripped: bool = False
    compute_capabilities: tuple[str, ...] = ()
    timing_cache: Path | None = None

    def __post_init__(self) -> None:
        for option, value in (
            ("--max-batch", self.max_batch),
            ("--prefill-chunk", self.prefill_chunk),
            ("--workspace", self.workspace_bytes),
        ):
            if value is not None and value < 1:
                raise UsageError(f"{option} must be at least 1, got {value}")
        level = self.optimization_level
        if level is not None and not 0 <= level <= _MOST_OPTIMIZATION:
            raise UsageError(f"--opt-level must be from 0 to {_MOST_OPTIMIZATION}, got {level}")
        # One that is named twice would be compiled twice.
        object.__setattr__(
            self, "compute_capabilities", tuple(dict.fromkeys(self.compute_capabilities))
        )
        for name in self.compute_capabilities:
            if not _COMPUTE_CAPABILITY.fullmatch(name):
                raise UsageError(
                    f"--compute-capability {name!r} is none; expected one like SM89 or 8.9"
                )
