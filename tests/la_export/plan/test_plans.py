from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from la_export.plan.options import PlanOptions, Target
from la_export.plan.plans import PlanSource, build_plans
from la_runtime.bundle import open_bundle
from tests.la_export.plan.instant import PLAN_BYTES

RTX = PlanOptions(target=Target.TRT_RTX, max_batch=2, prefill_chunk=16)


@pytest.mark.usefixtures("instantly")
def test_plans_of_a_bundle_that_is_being_made_lie_in_its_folder(bundle: Path) -> None:
    source = PlanSource.of(open_bundle(bundle).manifest)

    report = build_plans(bundle, source, RTX)

    assert [facts.path for facts in report.facts] == ["trt/trt-rtx/k2.plan", "trt/trt-rtx/k4.plan"]
    assert all((bundle / facts.path).read_bytes() == PLAN_BYTES for facts in report.facts)


@pytest.mark.parametrize("target", [Target.AUTO, Target.ONNX])
def test_nothing_to_build_with_is_none_for_a_bundle_that_is_being_made(
    target: Target, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    source = PlanSource.of(open_bundle(bundle).manifest)

    report = build_plans(bundle, source, replace(RTX, target=target))

    assert report.plans == ()
    assert len(report.skipped) == (2 if target is Target.AUTO else 0)
