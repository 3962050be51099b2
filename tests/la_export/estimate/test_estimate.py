from __future__ import annotations

from dataclasses import replace

import pytest

from la_export.estimate import (
    Estimate,
    EstimateOptions,
    Limits,
    Target,
    estimate,
    list_warnings,
)
from la_export.options import BuildOptions, Precision
from la_runtime.contract import CacheForm
from la_runtime.errors import UsageError
from la_runtime.layout import Layout
from tests.la_export.estimate.test_formulas import LLAMA_7B


def estimated(max_batch: int = 1, **build: object) -> Estimate:
    options = BuildOptions(
        model="llama-7b",
        lookahead_lengths=(0, 4),
        precision=Precision.FP16,
    )
    return estimate(
        LLAMA_7B,
        EstimateOptions(build=replace(options, **build), max_batch=max_batch),  # type: ignore[arg-type]
    )


def sizes(found: Estimate, target: Target) -> dict[str, int]:
    (entry,) = (t for t in found.targets if t.target is target)
    return {size.path: size.bytes for size in entry.files}


def steps(found: Estimate, target: Target):
    (entry,) = (t for t in found.targets if t.target is target)
    return {step.k: step for step in entry.steps}


def test_rows_are_those_of_the_layouts() -> None:
    rows = {k: step.rows for k, step in steps(estimated(), Target.ORT_CUDA).items()}

    assert rows == {
        0: {Layout.ROOT_ONLY: 1, Layout.FULL: 1},
        4: {Layout.ROOT_ONLY: 9, Layout.FULL: 25},
    }


def test_a_plan_per_k_multiplies_the_weights_and_a_shared_one_does_not() -> None:
    found = estimated()
    weights = sizes(found, Target.ORT_CUDA)["onnx/model.onnx.data"]

    per_k = sizes(found, Target.TRT_PER_K)
    shared = sizes(found, Target.TRT_SHARED)

    assert [path for path in per_k if path.startswith("trt/")] == [
        "trt/trt/k0.plan",
        "trt/trt/k4.plan",
    ]
    assert per_k["trt/trt/k0.plan"] >= weights
    assert [path for path in shared if path.startswith("trt/")] == ["trt/trt/shared.plan"]
    assert weights <= shared["trt/trt/shared.plan"] < 1.1 * weights
    held = {t: steps(found, t)[4].memory.weights for t in Target if t is not Target.ORT_CPU}
    assert set(held.values()) == {weights}


def test_the_cache_is_the_context_times_the_batch_and_in_scatter_the_capacity() -> None:
    concat = steps(estimated(max_batch=3), Target.ORT_CUDA)[4].memory
    scatter = steps(estimated(max_batch=3, cache_form=CacheForm.SCATTER), Target.ORT_CUDA)[4].memory

    assert concat.cache == 3 * 2048 * 512 * 1024
    assert scatter.cache == 3 * (2048 + 512 + 4 + 4) * 512 * 1024  # rounded up to a multiple of 8


def test_the_logits_are_those_of_the_rows_that_a_pass_may_score() -> None:
    found = estimated()
    row = 32_000 * (4 + 2)

    logits = {t: steps(found, t)[4].memory.logits for t in (Target.ORT_CUDA, Target.TRT_PER_K)}

    assert logits[Target.ORT_CUDA] == 25 * row
    # A plan's profile for prompts scores 32 rows more, for whoever verifies it.
    assert logits[Target.TRT_PER_K] == (25 + 32) * row


def test_memory_of_the_cpu_backend_is_the_hosts_and_of_the_others_the_devices() -> None:
    for target in estimated().targets:
        (step, *_) = target.steps
        is_cpu = target.target is Target.ORT_CPU
        assert (target.device_bytes(step) == 0) is is_cpu
        assert (target.host_bytes(step) > step.memory.total) is is_cpu or not is_cpu


def test_bfloat16_leaves_the_cpu_out_and_says_so() -> None:
    found = estimated(precision=Precision.BF16)

    assert Target.ORT_CPU not in {target.target for target in found.targets}
    assert found.notes == ("ort-cpu does not compute in bf16",)
    assert "onnx/model.ort-cpu.onnx" not in sizes(found, Target.ORT_CUDA)


def test_what_does_not_fit_is_named_with_both_figures() -> None:
    found = estimated()

    warnings = list_warnings(found, Limits(disk=41 * 10**9, memory=10**12, device=8 * 10**9))

    assert warnings[0] == (
        "decoding with ort-cuda and k = 4 needs about 14.9 GB of device memory, and there are "
        "8.0 GB; give a smaller --context, --max-batch or --precision"
    )
    assert not any("ort-cpu" in line for line in warnings)
    many = estimated(lookahead_lengths=(0, 4, 8))
    (line,) = list_warnings(many, Limits(disk=50 * 10**9, memory=None, device=None))
    assert line.startswith(
        "building for trt, a plan per k needs about 54.0 GB of disk, and there are 50.0 GB"
    )


@pytest.mark.parametrize(("precision", "bytes_per_parameter"), [("fp32", 4), ("fp16", 2)])
def test_building_needs_the_disk_that_a_build_asks_for(
    precision: str, bytes_per_parameter: int
) -> None:
    found = estimated(precision=Precision(precision))
    (onnx,) = (t for t in found.targets if t.target is Target.ORT_CUDA)
    weights = bytes_per_parameter * LLAMA_7B.num_parameters

    assert weights <= onnx.build_disk_bytes < 1.01 * weights
    assert all(t.build_disk_bytes >= t.disk_bytes for t in found.targets)
    warnings = list_warnings(found, Limits(disk=10 * 10**9, memory=None, device=None))
    assert any(line.startswith("building for ort-cuda needs about") for line in warnings)


def test_what_fits_or_is_unknown_warns_of_nothing() -> None:
    found = estimated()

    assert list_warnings(found, Limits(disk=None, memory=None, device=None)) == ()
    assert list_warnings(found, Limits(disk=10**15, memory=10**15, device=10**15)) == ()


def test_a_batch_of_none_is_refused() -> None:
    with pytest.raises(UsageError, match="--max-batch 0 is out of range"):
        estimated(max_batch=0)
