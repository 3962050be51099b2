from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from la_export.options import BuildOptions, Precision
from la_export.plan import PlanOptions, PlanSharing, Target
from la_export.recipe import Recipe, format_recipe, make_recipe
from la_runtime.contract import CacheForm
from la_runtime.plans import HardwareCompatibility

OPTIONS = BuildOptions(
    model="models/mine",
    lookahead_lengths=(4, 0, 4),
    precision=Precision.BF16,
    cache_form=CacheForm.SCATTER,
    prefill_chunk=64,
    out=Path("secret/out"),
    threads=3,
    allow_bin=True,
)
PLANS = PlanOptions(
    lookahead_lengths=(0, 4),
    sharing=PlanSharing.SHARED,
    max_batch=2,
    prefill_chunk=64,
    workspace_bytes=3 << 20,
    optimization_level=2,
    hardware_compatibility=HardwareCompatibility.AMPERE_PLUS,
    is_version_compatible=True,
    compute_capabilities=("SM80", "SM90"),
    timing_cache=Path("secret/timings"),
)
WITHOUT_PLANS: Recipe = {
    "model": "owner/name",
    "revision": "abc",
    "k": [0, 4],
    "precision": "bf16",
    "cache-form": "scatter",
    "smoothing": True,
    "packed": False,
    "prefill-chunk": 64,
    "context": 2048,
    "allow-bin": True,
    "lookahead": "untuned",
    "target": "onnx",
}


def _make(target: Target, **changes: Any) -> Recipe:
    given: dict[str, Any] = {"place": ("owner/name", "abc"), "context": 2048}
    return make_recipe(OPTIONS, PLANS, target=target, **(given | changes))


def test_recipe_holds_what_was_asked_for_and_what_was_found() -> None:
    assert _make(Target.ONNX) == WITHOUT_PLANS


def test_recipe_names_no_file_of_lookaheads() -> None:
    assert _make(Target.ONNX, lookahead="shipped")["lookahead"] == "shipped"
    assert "lookahead" not in _make(Target.ONNX, lookahead=None)


def test_recipe_of_plans_holds_their_options() -> None:
    assert _make(Target.TRT) == WITHOUT_PLANS | {
        "target": "trt",
        "plans": "shared",
        "max-batch": 2,
        "workspace": 3,
        "opt-level": 2,
        "hardware-compatibility": "ampere-plus",
        "version-compatible": True,
        "strip": False,
        "compute-capability": ["SM80", "SM90"],
    }


@pytest.mark.parametrize("place", [None, ("smollm2-135m", None)])
def test_recipe_names_no_path_of_the_machine(place: tuple[str, str | None] | None) -> None:
    recipe = _make(Target.TRT, place=place)

    assert recipe.get("model") == (place and place[0])
    assert "revision" not in recipe
    assert not any("secret" in str(value) or "mine" in str(value) for value in recipe.values())


def test_toml_reads_back_as_the_recipe() -> None:
    recipe = _make(Target.TRT, place=('quotes " and \\ and 模型 😀\n', "abc"))

    text = format_recipe(recipe, source="hub:owner/name")

    assert tomllib.loads(text) == recipe
    assert "#" not in text


def test_toml_without_a_model_says_what_to_add() -> None:
    recipe = _make(Target.ONNX, place=None)

    text = format_recipe(recipe, source="local:two\nlines")

    assert text.startswith('# Give --model: the bundle was made from "local:two\\nlines".\n')
    assert tomllib.loads(text) == recipe
