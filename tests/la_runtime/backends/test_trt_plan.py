"""Which plan is opened, on which machines, and what passes it takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from la_runtime.backends.base import PassLimits
from la_runtime.backends.device_cache import Room
from la_runtime.backends.gpu import Gpu
from la_runtime.backends.trt_plan import (
    RTX_COMPUTE_CAPABILITIES,
    check_host,
    choose_plan,
    choose_profile,
    largest_bytes,
    plan_limits,
    plan_room,
)
from la_runtime.contract import Axis, CacheForm, Contract, Dtype
from la_runtime.errors import BundleError, HostError, UsageError
from la_runtime.plans import (
    AxisRange,
    HardwareCompatibility,
    PlanFacts,
    PlanProfile,
    PlanTarget,
)
from tests.la_runtime.backends.plans import make_profile

SHA = "a" * 64
H200 = Gpu(
    name="NVIDIA H200",
    compute_capability="SM90",
    driver="580.65.06",
    cuda="13.0",
    total_memory_bytes=1,
)
L4 = replace(H200, name="NVIDIA L4", compute_capability="SM89")
T4 = replace(H200, name="Tesla T4", compute_capability="SM75")
B200 = replace(H200, name="NVIDIA B200", compute_capability="SM100")
CONTRACT = Contract(
    num_layers=2,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=64,
    vocab_size=320,
    k_max=4,
    top_c=8,
    compute_dtype=Dtype.BFLOAT16,
    kv_dtype=Dtype.BFLOAT16,
)
SCATTER = replace(CONTRACT, cache_form=CacheForm.SCATTER, capacity=300)
PROFILES = (
    make_profile(CONTRACT, "prefill", batch=2, block=64, past=256),
    make_profile(CONTRACT, "step", batch=4, block=9, past=512),
)


def make_plan(**change) -> PlanFacts:
    facts = {
        "path": "trt/k4.plan",
        "target": PlanTarget.TRT,
        "lookahead_lengths": (4,),
        "graph_sha256": SHA,
        "version": "11.4.0.106",
        "compute_capabilities": ("SM90",),
        "driver": "580.65.06",
        "profiles": PROFILES,
    }
    return PlanFacts(**(facts | change))


def make_manifest(*plans: PlanFacts):
    files = {"onnx/model.onnx": SimpleNamespace(sha256=SHA)}
    return SimpleNamespace(plans=plans, files=files, graph="onnx/model.onnx")


PER_K = make_manifest(
    *(make_plan(path=f"trt/k{k}.plan", lookahead_lengths=(k,)) for k in (0, 2, 8)),
    make_plan(path="rtx/k4.plan", target=PlanTarget.TRT_RTX),
)


@pytest.mark.parametrize(
    ("k", "path"),
    [(0, "trt/k0.plan"), (1, "trt/k2.plan"), (2, "trt/k2.plan"), (3, "trt/k8.plan")],
)
def test_the_plan_for_the_smallest_built_length_that_suffices_is_taken(k, path):
    assert choose_plan(PER_K, PlanTarget.TRT, k).path == path


def test_without_a_wish_the_largest_length_is_taken():
    assert choose_plan(PER_K, PlanTarget.TRT, None).path == "trt/k8.plan"
    assert choose_plan(PER_K, PlanTarget.TRT_RTX, None).path == "rtx/k4.plan"


@pytest.mark.parametrize("k", [0, 3, 8, None])
def test_a_shared_plan_serves_every_length(k):
    shared = make_plan(lookahead_lengths=(0, 2, 4, 8))

    assert choose_plan(make_manifest(shared), PlanTarget.TRT, k) == shared


def test_a_plan_of_its_own_is_preferred_to_a_shared_one():
    shared = make_plan(path="trt/shared.plan", lookahead_lengths=(2, 4))
    own = make_plan(path="trt/k4.plan")

    assert choose_plan(make_manifest(shared, own), PlanTarget.TRT, 4) == own
    assert choose_plan(make_manifest(shared, own), PlanTarget.TRT, 2) == shared


def test_a_length_that_no_plan_serves_is_refused():
    with pytest.raises(
        UsageError, match=r"no plan for k = 9: .* trt are for k = 0, 2, 8; choose no larger one"
    ):
        choose_plan(PER_K, PlanTarget.TRT, 9)


def test_a_bundle_without_a_plan_for_the_target_is_refused():
    with pytest.raises(
        BundleError,
        match="no plan for target trt-rtx; make one with 'la-export plan BUNDLE --target trt-rtx'",
    ):
        choose_plan(make_manifest(make_plan()), PlanTarget.TRT_RTX, 4)


def test_a_plan_of_another_graph_is_refused():
    manifest = make_manifest(make_plan(graph_sha256="b" * 64))

    with pytest.raises(BundleError, match=r"trt/k4.plan was built from another graph"):
        choose_plan(manifest, PlanTarget.TRT, 4)


@pytest.mark.parametrize(
    ("level", "fits", "refused"),
    [
        (HardwareCompatibility.NONE, [H200], [L4, T4, B200]),
        (HardwareCompatibility.SAME_COMPUTE_CAPABILITY, [H200], [L4, T4, B200]),
        (HardwareCompatibility.AMPERE_PLUS, [H200, L4, B200], [T4]),
    ],
)
def test_a_plan_loads_on_the_gpus_it_was_built_for(level, fits, refused):
    plan = make_plan(hardware_compatibility=level)
    for gpu in fits:
        check_host(plan, plan.version, gpu)
    for gpu in refused:
        with pytest.raises(
            HostError,
            match=f"trt/k4.plan was built for SM90 with TensorRT 11.4.0.106; this GPU, {gpu.name}, "
            f"is {gpu.compute_capability}: rebuild with 'la-export plan BUNDLE --target trt'",
        ):
            check_host(plan, plan.version, gpu)


def test_a_plan_for_several_gpus_loads_on_each():
    plan = make_plan(target=PlanTarget.TRT_RTX, compute_capabilities=("SM86", "SM89"))

    check_host(plan, plan.version, L4)
    with pytest.raises(HostError, match="built for SM86, SM89 with"):
        check_host(plan, plan.version, H200)


@pytest.mark.parametrize(
    ("gpu", "options"),
    [
        (T4, "--target trt-rtx --compute-capability 7.5"),
        (replace(L4, compute_capability="SM120"), "--target trt-rtx --compute-capability 12.0"),
        (H200, "--target trt"),
    ],
)
def test_a_plan_for_other_gpus_is_to_be_rebuilt_for_this_one_by_what_can_do_that(gpu, options):
    plan = make_plan(target=PlanTarget.TRT_RTX, compute_capabilities=("SM86", "SM89"))

    with pytest.raises(HostError, match=f"rebuild with 'la-export plan BUNDLE {options}'$"):
        check_host(plan, plan.version, gpu)


def test_gpus_of_tensorrt_for_rtx_are_those_of_its_bindings():
    path = Path(__file__).parents[2] / "tensorrt_api" / "signatures" / "tensorrt_rtx.json"
    members = json.loads(path.read_text(encoding="utf-8"))["classes"]["ComputeCapability"]

    known = {name for name in members["members"] if name.startswith("SM")}
    assert set(RTX_COMPUTE_CAPABILITIES) == known


@pytest.mark.parametrize(
    ("version", "is_compatible", "fits"),
    [
        ("11.4.0.106", False, True),
        ("11.4.0.107", False, False),
        ("11.5.0.1", False, False),
        ("11.5.0.1", True, True),
        ("11.3.0.1", True, False),
        ("12.0.0.1", True, False),
        ("10.16.1.11", True, False),
    ],
)
def test_a_plan_loads_in_its_own_version_or_in_later_ones_if_built_so(version, is_compatible, fits):
    plan = make_plan(is_version_compatible=is_compatible)
    if fits:
        check_host(plan, version, H200)
        return
    with pytest.raises(
        HostError, match=f"TensorRT 11.4.0.106; here is TensorRT {version}: install the other"
    ):
        check_host(plan, version, H200)


@pytest.mark.parametrize(
    ("built", "here", "fits"),
    [
        ("580.65.06", "580.65.06", True),
        ("580.65.06", "590.1", True),
        ("580.65.06", "580.65.05", False),
        ("580.65.06", "570.124.06", False),
        (None, "570.124.06", True),
        ("580.65.06", None, True),
    ],
)
def test_an_older_driver_than_at_the_build_is_refused(built, here, fits):
    plan, gpu = make_plan(driver=built), replace(H200, driver=here)
    if fits:
        check_host(plan, plan.version, gpu)
        return
    with pytest.raises(HostError, match=f"under driver {built}; here is driver {here}, .* older"):
        check_host(plan, plan.version, gpu)


def sizes(batch: int, block: int, past: int) -> dict[Axis, int]:
    return {
        Axis.BATCH: batch,
        Axis.BLOCK: block,
        Axis.ROWS: 1,
        Axis.PAST: past,
        Axis.KEYS: past + block,
    }


@pytest.mark.parametrize(
    ("given", "index"),
    [(sizes(1, 9, 0), 1), (sizes(1, 10, 0), 0), (sizes(4, 1, 512), 1), (sizes(2, 64, 256), 0)],
)
def test_the_narrowest_profile_that_holds_a_pass_is_chosen(given, index):
    assert choose_profile(make_plan(), given) == index


@pytest.mark.parametrize("given", [sizes(3, 10, 0), sizes(1, 65, 0), sizes(1, 1, 513)])
def test_a_pass_that_fits_no_profile_is_refused(given):
    with pytest.raises(UsageError, match=r"no profile of trt/k4.plan takes a pass of batch"):
        choose_profile(make_plan(), given)


def test_limits_are_the_largest_of_any_profile():
    assert plan_limits(make_plan(), CONTRACT, context=256) == PassLimits(
        batch=4, block=64, rows=64, places=512, k=4
    )
    scatter = make_plan(profiles=[make_profile(SCATTER, "step", batch=4, block=9)])
    assert plan_limits(scatter, SCATTER, context=256) == PassLimits(
        batch=4, block=9, rows=9, places=256, k=4
    )


def test_columns_are_what_every_profile_takes():
    def ranges(least: int, most: int) -> PlanProfile:
        axes = dict(PROFILES[0].axes)
        axes[Axis.PAST] = AxisRange(least=least, likely=most, most=most)
        return PROFILES[0].model_copy(update={"axes": axes})

    plan = make_plan(profiles=(ranges(0, 512), ranges(1, 256)))

    assert plan_room(plan, CONTRACT) == Room(least=1, most=512)
    assert plan_room(plan, SCATTER) == Room(least=300, most=300)


def test_buffers_are_for_the_largest_pass_of_one_profile():
    """Not for the largest of every axis: 2 x 64 rows or 4 x 9, and 2 bytes a bfloat16."""
    specs = {spec.name: spec for spec in (*CONTRACT.inputs, *CONTRACT.outputs)}

    assert largest_bytes(make_plan(), specs["input_ids"]) == 8 * 2 * 64
    assert largest_bytes(make_plan(), specs["attention_mask"]) == 2 * 2 * 64 * (256 + 64)
    assert largest_bytes(make_plan(), specs["lookahead_embeddings"]) == 2 * 4 * 64
    assert largest_bytes(make_plan(), specs["logits"]) == 4 * 2 * 64 * 320
