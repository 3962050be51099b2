from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from la_export.plan import plans as plans_module
from la_export.plan.addition import add_plans
from la_export.plan.options import PlanOptions, PlanSharing, Target
from la_export.plan.progress import SilentPlanProgress
from la_export.plan.report import Compiled, PlanReport
from la_runtime.bundle import MANIFEST_NAME, open_bundle
from la_runtime.contract import CacheForm, Dtype
from la_runtime.digests import hash_file
from la_runtime.errors import BundleError, DigestError, HostError, PlanError, UsageError
from la_runtime.plans import HardwareCompatibility, PlanFacts, PlanTarget
from tests.la_export.plan.bundles import write_decoder_bundle
from tests.la_export.plan.graphs import make_contract, make_model
from tests.la_export.plan.instant import InstantBuilder
from tests.la_export.plan.machines import GPU, find_gpu, find_no_gpu
from tests.tiny_models import build_tiny_bundle

RTX = PlanOptions(target=Target.TRT_RTX, max_batch=2, prefill_chunk=16)


def _snapshot(root: Path) -> dict[str, bytes]:
    """Every file of a folder and what is in it."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


# --- real plans


@pytest.fixture(scope="session")
def tiny_half_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[CacheForm], Path]:
    """A tiny Llama in float16 for k of 2, 4 and 8, exported as every model is."""

    def build(cache_form: CacheForm) -> Path:
        return build_tiny_bundle(
            tmp_path_factory.mktemp(f"half-{cache_form}"),
            lookahead_lengths=(2, 4, 8),
            precision="fp16",
            cache_form=cache_form,
            max_position_embeddings=128,
        )

    return build


@pytest.mark.parametrize("cache_form", CacheForm)
def test_tiny_llama_gets_a_plan_per_k_with_fused_attention(
    cache_form: CacheForm, tiny_half_bundle: Callable[[CacheForm], Path]
) -> None:
    bundle = tiny_half_bundle(cache_form)

    added = add_plans(bundle, PlanOptions(target=Target.TRT_RTX))

    manifest = open_bundle(bundle).manifest
    assert manifest == added.manifest
    assert [(plan.path, plan.lookahead_lengths) for plan in manifest.plans] == [
        ("trt/trt-rtx/k2.plan", (2,)),
        ("trt/trt-rtx/k4.plan", (4,)),
        ("trt/trt-rtx/k8.plan", (8,)),
    ]
    for plan, k in zip(manifest.plans, (2, 4, 8), strict=True):
        assert [(profile.name, profile.k) for profile in plan.profiles] == [
            ("prefill", k),
            ("step", k),
        ]
        assert plan.graph_sha256 == manifest.files[manifest.graph].sha256
        assert plan.version.startswith("1.7.")
        assert (plan.driver, plan.compute_capabilities[0]) == (None, "SM80")
    for report in added.report.plans:
        layers = report.compiled.layers
        assert layers is not None
        assert layers.fused_attentions == (manifest.contract.num_layers,) * 2
        assert manifest.files[report.facts.path].bytes == report.compiled.bytes


def test_shared_plan_has_a_step_profile_per_k(bundle: Path) -> None:
    added = add_plans(bundle, replace(RTX, sharing=PlanSharing.SHARED))

    (report,) = added.report.plans
    assert report.facts.path == "trt/trt-rtx/shared.plan"
    assert report.facts.lookahead_lengths == (2, 4)
    assert [(profile.name, profile.k) for profile in report.facts.profiles] == [
        ("prefill", 4),
        ("step", 2),
        ("step", 4),
    ]
    assert report.compiled.layers is not None
    assert report.compiled.layers.fused_attentions == (2, 2, 2)


def test_graph_that_tensorrt_refuses_leaves_the_bundle_as_it_was(tmp_path: Path) -> None:
    contract = make_contract()

    def spoil(nodes: list) -> None:
        for node in nodes:
            if node.op_type == "Attention":
                node.output.extend([f"{node.name}.key", f"{node.name}.value"])

    bundle = write_decoder_bundle(
        tmp_path / "bundle", contract, model=make_model(contract, change=spoil)
    )
    before = _snapshot(tmp_path)

    with pytest.raises(PlanError, match="only supports Attention nodes with one output"):
        add_plans(bundle, RTX)

    assert _snapshot(tmp_path) == before


def test_killed_build_leaves_the_bundle_whole(bundle: Path, tmp_path: Path) -> None:
    before = _snapshot(bundle)
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from la_export.plan import *\n"
        "class Kill(SilentPlanProgress):\n"
        "    def finish_plan(self, plan):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "add_plans(Path(sys.argv[1]), PlanOptions(target=Target.TRT_RTX), progress=Kill())\n"
    )

    done = subprocess.run([sys.executable, "-c", program, bundle], check=False, cwd=Path.cwd())

    assert done.returncode == -signal.SIGKILL
    assert _snapshot(bundle) == before
    open_bundle(bundle)


def test_ctrl_c_leaves_the_bundle_whole_and_nothing_beside_it(bundle: Path) -> None:
    class Press(SilentPlanProgress):
        def advance(self, phase: str, step: int, num_steps: int) -> None:
            signal.raise_signal(signal.SIGINT)

    before = _snapshot(bundle.parent)

    with pytest.raises(KeyboardInterrupt):
        add_plans(bundle, RTX, progress=Press())

    assert _snapshot(bundle.parent) == before


# --- the bundle's files


@pytest.mark.usefixtures("instantly")
def test_other_files_are_those_that_were_there(bundle: Path) -> None:
    (bundle / "reports").mkdir()
    (bundle / "reports" / "verify.json").write_text("{}")
    before = _snapshot(bundle)
    inode = (bundle / "onnx" / "model.onnx.data").stat().st_ino

    add_plans(bundle, RTX)

    after = _snapshot(bundle)
    new = {"trt/trt-rtx/k2.plan": b"plan", "trt/trt-rtx/k4.plan": b"plan"}
    changed = {MANIFEST_NAME: after[MANIFEST_NAME]}
    assert after == {**before, **new, **changed}
    assert (bundle / "onnx" / "model.onnx.data").stat().st_ino == inode
    # onnx takes a file with a second name for an attack.
    assert {path.stat().st_nlink for path in bundle.rglob("*") if path.is_file()} == {1}
    assert open_bundle(bundle).manifest.files["trt/trt-rtx/k2.plan"] == hash_file(
        bundle / "trt/trt-rtx/k2.plan"
    )


@pytest.mark.usefixtures("instantly")
def test_plans_take_the_place_of_those_of_their_target(bundle: Path, stand_in: ModuleType) -> None:
    add_plans(bundle, replace(RTX, target=Target.TRT), find_gpu=find_gpu)
    add_plans(bundle, RTX)

    added = add_plans(bundle, replace(RTX, sharing=PlanSharing.SHARED))

    assert [plan.path for plan in added.manifest.plans] == [
        "trt/trt/k2.plan",
        "trt/trt/k4.plan",
        "trt/trt-rtx/shared.plan",
    ]
    assert {path.name for path in (bundle / "trt" / "trt-rtx").iterdir()} == {"shared.plan"}
    assert open_bundle(bundle).manifest == added.manifest


@pytest.mark.usefixtures("instantly")
def test_certificate_made_meanwhile_is_kept(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Certify(SilentPlanProgress):
        def finish_plan(self, plan: PlanReport) -> None:
            record = json.loads((bundle / MANIFEST_NAME).read_text())
            record["certificates"] = [CERTIFICATE]
            (bundle / MANIFEST_NAME).write_text(json.dumps(record))

    added = add_plans(bundle, RTX, progress=Certify())

    assert [entry.backend for entry in added.manifest.certificates] == ["ort-cpu"]


CERTIFICATE = {
    "utc": "2026-01-01T00:00:00Z",
    "reference": "self",
    "backend": "ort-cpu",
    "backend_version": "1",
    "processor": "cpu",
    "threads": 1,
    "epsilon": 0.0,
    "lookahead_lengths": [2],
    "digests": {},
    "facts_sha256": "0" * 64,
    "rungs": {},
    "report": "reports/verify.json",
}


@pytest.mark.usefixtures("instantly")
def test_bundle_that_was_rebuilt_meanwhile_is_left_alone(bundle: Path) -> None:
    class Rebuild(SilentPlanProgress):
        def finish_plan(self, plan: PlanReport) -> None:
            write_decoder_bundle(bundle, make_contract(CacheForm.SCATTER))

    with pytest.raises(BundleError, match="changed in the meantime"):
        add_plans(bundle, RTX, progress=Rebuild())

    assert open_bundle(bundle).manifest.plans == ()


@pytest.mark.usefixtures("instantly")
def test_damaged_bundle_is_refused_before_any_plan_is_built(bundle: Path) -> None:
    with (bundle / "onnx" / "model.onnx.data").open("r+b") as stream:
        stream.write(b"\xff")

    with pytest.raises(DigestError, match="is damaged"):
        add_plans(bundle, RTX)

    assert not (bundle / "trt").exists()


# --- what is built, and what is not


@pytest.mark.usefixtures("instantly")
def test_facts_say_what_a_plan_of_trt_was_built_with_and_on(
    bundle: Path, stand_in: ModuleType
) -> None:
    options = replace(
        RTX,
        target=Target.TRT,
        lookahead_lengths=(4,),
        hardware_compatibility=HardwareCompatibility.SAME_COMPUTE_CAPABILITY,
        is_version_compatible=True,
        is_stripped=True,
    )

    (facts,) = add_plans(bundle, options, find_gpu=find_gpu).report.facts

    assert facts == PlanFacts(
        path="trt/trt/k4.plan",
        target=PlanTarget.TRT,
        lookahead_lengths=(4,),
        graph_sha256=hash_file(bundle / "onnx" / "model.onnx").sha256,
        version="11.4.0.106",
        compute_capabilities=(GPU.compute_capability,),
        driver=GPU.driver,
        profiles=facts.profiles,
        graph_widths=(1, 5, 9, 25),
        hardware_compatibility=HardwareCompatibility.SAME_COMPUTE_CAPABILITY,
        is_version_compatible=True,
        is_stripped=True,
    )


@pytest.mark.usefixtures("instantly")
def test_compute_capabilities_that_were_asked_for_are_recorded(bundle: Path) -> None:
    added = add_plans(bundle, replace(RTX, compute_capabilities=("SM75",)))

    assert {plan.compute_capabilities for plan in added.report.facts} == {("SM75",)}


@pytest.mark.usefixtures("instantly")
def test_lengths_are_built_once_and_in_order_and_0_always_can_be(bundle: Path) -> None:
    added = add_plans(bundle, replace(RTX, lookahead_lengths=(4, 0, 4)))

    assert [plan.lookahead_lengths for plan in added.report.facts] == [(0,), (4,)]


@pytest.mark.usefixtures("instantly")
def test_length_that_the_bundle_does_not_serve_is_refused(bundle: Path) -> None:
    with pytest.raises(UsageError, match=r"--k 3 is not among .* expected some of 2, 4"):
        add_plans(bundle, replace(RTX, lookahead_lengths=(3,)))


def test_option_that_the_target_cannot_do_is_refused_before_the_bundle_is_read(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match="--strip cannot be used for target trt-rtx"):
        add_plans(tmp_path / "no bundle", replace(RTX, is_stripped=True))


def test_target_trt_without_a_gpu_is_refused(bundle: Path, stand_in: ModuleType) -> None:
    with pytest.raises(HostError, match="target trt builds plans on the GPU they are for"):
        add_plans(bundle, replace(RTX, target=Target.TRT), find_gpu=find_no_gpu)


def test_nothing_to_build_with_is_an_error_for_a_finished_bundle(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(HostError, match=r"no plan can be built here: target trt needs .*\[trt\]"):
        add_plans(bundle, replace(RTX, target=Target.AUTO))


class _Notes(SilentPlanProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize(
    ("dtype", "fused", "notes"),
    [
        (Dtype.FLOAT16, (2, 1), ["trt/trt-rtx/k2.plan: 1 of 2 attentions are one kernel each"]),
        (Dtype.FLOAT16, (2, 2), []),
        (Dtype.FLOAT32, (0, 0), []),
    ],
)
def test_attention_in_pieces_is_noted_where_one_kernel_could_do(
    dtype: Dtype,
    fused: tuple[int, ...],
    notes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from la_export.plan.layers import LayerCounts

    class Builder(InstantBuilder):
        def compile(self, profiles: object, path: Path) -> Compiled:
            compiled = super().compile(profiles, path)
            return replace(compiled, layers=LayerCounts(num_layers=9, fused_attentions=fused))

    monkeypatch.setattr(plans_module, "PlanBuilder", Builder)
    bundle = write_decoder_bundle(
        tmp_path / "bundle", make_contract(dtype=dtype), lookahead_lengths=(2,)
    )
    progress = _Notes()

    add_plans(bundle, RTX, progress=progress)

    assert [note.partition(";")[0] for note in progress.notes] == notes
