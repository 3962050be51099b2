"""What a manifest says of a plan."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from la_runtime.contract import Axis, CacheForm, Contract
from la_runtime.plans import AxisRange, PlanFacts, PlanProfile, PlanTarget

CONCAT = Contract(
    num_layers=1,
    num_kv_heads=2,
    head_dim=4,
    hidden_size=8,
    vocab_size=32,
    k_max=2,
    top_c=8,
)
RANGES = {
    Axis.BATCH: AxisRange(least=1, likely=1, most=4),
    Axis.BLOCK: AxisRange(least=1, likely=5, most=9),
    Axis.ROWS: AxisRange(least=1, likely=5, most=9),
    Axis.PAST: AxisRange(least=0, likely=128, most=256),
    Axis.KEYS: AxisRange(least=1, likely=133, most=265),
}


def make_facts(axes=RANGES, **changes) -> PlanFacts:
    fields = {
        "path": "trt/trt/k2.plan",
        "target": PlanTarget.TRT,
        "lookahead_lengths": (2,),
        "graph_sha256": "0" * 64,
        "version": "11.4.0.106",
        "compute_capabilities": ("SM90",),
        "driver": "580.65.06",
        "profiles": (PlanProfile(name="step", k=2, axes=axes),),
    }
    return PlanFacts(**(fields | changes))


@pytest.mark.parametrize("sizes", [(2, 1, 3), (1, 4, 3), (3, 2, 1), (-1, 1, 1)])
def test_a_range_out_of_order_is_refused(sizes):
    least, likely, most = sizes

    with pytest.raises(ValidationError, match=r"least"):
        AxisRange(least=least, likely=likely, most=most)


def test_shapes_follow_the_axes_of_the_contract():
    (profile,) = make_facts().profiles
    mask = next(spec for spec in CONCAT.inputs if spec.name == "attention_mask")

    assert profile.shape_of(mask.axes) == ((1, 1, 1, 1), (1, 1, 5, 133), (4, 1, 9, 265))
    assert profile.shape_of(CONCAT.cache_axes) == ((1, 2, 0, 4), (1, 2, 128, 4), (4, 2, 256, 4))


def test_a_profile_holds_the_sizes_within_all_its_ranges():
    (profile,) = make_facts().profiles

    assert profile.holds({Axis.BATCH: 4, Axis.BLOCK: 9, Axis.PAST: 0})
    assert not profile.holds({Axis.BATCH: 5, Axis.BLOCK: 9, Axis.PAST: 0})
    assert not profile.holds({Axis.BATCH: 1, Axis.BLOCK: 1, Axis.PAST: 257})


def test_a_profile_must_range_over_just_the_axes_of_the_inputs():
    make_facts().check(CONCAT)
    incomplete = {axis: entry for axis, entry in RANGES.items() if axis is not Axis.KEYS}
    with pytest.raises(ValueError, match=r"'step' of trt/trt/k2.plan ranges over"):
        make_facts(axes=incomplete).check(CONCAT)

    scatter = Contract(
        num_layers=1,
        num_kv_heads=2,
        head_dim=4,
        hidden_size=8,
        vocab_size=32,
        k_max=2,
        top_c=8,
        cache_form=CacheForm.SCATTER,
        capacity=64,
    )
    with pytest.raises(ValueError, match=r"expected batch, block, rows"):
        make_facts().check(scatter)


@pytest.mark.parametrize("path", ["../k2.plan", "/k2.plan", "trt/../../k2.plan"])
def test_a_plan_outside_the_bundle_is_refused(path):
    with pytest.raises(ValidationError, match="must be relative and stay inside the bundle"):
        make_facts(path=path)
