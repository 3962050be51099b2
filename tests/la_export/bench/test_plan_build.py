from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from la_export.bench.plan_build import BuiltPlan, measure_plan
from la_export.options import BuildOptions, Precision
from la_export.pipeline import build
from la_runtime.bundle import open_bundle
from la_runtime.contract import CacheForm
from la_runtime.errors import HostError
from tests.la_export.plan.bundles import write_decoder_bundle
from tests.la_export.plan.graphs import make_contract

GOOD = BuiltPlan(
    record={"attentions": 30, "fused_attentions": 30},
    peak_bytes=3_900_000_000,
    cpu_seconds=59.0,
)


def test_plan_is_measured_as_the_command_builds_it(tmp_path: Path) -> None:
    bundle = write_decoder_bundle(tmp_path / "bundle", make_contract())

    built = measure_plan(bundle, "--k", "4")

    manifest = open_bundle(bundle).manifest
    assert [plan.path for plan in manifest.plans] == [built.record["path"]]
    assert built.record["bytes"] == manifest.files[built.record["path"]].bytes
    # The libraries alone are some hundred MB; a plan of this size adds little.
    assert 100e6 < built.peak_bytes < 2e9
    assert built.cpu_seconds > 0


def test_command_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="the plan was not built: exit code 2"):
        measure_plan(tmp_path / "no bundle")


@pytest.mark.parametrize(
    ("built", "keeps"),
    [
        (GOOD, True),
        (replace(GOOD, cpu_seconds=60.0), False),
        (replace(GOOD, peak_bytes=4_000_000_000), False),
        (replace(GOOD, record={**GOOD.record, "fused_attentions": 29}), False),
        (replace(GOOD, record={**GOOD.record, "fused_attentions": None}), False),
    ],
)
def test_bounds_are_those_of_time_memory_and_fusion(built: BuiltPlan, keeps: bool) -> None:
    assert built.keeps_bounds is keeps


@pytest.mark.slow
@pytest.mark.parametrize("cache_form", CacheForm)
def test_smollm2_in_float16_gets_its_plans_within_bounds(
    cache_form: CacheForm, tmp_path: Path
) -> None:
    """Under 60 s of one core and 4 GB a plan, with every attention fused."""
    lengths = (2, 4, 8)
    options = BuildOptions(
        model="smollm2-135m",
        lookahead_lengths=lengths,
        precision=Precision.FP16,
        cache_form=cache_form,
        out=tmp_path / "bundle",
    )
    bundle = build(options).bundle

    for k in lengths:
        built = measure_plan(bundle, "--k", str(k))

        assert built.keeps_bounds, built
        assert built.record["fused_attentions"] == 30
        assert [profile["name"] for profile in built.record["profiles"]] == ["prefill", "step"]
