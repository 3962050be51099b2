from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from la_export.plan import builder as builder_module
from la_export.plan.builder import PlanBuilder
from la_export.plan.log import BuildLog
from la_export.plan.namespace import Installation, open_tensorrt
from la_export.plan.network import ParsedGraph, read_graph
from la_export.plan.options import PlanOptions
from la_export.plan.profiles import Sizes, make_prefill_profile, make_step_profile
from la_export.plan.progress import SilentPlanProgress
from la_runtime.contract import Axis, CacheForm, Contract, Dtype
from la_runtime.errors import HostError, PlanError, UsageError
from la_runtime.plans import AxisRange, HardwareCompatibility, PlanProfile, PlanTarget
from tests.la_export.plan.graphs import CONTEXT, make_contract
from tests.la_export.plan.machines import find_gpu

GraphOf = Callable[[CacheForm, Dtype], Path]

SIZES = Sizes(context=CONTEXT, max_batch=2, prefill_chunk=16)
HALVES = [Dtype.FLOAT16, Dtype.BFLOAT16]


def _make_builder(
    installation: Installation,
    graph: Path,
    contract: Contract,
    *,
    progress: SilentPlanProgress | None = None,
    **options: Any,
) -> PlanBuilder:
    return PlanBuilder(
        installation,
        graph,
        contract,
        context=CONTEXT,
        options=PlanOptions(**options),
        progress=progress or SilentPlanProgress(),
    )


def _profiles(contract: Contract, lengths: Sequence[int] = (4,)) -> list[PlanProfile]:
    return [
        make_prefill_profile(contract, SIZES, k=max(lengths)),
        *(make_step_profile(contract, SIZES, k=k) for k in lengths),
    ]


@pytest.mark.parametrize("cache_form", CacheForm)
@pytest.mark.parametrize("dtype", HALVES)
def test_every_layer_has_one_fused_attention_in_each_profile(
    cache_form: CacheForm,
    dtype: Dtype,
    installation: Installation,
    graph_of: GraphOf,
    tmp_path: Path,
) -> None:
    contract = make_contract(cache_form, dtype)
    builder = _make_builder(installation, graph_of(cache_form, dtype), contract)

    compiled = builder.compile(_profiles(contract, (2, 4)), tmp_path / "k.plan")

    assert compiled.layers is not None
    assert compiled.layers.fused_attentions == (contract.num_layers,) * 3
    assert compiled.num_attentions == compiled.fused_attentions == contract.num_layers


@pytest.mark.parametrize("cache_form", CacheForm)
def test_attentions_of_plain_steps_are_counted_too(
    cache_form: CacheForm, installation: Installation, graph_of: GraphOf, tmp_path: Path
) -> None:
    """For k = 0 a step is one row, which another kernel computes."""
    contract = make_contract(cache_form)
    builder = _make_builder(installation, graph_of(cache_form, Dtype.FLOAT16), contract)

    compiled = builder.compile(_profiles(contract, (0,)), tmp_path / "k0.plan")

    assert compiled.fused_attentions == contract.num_layers


@pytest.mark.parametrize("cache_form", CacheForm)
def test_float32_is_built_in_pieces(
    cache_form: CacheForm, installation: Installation, graph_of: GraphOf, tmp_path: Path
) -> None:
    contract = make_contract(cache_form, Dtype.FLOAT32)
    builder = _make_builder(installation, graph_of(cache_form, Dtype.FLOAT32), contract)

    compiled = builder.compile(_profiles(contract), tmp_path / "k.plan")

    assert compiled.num_attentions == contract.num_layers
    assert compiled.fused_attentions is None


