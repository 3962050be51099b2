from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from la_export.plan.options import PlanOptions
from la_export.plan.profiles import (
    Sizes,
    check_profile,
    make_graph_widths,
    make_prefill_profile,
    make_step_profile,
    resolve_sizes,
)
from la_runtime.contract import Axis, CacheForm
from la_runtime.errors import UsageError
from la_runtime.layout import Layout
from la_runtime.plans import AxisRange, PlanProfile
from tests.la_export.plan.graphs import CONTEXT, make_contract

SIZES = Sizes(context=CONTEXT, max_batch=3, prefill_chunk=20)


def _triples(profile: PlanProfile) -> dict[str, tuple[int, int, int]]:
    return {str(axis): (span.least, span.likely, span.most) for axis, span in profile.axes.items()}


def test_step_profile_of_concat_by_hand() -> None:
    profile = make_step_profile(make_contract(CacheForm.CONCAT), SIZES, k=4)

    assert (profile.name, profile.k) == ("step", 4)
    assert _triples(profile) == {
        "batch": (1, 1, 3),
        "block": (1, 9, 25),
        "rows": (1, 9, 25),
        "past": (1, 32, 64),
        "keys": (2, 41, 89),
    }


def test_prefill_profile_of_concat_by_hand() -> None:
    profile = make_prefill_profile(make_contract(CacheForm.CONCAT), SIZES, k=4)

    assert (profile.name, profile.k) == ("prefill", 4)
    assert _triples(profile) == {
        "batch": (1, 1, 3),
        "block": (1, 24, 24),
        "rows": (1, 5, 24),
        "past": (1, 20, 64),
        "keys": (2, 44, 88),
    }


def test_scatter_has_no_ranges_for_its_capacity() -> None:
    profile = make_step_profile(make_contract(CacheForm.SCATTER), SIZES, k=2)

    assert _triples(profile) == {"batch": (1, 1, 3), "block": (1, 5, 9), "rows": (1, 5, 9)}


@pytest.mark.parametrize("cache_form", CacheForm)
@pytest.mark.parametrize("k", [0, 1, 2, 4, 8])
@pytest.mark.parametrize(("chunk", "context"), [(512, CONTEXT), (1, CONTEXT), (CONTEXT, CONTEXT)])
def test_profiles_hold_every_pass_of_a_run(
    cache_form: CacheForm, k: int, chunk: int, context: int
) -> None:
    contract = make_contract(cache_form)
    options = PlanOptions(prefill_chunk=chunk, max_batch=2)
    sizes = resolve_sizes(options, contract, context=context, largest_k=k)
    prefill = make_prefill_profile(contract, sizes, k=k)
    step = make_step_profile(contract, sizes, k=k)

    for profile in (prefill, step):
        check_profile(profile, contract, context=context)
    for past in (1, context):
        for profile, most in ((prefill, sizes.prefill_chunk + k), (step, (k + 1) ** 2)):
            for block in (1, most):
                sizes_of = {Axis.BATCH: 2, Axis.BLOCK: block, Axis.ROWS: 1}
                if cache_form is CacheForm.CONCAT:
                    sizes_of |= {Axis.PAST: past, Axis.KEYS: past + block}
                assert profile.holds(sizes_of)
            assert not profile.holds({Axis.BLOCK: most + 1})
            assert not profile.holds({Axis.BATCH: 3})


def test_step_is_likely_as_wide_as_its_default_layout() -> None:
    for k in range(9):
        profile = make_step_profile(make_contract(), SIZES, k=k)

        assert profile.axes[Axis.BLOCK].likely == Layout.ROOT_ONLY.max_rows(k)
        assert profile.axes[Axis.BLOCK].most == Layout.FULL.max_rows(k)


@pytest.mark.parametrize(
    ("cache_form", "wanted", "expected"),
    [
        (CacheForm.CONCAT, 512, CONTEXT),
        (CacheForm.CONCAT, 16, 16),
        (CacheForm.SCATTER, 512, CONTEXT),
        (CacheForm.SCATTER, 16, 16),
    ],
)
def test_chunk_is_cut_to_what_there_is_room_for(
    cache_form: CacheForm, wanted: int, expected: int
) -> None:
    sizes = resolve_sizes(
        PlanOptions(prefill_chunk=wanted), make_contract(cache_form), context=CONTEXT, largest_k=8
    )

    assert sizes.prefill_chunk == expected


def test_chunk_and_group_fit_behind_a_full_cache() -> None:
    """A capacity of 64 + 68 leaves 68 rows; beside 8 slots that is 60 of a prompt."""
    contract = replace(make_contract(CacheForm.SCATTER), capacity=CONTEXT + 68)

    sizes = resolve_sizes(PlanOptions(), contract, context=CONTEXT, largest_k=8)

    assert sizes.prefill_chunk == 60


def test_graph_widths_are_those_of_usual_steps() -> None:
    assert make_graph_widths([4]) == (1, 5, 9, 25)
    assert make_graph_widths([0]) == (1,)
    assert make_graph_widths([0, 2, 4]) == (1, 3, 5, 9, 25)


def _changed(profile: PlanProfile, **ranges: AxisRange) -> PlanProfile:
    changed = {Axis[name.upper()]: span for name, span in ranges.items()}
    return profile.model_copy(update={"axes": {**profile.axes, **changed}})


def _span(least: int, likely: int, most: int) -> AxisRange:
    """A range as it is, also one that cannot be."""
    return AxisRange.model_construct(least=least, likely=likely, most=most)


@pytest.mark.parametrize(
    ("cache_form", "ranges", "problem"),
    [
        (CacheForm.CONCAT, {"block": _span(9, 5, 25)}, "block goes from 9 over 5 to 25"),
        (CacheForm.CONCAT, {"batch": _span(0, 1, 4)}, "batch begins at 0, expected at least 1"),
        (
            CacheForm.CONCAT,
            {"past": _span(0, 32, 64), "keys": _span(1, 41, 89)},
            "past begins at 0, expected at least 1",
        ),
        (
            CacheForm.CONCAT,
            {"keys": _span(1, 40, 89)},
            r"keys are \(1, 40, 89\), past and block together \(2, 41, 89\)",
        ),
        (CacheForm.CONCAT, {"rows": _span(1, 9, 30)}, "30 rows of a block of 25 are scored"),
        (
            CacheForm.SCATTER,
            {"block": _span(1, 9, 90)},
            "a block of 90 rows does not fit behind 64 places of a capacity of 145",
        ),
        (
            CacheForm.SCATTER,
            {"past": _span(0, 1, 2)},
            "it ranges over batch, block, past, rows, expected batch, block, rows",
        ),
    ],
)
def test_profile_that_contradicts_itself_is_refused_with_its_axis(
    cache_form: CacheForm, ranges: dict[str, Any], problem: str
) -> None:
    contract = make_contract(cache_form)
    profile = _changed(make_step_profile(contract, SIZES, k=4), **ranges)

    with pytest.raises(
        UsageError, match=rf"profile 'step' for k = 4 contradicts itself: {problem}"
    ):
        check_profile(profile, contract, context=CONTEXT)
