"""What a build will take and what its bundle will, per target and lookahead length. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from la_export.checkpoint.checkpoint import LARGEST_HELD_BYTES
from la_export.checkpoint.facts import TOP_C, build_disk_bytes, scatter_capacity
from la_export.estimate.formulas import (
    activation_bytes,
    cache_bytes_per_token,
    cpu_weight_bytes,
    graph_bytes,
    joined_cache_bytes,
    largest_part_bytes,
    logits_bytes,
    lookahead_bytes,
    mask_bytes,
    plan_bytes,
    score_bytes,
    tokenizer_bytes,
    weight_bytes,
)
from la_export.estimate.results import (
    Estimate,
    EstimateOptions,
    FileSize,
    Memory,
    StepEstimate,
    Target,
    TargetEstimate,
    is_plan,
)
from la_export.estimate.shape import ModelShape
from la_export.graph.variants import CPU_GRAPH_FILE
from la_export.graph.weights import WEIGHTS_FILE
from la_export.options import BuildOptions, Precision
from la_export.plan.profiles import Sizes, make_prefill_profile, make_step_profile
from la_runtime.batch import DEFAULT_PREFILL_SCORES
from la_runtime.bundle import GRAPH_PATH, LOOKAHEAD_PATH
from la_runtime.contract import Axis, CacheForm, Contract, Dtype
from la_runtime.layout import Layout
from la_runtime.plans import PLANS_FOLDER, PlanTarget

__all__ = ["build_host_bytes", "estimate"]

# Measured with SmolLM2-135M: what processes held beside copies of the weights.
_RUNTIME_BYTES: Final = 300_000_000
_EXPORTER_BYTES: Final = 900_000_000
_COMPILER_BYTES: Final = 800_000_000
# CUDA's context and libraries in the process; a rule of thumb, not measured by us.
_CUDA_BYTES: Final = 1_000_000_000
# Float32 copies in the process that builds: PyTorch's, and ONNX Runtime's as stored and as packed.
_CHECK_COPIES: Final = 3
# Of a large model: beside its largest part in float32, and how often that is there while it is
# read, turned, rounded and compared. Measured with LLaMA-7B's shape in int8.
_STREAMING_BYTES: Final = 1_250_000_000
_PART_COPIES: Final = 2.4
# Copies in the process that compiles a plan: as parsed, as converted, as written.
_PLAN_COPIES: Final = 3


def estimate(shape: ModelShape, options: EstimateOptions) -> Estimate:
    """Estimate every target that can run this precision.

    Args:
        shape: of the model.
        options: what is to be estimated.
    """
    precision = options.build.precision
    targets, notes = list(Target), tuple[str, ...]()
    if precision is Precision.BF16:
        targets.remove(Target.ORT_CPU)
        notes = ("ort-cpu does not compute in bf16",)
    if precision.is_integer:
        targets = [target for target in Target if not target.has_plans]
        notes = (f"TensorRT multiplies no integers, as {precision} does",)
    return Estimate(
        shape=shape,
        options=options,
        targets=tuple(_estimate_target(shape, options, target) for target in targets),
        notes=notes,
    )


def _estimate_target(shape: ModelShape, options: EstimateOptions, target: Target) -> TargetEstimate:
    precision = options.build.precision
    weights = weight_bytes(shape, precision)
    opening = 0 if target is Target.ORT_CPU else _CUDA_BYTES + weights
    files = tuple(_list_files(shape, options, target))
    num_plans = sum(is_plan(entry) for entry in files)
    building = build_disk_bytes(weights, num_plans=num_plans)
    return TargetEstimate(
        target=target,
        files=files,
        build_disk_bytes=max(building, sum(entry.bytes for entry in files)),
        build_host_bytes=build_host_bytes(
            shape,
            precision,
            is_streamed=weight_bytes(shape, Precision.FP32) > LARGEST_HELD_BYTES,
            has_plans=target.has_plans,
        ),
        open_host_bytes=_RUNTIME_BYTES + opening,
        steps=tuple(
            _estimate_step(shape, options, target, k) for k in options.build.sorted_lengths
        ),
    )


def build_host_bytes(
    shape: ModelShape, precision: Precision, *, is_streamed: bool, has_plans: bool
) -> int:
    """Peak memory of the process that builds a bundle.

    Args:
        shape: of the model.
        precision: of the bundle.
        is_streamed: whether weights are read for each pass of the checks; else the model is held.
        has_plans: whether TensorRT compiles plans in it.
    """
    held = weight_bytes(shape, Precision.FP32)
    if is_streamed:
        exporting = _STREAMING_BYTES + int(_PART_COPIES * largest_part_bytes(shape))
    else:
        exporting = _EXPORTER_BYTES + _CHECK_COPIES * held
    compiling = _PLAN_COPIES * weight_bytes(shape, precision) if has_plans else 0
    return max(exporting, _COMPILER_BYTES + compiling)


def _list_files(shape: ModelShape, options: EstimateOptions, target: Target) -> Iterator[FileSize]:
    build = options.build
    folder = GRAPH_PATH.rpartition("/")[0]
    weights = weight_bytes(shape, build.precision)
    yield FileSize(path=GRAPH_PATH, bytes=graph_bytes(shape))
    yield FileSize(path=f"{folder}/{WEIGHTS_FILE}", bytes=weights)
    if build.precision.dtype is not Dtype.BFLOAT16:
        yield FileSize(path=f"{folder}/{CPU_GRAPH_FILE}", bytes=graph_bytes(shape))
    yield FileSize(path=LOOKAHEAD_PATH, bytes=lookahead_bytes(shape, build.k_max))
    yield FileSize(path="tokenizer", bytes=tokenizer_bytes(shape))
    folder = f"{PLANS_FOLDER}/{PlanTarget.TRT}"
    precision, lengths = build.precision, build.sorted_lengths
    if target is Target.TRT_PER_K:
        size = plan_bytes(shape, precision, profiles=2)
        for k in lengths:
            yield FileSize(path=f"{folder}/k{k}.plan", bytes=size)
    elif target is Target.TRT_SHARED:
        size = plan_bytes(shape, precision, profiles=1 + len(lengths))
        yield FileSize(path=f"{folder}/shared.plan", bytes=size)


def _estimate_step(
    shape: ModelShape, options: EstimateOptions, target: Target, k: int
) -> StepEstimate:
    build = options.build
    dtype, batch = build.precision.dtype, options.max_batch
    rows = {layout: layout.max_rows(k) for layout in Layout}
    passes = _list_passes(shape, options, target, k)
    per_token = cache_bytes_per_token(shape, dtype)
    hold = cpu_weight_bytes if target is Target.ORT_CPU else weight_bytes
    return StepEstimate(
        k=k,
        rows=rows,
        memory=Memory(
            weights=hold(shape, build.precision),
            cache_per_token=per_token,
            cache=batch * _places(shape, build) * per_token,
            scratch=max(
                _scratch_bytes(shape, options, target, rows=entry.rows) for entry in passes
            ),
            logits=max(logits_bytes(shape, dtype, batch * entry.scored) for entry in passes),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """The widest pass of a kind: rows a sequence, and how many of them are scored."""

    rows: int
    scored: int


def _list_passes(
    shape: ModelShape, options: EstimateOptions, target: Target, k: int
) -> tuple[_Pass, ...]:
    """The widest steps and the widest passes that read a prompt; of plans, what they allow."""
    chunk = min(options.build.prefill_chunk, shape.context)
    if not target.has_plans:
        step = Layout.FULL.max_rows(k)
        return _Pass(rows=step, scored=step), _Pass(rows=chunk + k, scored=1 + k)
    contract = _make_contract(shape, options.build)
    sizes = Sizes(context=shape.context, max_batch=options.max_batch, prefill_chunk=chunk)
    return tuple(
        _Pass(rows=profile.axes[Axis.BLOCK].most, scored=profile.axes[Axis.ROWS].most)
        for profile in (
            make_step_profile(contract, sizes, k=k),
            make_prefill_profile(contract, sizes, k=k),
        )
    )


def _make_contract(shape: ModelShape, build: BuildOptions) -> Contract:
    is_scatter = build.cache_form is CacheForm.SCATTER
    return Contract(
        cache_form=build.cache_form,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        k_max=build.k_max,
        top_c=min(TOP_C, shape.vocab_size),
        compute_dtype=build.precision.dtype,
        kv_dtype=build.precision.dtype,
        capacity=_places(shape, build) if is_scatter else None,
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