def test_float32_that_may_not_be_decomposed_is_told(
    installation: Installation,
    graph_of: GraphOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contract = make_contract(dtype=Dtype.FLOAT32)
    monkeypatch.setattr(builder_module, "let_attention_decompose", lambda trt, network: 0)
    builder = _make_builder(installation, graph_of(CacheForm.CONCAT, Dtype.FLOAT32), contract)

    with pytest.raises(PlanError) as caught:
        builder.compile(_profiles(contract), tmp_path / "k.plan")

    message = str(caught.value)
    assert message.startswith("no plan of model.onnx: TensorRT for RTX 1.7.")
    assert "Attention operation was not supported by a dedicated kernel" in message
    assert message.count("dedicated kernel.") == 1
    assert list(tmp_path.iterdir()) == []


def test_file_has_the_bytes_that_were_reported(
    installation: Installation, graph_of: GraphOf, tmp_path: Path
) -> None:
    contract = make_contract()
    builder = _make_builder(installation, graph_of(CacheForm.CONCAT, Dtype.FLOAT16), contract)
    path = tmp_path / "new" / "k4.plan"

    compiled = builder.compile(_profiles(contract), path)

    assert path.stat().st_size == compiled.bytes > 0
    assert [found.name for found in path.parent.iterdir()] == ["k4.plan"]


def test_contradictory_profile_is_refused_before_tensorrt_sees_it(
    installation: Installation, tmp_path: Path
) -> None:
    contract = make_contract()
    step = make_step_profile(contract, SIZES, k=4)
    wrong = AxisRange.model_construct(least=9, likely=5, most=25)
    profile = step.model_copy(update={"axes": {**step.axes, Axis.BLOCK: wrong}})
    builder = _make_builder(installation, tmp_path / "there is no graph.onnx", contract)

    with pytest.raises(UsageError, match="block goes from 9 over 5 to 25"):
        builder.compile([profile], tmp_path / "k.plan")


def test_profile_that_tensorrt_refuses_is_told(
    installation: Installation,
    graph_of: GraphOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contract = make_contract()
    step = make_step_profile(contract, SIZES, k=4)
    wrong = AxisRange.model_construct(least=9, likely=5, most=25)
    profile = step.model_copy(update={"axes": {**step.axes, Axis.BLOCK: wrong}})
    monkeypatch.setattr(builder_module, "check_profile", lambda *_, **__: None)
    builder = _make_builder(installation, graph_of(CacheForm.CONCAT, Dtype.FLOAT16), contract)

    with pytest.raises(PlanError, match=r"profile 'step' for k = 4 is refused by .*MIN<=OPT<=MAX"):
        builder.compile([profile], tmp_path / "k.plan")


def test_gpu_that_rtx_does_not_build_for_is_refused(
    installation: Installation, graph_of: GraphOf, tmp_path: Path
) -> None:
    contract = make_contract()
    builder = _make_builder(
        installation,
        graph_of(CacheForm.CONCAT, Dtype.FLOAT16),
        contract,
        compute_capabilities=("SM89", "SM90"),
    )

    with pytest.raises(UsageError, match=r"--compute-capability SM90 is not one .* SM89, SM120"):
        builder.compile(_profiles(contract), tmp_path / "k.plan")


def test_options_of_rtx_are_taken(
    installation: Installation, graph_of: GraphOf, tmp_path: Path
) -> None:
    contract = make_contract()
    builder = _make_builder(
        installation,
        graph_of(CacheForm.CONCAT, Dtype.FLOAT16),
        contract,
        compute_capabilities=("SM89", "SM120"),
        workspace_bytes=1 << 28,
        optimization_level=1,
    )

    assert builder.compile(_profiles(contract), tmp_path / "k.plan").bytes > 0


class _Pressing(SilentPlanProgress):
    """Presses Ctrl-C in the middle of a build."""

    def __init__(self) -> None:
        self.num_steps_after = 0
        self.has_pressed = False

    def advance(self, phase: str, step: int, num_steps: int) -> None:
        self.num_steps_after += self.has_pressed
        if step == 2 and not self.has_pressed:
            self.has_pressed = True
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_stops_the_build_and_leaves_no_file(
    installation: Installation, graph_of: GraphOf, tmp_path: Path
) -> None:
    contract = make_contract()
    progress = _Pressing()
    graph = graph_of(CacheForm.CONCAT, Dtype.FLOAT16)
    builder = _make_builder(installation, graph, contract, progress=progress)

    with pytest.raises(KeyboardInterrupt):
        builder.compile(_profiles(contract), tmp_path / "k.plan")

    assert progress.has_pressed
    assert progress.num_steps_after == 0
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_the_graph_is_read_stops_the_build(
    installation: Installation,
    graph_of: GraphOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read_and_press(*args: Any, **kwargs: Any) -> ParsedGraph:
        signal.raise_signal(signal.SIGINT)
        return read_graph(*args, **kwargs)

    class Count(SilentPlanProgress):
        num_steps = 0

        def advance(self, phase: str, step: int, num_steps: int) -> None:
            self.num_steps += 1

    contract = make_contract()
    progress = Count()
    graph = graph_of(CacheForm.CONCAT, Dtype.FLOAT16)
    monkeypatch.setattr(builder_module, "read_graph", read_and_press)
    builder = _make_builder(installation, graph, contract, progress=progress)

    with pytest.raises(KeyboardInterrupt):
        builder.compile(_profiles(contract), tmp_path / "k.plan")

    assert progress.num_steps == 1
    assert list(tmp_path.iterdir()) == []


def test_tensorrt_that_does_not_start_is_told(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full TensorRT without CUDA logs why and gives out no builder."""

    def refuse(log: BuildLog) -> None:
        log.log(installation.trt.ILogger.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(installation.trt, "Builder", refuse)
    builder = _make_builder(installation, tmp_path / "model.onnx", make_contract())

    with pytest.raises(HostError, match=r"does not start: CUDA initialization failure with .* 35;"):
        builder.compile(_profiles(make_contract()), tmp_path / "k.plan")


def test_folder_that_cannot_be_written_is_told(
    installation: Installation, graph_of: GraphOf, tmp_path: Path
) -> None:
    contract = make_contract()
    builder = _make_builder(installation, graph_of(CacheForm.CONCAT, Dtype.FLOAT16), contract)
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(HostError, match=r"could not write the plan k4\.plan: "):
        builder.compile(_profiles(contract), tmp_path / "file" / "k4.plan")


# --- what only TensorRT has, on the calls of its sibling, for which timings are a thing of the past

no_deprecation = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@no_deprecation
def test_trt_builds_with_its_timing_cache_and_hardware_compatibility(
    stand_in: ModuleType, graph_of: GraphOf, tmp_path: Path
) -> None:
    contract = make_contract()
    builder = _make_builder(
        open_tensorrt(PlanTarget.TRT, find_gpu=find_gpu),
        graph_of(CacheForm.CONCAT, Dtype.FLOAT16),
        contract,
        timing_cache=tmp_path / "timings",
        hardware_compatibility=HardwareCompatibility.AMPERE_PLUS,
    )

    builder.compile(_profiles(contract), tmp_path / "k.plan")

    assert [path.name for path in (tmp_path / "timings").iterdir()] == [
        "11.4.0.106-SM90-580.65.06.cache"
    ]


@no_deprecation
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"is_version_compatible": True}, "libnvinfer_lean"),
        ({"is_stripped": True}, "CUDA_SUCCESS"),
    ],
)
def test_switches_of_trt_reach_the_builder(
    given: dict[str, Any], reason: str, stand_in: ModuleType, graph_of: GraphOf, tmp_path: Path
) -> None:
    """What stands in for TensorRT cannot do these, and says so: they were asked for."""
    contract = make_contract()
    builder = _make_builder(
        open_tensorrt(PlanTarget.TRT, find_gpu=find_gpu),
        graph_of(CacheForm.CONCAT, Dtype.FLOAT16),
        contract,
        timing_cache=tmp_path / "timings",
        **given,
    )

    with pytest.raises(PlanError, match=reason):
        builder.compile(_profiles(contract), tmp_path / "k.plan")
