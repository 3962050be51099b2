"""Estimates against bundles that were built."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from la_export.bench.gpu.random_checkpoint import write_configuration
from la_export.bench.gpu.shapes import SHAPES
from la_export.checkpoint.facts import scatter_capacity
from la_export.estimate import (
    Estimate,
    EstimateOptions,
    ModelShape,
    Target,
    estimate,
    read_shape,
)
from la_export.estimate.formulas import graph_bytes, plan_bytes, weight_bytes
from la_export.options import BuildOptions, Precision
from la_runtime.bundle import read_manifest
from la_runtime.contract import Contract
from tests.tiny_models import make_tiny_checkpoint

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "results"
# Large tensors begin on a page of their own; small ones lie in the graph's file.
PAGE = 4096
INLINE = 1024


@pytest.fixture(scope="module")
def smollm2() -> ModelShape:
    return read_shape("smollm2-135m", revision=None, context=None)


def estimate_of(
    shape: ModelShape, *lengths: int, precision: Precision = Precision.FP32
) -> Estimate:
    build = BuildOptions(model=shape.name, lookahead_lengths=lengths, precision=precision)
    return estimate(shape, EstimateOptions(build=build, max_batch=1))


def measured(result: str, key: str, **where: object) -> float:
    rows = json.loads((RESULTS / f"{result}.json").read_text())["rows"]
    (value,) = (row[key] for row in rows if where.items() <= row.items())
    return float(value)


def test_the_weights_of_every_family_are_those_of_the_file(variant, report_of) -> None:
    manifest = report_of(variant).manifest
    folder = report_of(variant).bundle.parent / "checkpoint"

    shape = read_shape(str(folder), revision=None, context=None)

    assert shape.num_parameters == manifest.model.num_parameters
    on_disk = manifest.files["onnx/model.onnx.data"].bytes
    estimated = weight_bytes(shape, Precision.FP32)
    graph_file = report_of(variant).bundle / manifest.graph
    tensors = onnx.load(graph_file, load_external_data=False).graph.initializer
    count = len(tensors)
    assert estimated - count * INLINE <= on_disk <= estimated + count * PAGE
    graph = manifest.files["onnx/model.onnx"].bytes
    assert 0.5 * graph <= graph_bytes(shape) <= 2 * graph


def test_only_the_configuration_is_needed(tmp_path, report_of) -> None:
    folder = make_tiny_checkpoint(tmp_path / "whole")
    whole = read_shape(str(folder), revision=None, context=64)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((folder / "config.json").read_bytes())

    shape = read_shape(str(bare), revision=None, context=64)

    assert shape.num_parameters == whole.num_parameters
    assert (shape.context, shape.num_kv_heads, shape.head_dim) == (64, 2, 16)


def test_the_shape_is_that_of_the_contract(variant, report_of) -> None:
    manifest = report_of(variant).manifest
    contract: Contract = manifest.contract
    folder = report_of(variant).bundle.parent / "checkpoint"

    shape = read_shape(str(folder), revision=None, context=None)

    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (
        contract.num_layers,
        contract.num_kv_heads,
        contract.head_dim,
    )
    assert (shape.hidden_size, shape.vocab_size) == (contract.hidden_size, contract.vocab_size)
    assert shape.context == manifest.model.context
    capacity = scatter_capacity(shape.context, prefill_chunk=8, k_max=2)
    assert capacity - 8 < shape.context + 10 <= capacity


@pytest.mark.slow
def test_the_files_of_smollm2_are_estimated_to_a_hundredth(
    smollm2: ModelShape, smollm2_bundle: Path
) -> None:
    manifest = read_manifest(smollm2_bundle)

    found = estimate_of(smollm2, *manifest.lookahead_lengths)

    (target,) = (t for t in found.targets if t.target is Target.ORT_CPU)
    on_disk = sum(entry.bytes for entry in manifest.files.values())
    assert target.disk_bytes == pytest.approx(on_disk, rel=0.01)
    weights = manifest.files["onnx/model.onnx.data"].bytes
    assert target.steps[0].memory.weights == pytest.approx(weights, rel=0.0001)


def test_memory_of_smollm2_is_what_was_measured_and_not_far_above_it(smollm2: ModelShape) -> None:
    found = estimate_of(smollm2, 4)
    (target,) = (t for t in found.targets if t.target is Target.ORT_CPU)

    peak = 1e9 * measured("runtime", "value", figure="its peak memory")
    assert peak <= target.build_host_bytes <= 1.5 * peak
    (step,) = target.steps
    without_cache = target.host_bytes(step) - step.memory.cache
    process = 1e6 * measured("prefill_memory", "process_mb", prompt_tokens=4000)
    assert process <= without_cache <= 1.5 * process
    cache = 1e6 * measured("prefill_memory", "cache_mb", prompt_tokens=4000)
    assert 4000 * step.memory.cache_per_token == pytest.approx(cache, rel=0.03)


def test_full_sizes_are_estimated_to_15_percent(tmp_path: Path) -> None:
    """Of every row that `scripts/large_models` has measured."""
    rows = json.loads((RESULTS / "large_models.json").read_text())["rows"]
    assert rows
    for row in rows:
        shape = SHAPES[row["model"].partition("@")[0]]
        folder = write_configuration(tmp_path / row["model"], shape)
        found = estimate_of(
            read_shape(str(folder), revision=None, context=None),
            8,
            precision=Precision(row["precision"]),
        )
        (target,) = (t for t in found.targets if t.target is Target.ORT_CPU)
        if row["build_minutes"] is not None:
            assert target.disk_bytes / 1e9 == pytest.approx(row["disk_gb"], rel=0.15)
            assert target.build_host_bytes / 1e9 == pytest.approx(row["build_peak_gb"], rel=0.15)
        if row["open_peak_gb"] is not None:
            assert row["estimated_open_gb"] == pytest.approx(row["open_peak_gb"], rel=0.15)


@pytest.mark.parametrize(
    ("profiles", "measured_bytes"), [(2, 302_728_012), (3, 319_563_500)], ids=["per-k", "shared"]
)
def test_plans_of_smollm2_are_as_large_as_those_that_were_built(
    smollm2: ModelShape, profiles: int, measured_bytes: int
) -> None:
    """Sizes as TensorRT for RTX 1.7.1 wrote them; building them takes a minute each."""
    found = plan_bytes(smollm2, Precision.FP16, profiles=profiles)

    assert found == pytest.approx(measured_bytes, rel=0.01)


def test_half_precision_halves_what_a_gpu_holds(smollm2: ModelShape) -> None:
    wide, half = (
        next(
            target.steps[0].memory
            for target in estimate_of(smollm2, 4, precision=precision).targets
            if target.target is Target.ORT_CUDA
        )
        for precision in (Precision.FP32, Precision.FP16)
    )

    assert (2 * half.weights, 2 * half.cache, 2 * half.scratch) == (
        wide.weights,
        wide.cache,
        wide.scratch,
    )
