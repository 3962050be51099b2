"""What the manifest says of a plan: a serialized TensorRT engine and the shapes it was built for.

Knows no TensorRT. `la_export.plan` makes plans, `backends.trt` runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from pydantic import Field, model_validator

from la_runtime.contract import Axis, Contract
from la_runtime.digests import Sha256
from la_runtime.records import Record, RelativePath

__all__ = [
    "PLANS_FOLDER",
    "AxisRange",
    "HardwareCompatibility",
    "PlanFacts",
    "PlanProfile",
    "PlanTarget",
]

PLANS_FOLDER: Final = "trt"


class PlanTarget(StrEnum):
    """Which TensorRT a plan is for; plans of one do not load in the other.

    ``trt``: TensorRT, module ``tensorrt``; built on the GPU it is for.
    ``trt-rtx``: TensorRT for RTX, module ``tensorrt_rtx``; built without a GPU.
    """

    TRT = "trt"
    TRT_RTX = "trt-rtx"


class HardwareCompatibility(StrEnum):
    """On which GPUs a plan of target `trt` loads.

    ``none``: on the compute capability it was built on, as tuned there.
    ``ampere-plus``: on compute capability 8.0 and later; slower.
    ``same-compute-capability``: on every GPU of the compute capability it was built on.
    """

    NONE = "none"
    AMPERE_PLUS = "ampere-plus"
    SAME_COMPUTE_CAPABILITY = "same-compute-capability"


class AxisRange(Record):
    """The sizes of a dynamic axis that a profile allows, and the one it is tuned for."""

    least: int = Field(ge=0)
    likely: int
    most: int

    @model_validator(mode="after")
    def _check_order(self) -> AxisRange:
        if not self.least <= self.likely <= self.most:
            raise ValueError(
                f"expected least <= likely <= most, got {self.least}, {self.likely}, {self.most}"
            )
        return self

    def holds(self, size: int) -> bool:
        """Whether a pass may have this size."""
        return self.least <= size <= self.most


class PlanProfile(Record):
    """One optimization profile. Its place in `PlanFacts.profiles` is its index in the plan.

    Args:
        name: ``prefill`` or ``step``.
        k: the lookahead length whose steps it is tuned for.
        axes: a range for every dynamic axis of the contract's inputs.
    """

    name: str
    k: int = Field(ge=0)
    axes: dict[Axis, AxisRange]

    def shape_of(
        self, axes: tuple[Axis | int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Smallest, likely and largest shape of a tensor with these axes."""
        ranges = [
            AxisRange(least=axis, likely=axis, most=axis)
            if isinstance(axis, int)
            else self.axes[axis]
            for axis in axes
        ]
        return (
            tuple(entry.least for entry in ranges),
            tuple(entry.likely for entry in ranges),
            tuple(entry.most for entry in ranges),
        )

    def holds(self, sizes: Mapping[Axis, int]) -> bool:
        """Whether a pass of these sizes may run under this profile."""
        return all(self.axes[axis].holds(size) for axis, size in sizes.items())


class PlanFacts(Record):
    """One plan of the bundle. Its digest is its file's, in the manifest's `files`.

    Args:
        path: the plan's file.
        target: which TensorRT it is for.
        lookahead_lengths: the k it has step profiles for; one, or all of a shared plan.
        graph_sha256: of the graph it was built from.
        version: of the TensorRT that built it.
        compute_capabilities: of the GPUs it was built for, such as ``SM90``.
        driver: version of the NVIDIA driver it was built under; None without a GPU.
        profiles: in the order of their index.
        graph_widths: block widths to capture CUDA graphs for; narrower blocks are padded up.
        hardware_compatibility: on which other GPUs it loads.
        is_version_compatible: whether it loads in later versions of TensorRT.
        is_stripped: whether it has no weights and is refitted from the graph's when opened.
    """

    path: RelativePath
    target: PlanTarget
    lookahead_lengths: tuple[int, ...]
    graph_sha256: Sha256
    version: str
    compute_capabilities: tuple[str, ...]
    driver: str | None
    profiles: tuple[PlanProfile, ...]
    graph_widths: tuple[int, ...] = ()
    hardware_compatibility: HardwareCompatibility = HardwareCompatibility.NONE
    is_version_compatible: bool = False
    is_stripped: bool = False

    def check(self, contract: Contract) -> None:
        """Refuse profiles that leave a dynamic axis of the contract open.

        Raises:
            ValueError: a profile does not range over just the axes that the inputs have.
        """
        wanted = {axis for spec in contract.inputs for axis in spec.axes if isinstance(axis, Axis)}
        for profile in self.profiles:
            if set(profile.axes) != wanted:
                raise ValueError(
                    f"profile {profile.name!r} of {self.path} ranges over "
                    f"{', '.join(sorted(profile.axes))}, expected {', '.join(sorted(wanted))}"
                )
