"""What a build will take and what its bundle will, per target and lookahead length. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from la_export.checkpoint.facts import scatter_capacity
from la_export.estimate.formulas import (
    activation_bytes,
    cache_bytes_per_token,
    cpu_weight_bytes,
    graph_bytes,
    joined_cache_bytes,
    logits_bytes,
    lookahead_bytes,
    mask_bytes,
    plan_bytes,
    score_bytes,
    tokenizer_bytes,
    weight_bytes,
)
from la_export.estimate.shape import ModelShape
from la_export.graph.variants import CPU_GRAPH_FILE
from la_export.graph.weights import WEIGHTS_FILE
from la_export.options import BuildOptions
from la_export.plan.options import DEFAULT_MAX_BATCH
from la_runtime.batch import DEFAULT_PREFILL_SCORES
from la_runtime.bundle import GRAPH_PATH, LOOKAHEAD_PATH
from la_runtime.contract import CacheForm, Dtype
from la_runtime.errors import UsageError
from la_runtime.layout import Layout
from la_runtime.plans import PLANS_FOLDER, PlanTarget

__all__ = [
    "Estimate",
    "EstimateOptions",
    "FileSize",
    "Limits",
    "Memory",
    "StepEstimate",
    "Target",
    "TargetEstimate",
    "estimate",
    "list_warnings",
]

# Measured with SmolLM2-135M: what processes held beside copies of the weights.
_RUNTIME_BYTES: Final = 300_000_000
_EXPORTER_BYTES: Final = 900_000_000
_COMPILER_BYTES: Final = 800_000_000
# CUDA's context and libraries in the process; a rule of thumb, not measured by us.
_CUDA_BYTES: Final = 1_000_000_000
# Float32 copies in the process that builds: PyTorch's, and ONNX Runtime's as stored and as packed.
_CHECK_COPIES: Final = 3
# Copies in the process that compiles a plan: as parsed, as converted, as written.
_PLAN_COPIES: Final = 3


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
        build_host_bytes: peak memory of the process that builds.
        open_host_bytes: memory of the process that runs it, without what `steps` count on the host.
        steps: each lookahead length.
    """

    target: Target
    files: tuple[FileSize, ...]
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


def estimate(shape: ModelShape, options: EstimateOptions) -> Estimate:
    """Estimate every target that can run this precision.

    Args:
        shape: of the model.
        options: what is to be estimated.
    """
    is_bfloat16 = options.build.precision.dtype is Dtype.BFLOAT16
    targets = [t for t in Target if not (is_bfloat16 and t is Target.ORT_CPU)]
    notes = ("ort-cpu does not compute in bf16",) if is_bfloat16 else ()
    return Estimate(
        shape=shape,
        options=options,
        targets=tuple(_estimate_target(shape, options, target) for target in targets),
        notes=notes,
    )


def _estimate_target(shape: ModelShape, options: EstimateOptions, target: Target) -> TargetEstimate:
    dtype = options.build.precision.dtype
    weights = weight_bytes(shape, dtype)
    exporting = _EXPORTER_BYTES + _CHECK_COPIES * weight_bytes(shape, Dtype.FLOAT32)
    compiling = _COMPILER_BYTES + _PLAN_COPIES * weights if target.has_plans else 0
    opening = 0 if target is Target.ORT_CPU else _CUDA_BYTES + weights
    return TargetEstimate(
        target=target,
        files=tuple(_list_files(shape, options, target)),
        build_host_bytes=max(exporting, compiling),
        open_host_bytes=_RUNTIME_BYTES + opening,
        steps=tuple(
            _estimate_step(shape, options, target, k) for k in options.build.sorted_lengths
        ),
    )


def _list_files(shape: ModelShape, options: EstimateOptions, target: Target) -> Iterator[FileSize]:
    build = options.build
    folder = GRAPH_PATH.rpartition("/")[0]
    weights = weight_bytes(shape, build.precision.dtype)
    yield FileSize(path=GRAPH_PATH, bytes=graph_bytes(shape))
    yield FileSize(path=f"{folder}/{WEIGHTS_FILE}", bytes=weights)
    if build.precision.dtype is not Dtype.BFLOAT16:
        yield FileSize(path=f"{folder}/{CPU_GRAPH_FILE}", bytes=graph_bytes(shape))
    yield FileSize(path=LOOKAHEAD_PATH, bytes=lookahead_bytes(shape, build.k_max))
    yield FileSize(path="tokenizer", bytes=tokenizer_bytes(shape))
    folder = f"{PLANS_FOLDER}/{PlanTarget.TRT}"
    dtype, lengths = build.precision.dtype, build.sorted_lengths
    if target is Target.TRT_PER_K:
        for k in lengths:
            yield FileSize(path=f"{folder}/k{k}.plan", bytes=plan_bytes(shape, dtype, profiles=2))
    elif target is Target.TRT_SHARED:
        size = plan_bytes(shape, dtype, profiles=1 + len(lengths))
        yield FileSize(path=f"{folder}/shared.plan", bytes=size)


def _estimate_step(
    shape: ModelShape, options: EstimateOptions, target: Target, k: int
) -> StepEstimate:
    build = options.build
    dtype, batch = build.precision.dtype, options.max_batch
    rows = {layout: layout.max_rows(k) for layout in Layout}
    per_token = cache_bytes_per_token(shape, dtype)
    hold = cpu_weight_bytes if target is Target.ORT_CPU else weight_bytes
    return StepEstimate(
        k=k,
        rows=rows,
        memory=Memory(
            weights=hold(shape, dtype),
            cache_per_token=per_token,
            cache=batch * _places(shape, build) * per_token,
            scratch=max(
                _scratch_bytes(shape, options, target, rows=widest)
                for widest in (max(rows.values()), min(build.prefill_chunk, shape.context) + k)
            ),
            logits=logits_bytes(shape, dtype, batch * max(rows.values())),
        ),
    )


def _places(shape: ModelShape, build: BuildOptions) -> int:
    """Cache places of a sequence that fills the context."""
    if build.cache_form is CacheForm.CONCAT:
        return shape.context
    return scatter_capacity(shape.context, prefill_chunk=build.prefill_chunk, k_max=build.k_max)


def _scratch_bytes(
    shape: ModelShape, options: EstimateOptions, target: Target, *, rows: int
) -> int:
    """Of a pass with so many rows a sequence, behind a full cache."""
    build = options.build
    dtype, batch = build.precision.dtype, options.max_batch
    keys = _places(shape, build)
    if build.cache_form is CacheForm.CONCAT:
        keys += rows
    scores = 0
    if target is Target.ORT_CPU:
        # The runtime reads long prompts in smaller chunks, so that these stay within a bound.
        rows = min(rows, max(DEFAULT_PREFILL_SCORES // keys, max(_step_rows(build))))
        scores = score_bytes(shape, rows=batch * rows, keys=keys)
    return (
        activation_bytes(shape, dtype, batch * rows)
        + mask_bytes(dtype, rows=batch * rows, keys=keys)
        + joined_cache_bytes(shape, dtype, build.cache_form, keys=batch * keys)
        + scores
    )


def _step_rows(build: BuildOptions) -> tuple[int, ...]:
    return tuple(Layout.FULL.max_rows(k) for k in build.sorted_lengths)


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
            f"the bundle for {name}",
            "disk",
            target.disk_bytes,
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
