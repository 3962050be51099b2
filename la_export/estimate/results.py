"""An estimate as values: files, memory and rows by target and lookahead length; what will not fit.

Knows no formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from la_export.estimate.shape import ModelShape
from la_export.options import BuildOptions
from la_export.plan.options import DEFAULT_MAX_BATCH
from la_runtime.errors import UsageError
from la_runtime.layout import Layout
from la_runtime.plans import PLANS_FOLDER

__all__ = [
    "Estimate",
    "EstimateOptions",
    "FileSize",
    "Limits",
    "Memory",
    "StepEstimate",
    "Target",
    "TargetEstimate",
    "is_plan",
    "list_warnings",
]


class Target(StrEnum):
    """What runs the bundle."""

    ORT_CPU = "ort-cpu"
    ORT_CUDA = "ort-cuda"
    TRT_PER_K = "trt, a plan per k"
    TRT_SHARED = "trt, one shared plan"

    @property
    def has_plans(self) -> bool:
        """Whether it runs plans of TensorRT."""
        return self in (Target.TRT_PER_K, Target.TRT_SHARED)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions:
    """What is to be estimated.

    Args:
        build: the build.
        max_batch: most sequences at a time.

    Raises:
        UsageError: `max_batch` is out of range.
    """

    build: BuildOptions
    max_batch: int = DEFAULT_MAX_BATCH

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise UsageError(f"--max-batch {self.max_batch} is out of range; expected at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSize:
    """A file of the bundle and its size."""

    path: str
    bytes: int


def is_plan(entry: FileSize) -> bool:
    """Whether a file is a TensorRT plan."""
    return entry.path.startswith(f"{PLANS_FOLDER}/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What decoding holds, in bytes, on the host for the CPU and on the device for a GPU.

    Args:
        weights: of the graph, or of one plan.
        cache_per_token: keys and values of one token.
        cache: of every sequence, the whole context long.
        scratch: of the widest pass: activations, mask, and what attention writes down.
        logits: scores of the rows of the widest step.
    """

    weights: int
    cache_per_token: int
    cache: int
    scratch: int
    logits: int

    @property
    def total(self) -> int:
        """Everything together."""
        return self.weights + self.cache + self.scratch + self.logits


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """Decoding with one lookahead length.

    Args:
        k: the lookahead length.
        rows: of the widest step, by layout; for one sequence.
        memory: what it holds.
    """

    k: int
    rows: dict[Layout, int]
    memory: Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetEstimate:
    """One target.

    Args:
        target: which.
        files: of the bundle.
        build_disk_bytes: most bytes on the disk while it is built.
        build_host_bytes: peak memory of the process that builds.
        open_host_bytes: memory of the process that runs it, without what `steps` count on the host.
        steps: each lookahead length.
    """

    target: Target
    files: tuple[FileSize, ...]
    build_disk_bytes: int
    build_host_bytes: int
    open_host_bytes: int
    steps: tuple[StepEstimate, ...]

    @property
    def disk_bytes(self) -> int:
        """All files; while an old bundle is replaced, it stays until the new one is whole."""
        return sum(entry.bytes for entry in self.files)

    def host_bytes(self, step: StepEstimate) -> int:
        """Memory of the process while it decodes."""
        on_host = step.memory.total if self.target is Target.ORT_CPU else 0
        return self.open_host_bytes + on_host

    def device_bytes(self, step: StepEstimate) -> int:
        """Memory of the GPU while it decodes."""
        return 0 if self.target is Target.ORT_CPU else step.memory.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Everything, for one model and one set of options."""

    shape: ModelShape
    options: EstimateOptions
    targets: tuple[TargetEstimate, ...]
    notes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """The estimate as one JSON object."""
        build = self.options.build
        return {
            "model": self.shape.name,
            "parameters": self.shape.num_parameters,
            "context": self.shape.context,
            "precision": build.precision.value,
            "cache_form": build.cache_form.value,
            "prefill_chunk": build.prefill_chunk,
            "max_batch": self.options.max_batch,
            "targets": [_target_record(target) for target in self.targets],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What there is, in bytes; None where it is unknown."""

    disk: int | None
    memory: int | None
    device: int | None


def list_warnings(found: Estimate, limits: Limits) -> tuple[str, ...]:
    """What will not fit, a line each."""
    return tuple(
        f"{what} needs about {needed / 1e9:.1f} GB of {kind}, and there are "
        f"{available / 1e9:.1f} GB; {remedy}"
        for what, kind, needed, available, remedy in _needs(found, limits)
        if available is not None and needed > available
    )


def _needs(found: Estimate, limits: Limits) -> Iterator[tuple[str, str, int, int | None, str]]:
    for target in found.targets:
        name = target.target.value
        yield (
            f"building for {name}",
            "disk",
            target.build_disk_bytes,
            limits.disk,
            "free some, or give --out a larger disk",
        )
        yield (
            f"building for {name}",
            "memory",
            target.build_host_bytes,
            limits.memory,
            "build on a larger machine",
        )
        widest = max(target.steps, key=lambda step: step.memory.total)
        yield (
            f"decoding with {name} and k = {widest.k}",
            "memory",
            target.host_bytes(widest),
            limits.memory,
            "give a smaller --context, --max-batch or --precision",
        )
        yield (
            f"decoding with {name} and k = {widest.k}",
            "device memory",
            target.device_bytes(widest),
            limits.device,
            "give a smaller --context, --max-batch or --precision",
        )


def _target_record(target: TargetEstimate) -> dict[str, Any]:
    return {
        "target": target.target.value,
        "files": {entry.path: entry.bytes for entry in target.files},
        "disk_bytes": target.disk_bytes,
        "build_disk_bytes": target.build_disk_bytes,
        "build_host_bytes": target.build_host_bytes,
        "open_host_bytes": target.open_host_bytes,
        "steps": [
            {
                "k": step.k,
                "rows": {layout.value: rows for layout, rows in step.rows.items()},
                "host_bytes": target.host_bytes(step),
                "device_bytes": target.device_bytes(step),
                "weights_bytes": step.memory.weights,
                "cache_bytes_per_token": step.memory.cache_per_token,
                "cache_bytes": step.memory.cache,
                "scratch_bytes": step.memory.scratch,
                "logits_bytes": step.memory.logits,
            }
            for step in target.steps
        ],
    }
