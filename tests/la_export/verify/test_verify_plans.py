"""The ladder over the plans of a bundle: passes of a plan hold less than those of a graph.

The plans have the profiles that are built for them; the stand-in for TensorRT keeps to these.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from la_export.plan.options import PlanOptions
from la_export.plan.profiles import (
    make_graph_widths,
    make_prefill_profile,
    make_step_profile,
    resolve_sizes,
)
from la_export.verify.findings import Status
from la_export.verify.ladder import QUICK
from la_export.verify.rungs.tensors import TENSORS
from la_export.verify.verification import VerifyOptions, _climbs, verify
from la_runtime.backends import trt as trt_module
from la_runtime.bundle import Bundle, open_bundle
from la_runtime.contract import CacheForm
from la_runtime.errors import NotRunError, UsageError
from tests.la_runtime.backends.numpy_device import NumpyDevice
from tests.la_runtime.backends.plans import with_plans
from tests.tensorrt_api.engine import make_tensorrt
from tests.tensorrt_api.host import make_host
from tests.tiny_models import build_tiny_bundle

LENGTHS = (0, 2, 4)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """A bundle of each cache form."""
    return {
        form: build_tiny_bundle(
            tmp_path_factory.mktemp(form), lookahead_lengths=LENGTHS, cache_form=form
        )
        for form in CacheForm
    }


@pytest.fixture
def host(monkeypatch):
    """Each backend that is opened finds a device and a TensorRT of its own."""
    host = make_host(monkeypatch)

    def make_device():
        host.device = NumpyDevice()
        host.modules["tensorrt"] = make_tensorrt(host.device).module
        return host.device

    monkeypatch.setattr(trt_module, "CudaDevice", make_device)
    monkeypatch.setattr(trt_module, "load_tensorrt", lambda plan: _Late(host))
    return host


class _Late:
    """The module of the device that is made after it was asked for."""

    def __init__(self, host):
        self._host = host
        self.__version__ = host.modules["tensorrt"].__version__

    def __getattr__(self, name):
        return getattr(self._host.modules["tensorrt"], name)


def plan_bundle(folder: Path, destination: Path, **options) -> Bundle:
    """A copy with the plans that would be built, one for each k."""
    manifest = open_bundle(folder).manifest
    contract = manifest.contract
    sizes = resolve_sizes(
        PlanOptions(**options),
        contract,
        context=manifest.model.context,
        largest_k=contract.k_max,
    )
    plans = [
        {
            "path": f"trt/trt/k{k}.plan",
            "lookahead_lengths": (k,),
            "graph_widths": make_graph_widths((k,)),
            "profiles": (
                make_prefill_profile(contract, sizes, k=k),
                make_step_profile(contract, sizes, k=k),
            ),
        }
        for k in LENGTHS
    ]
    return with_plans(folder, destination, *plans)


@pytest.mark.parametrize("form", CacheForm)
def test_every_plan_climbs_the_whole_ladder(bundles, tmp_path, host, form):
    plan_bundle(bundles[form], tmp_path / "bundle")

    report, _ = verify(
        VerifyOptions(bundle=tmp_path / "bundle", backend="trt", settings=QUICK),
        further_rungs=(TENSORS,),
    )

    others = {r.name: r.detail for r in report.results if r.status is not Status.PASSED}
    assert others.keys() == {"tokenizer and template"}, others  # it needs the checkpoint
    for k in LENGTHS:
        assert f"plan for k={k}: " in report.results[4].detail
    assert report.processor == "NVIDIA H200 (SM90)"
    assert {path for path in report.digests if path.startswith("trt/")} == {
        f"trt/trt/k{k}.plan" for k in LENGTHS
    }


@pytest.mark.parametrize(
    ("asked", "climbed"),
    [
        ((), {0: (0,), 2: (2,), 4: (2, 4)}),
        ((2,), {2: (2,)}),
        ((3,), {4: (3,)}),
        ((2, 3), {2: (2,), 4: (2, 3)}),
        ((2, 4), {2: (2,), 4: (2, 4)}),
    ],
)
def test_each_length_is_verified_on_every_plan_that_may_run_it(bundles, tmp_path, asked, climbed):
    bundle = plan_bundle(bundles[CacheForm.CONCAT], tmp_path / "bundle")
    options = VerifyOptions(bundle=bundle.root, backend="trt", lookahead_lengths=asked)

    found = _climbs(options, bundle.manifest)

    assert {one.k: one.lookahead_lengths for one in found} == climbed


def test_a_length_that_no_plan_runs_is_refused(bundles, tmp_path):
    bundle = plan_bundle(bundles[CacheForm.CONCAT], tmp_path / "bundle")
    plans = tuple(plan for plan in bundle.manifest.plans if plan.lookahead_lengths != (4,))
    manifest = bundle.manifest.model_copy(update={"plans": plans})
    options = VerifyOptions(bundle=bundle.root, backend="trt", lookahead_lengths=(2, 4))

    with pytest.raises(UsageError, match="no plan for k = 4"):
        _climbs(options, manifest)


def test_plans_that_were_not_opened_cost_the_certificate(bundles, tmp_path, host):
    plan_bundle(bundles[CacheForm.CONCAT], tmp_path / "bundle")
    options = VerifyOptions(
        bundle=tmp_path / "bundle", backend="trt", settings=QUICK, lookahead_lengths=(2, 4)
    )

    report, _ = verify(options)

    assert report.left_out == ("the plan trt/trt/k0.plan; leave --k out",)
    assert not replace(report, is_quick=False).deserves_certificate


def test_a_plan_for_too_few_sequences_is_not_run(bundles, tmp_path, host):
    plan_bundle(bundles[CacheForm.SCATTER], tmp_path / "bundle", max_batch=3)

    with pytest.raises(NotRunError, match="at most 3 sequences, and verifying needs 4"):
        verify(VerifyOptions(bundle=tmp_path / "bundle", backend="trt", settings=QUICK))


def test_a_plan_for_short_chunks_is_not_run(bundles, tmp_path, host):
    plan_bundle(bundles[CacheForm.SCATTER], tmp_path / "bundle", prefill_chunk=64)

    with pytest.raises(NotRunError, match=r"at most 64 rows, and verifying needs 256; build it"):
        verify(VerifyOptions(bundle=tmp_path / "bundle", backend="trt", settings=QUICK))
