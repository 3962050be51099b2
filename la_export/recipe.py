"""The recipe of a bundle: what its build was asked for, as its manifest keeps it and as TOML.

A key is an option of `la-export build` without its dashes, so that the command reads a recipe back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final, TypeAlias

from la_export.options import UNTUNED, BuildOptions
from la_export.plan import PlanOptions, Target
from la_export.plan.options import BYTES_PER_MIB

__all__ = ["ALLOW_BIN", "Recipe", "RecipeValue", "format_recipe", "make_recipe"]

RecipeValue: TypeAlias = str | int | float | bool | list[int] | list[str]
Recipe: TypeAlias = dict[str, RecipeValue]

ALLOW_BIN: Final = "allow-bin"


def make_recipe(
    options: BuildOptions,
    plans: PlanOptions,
    *,
    place: tuple[str, str | None] | None,
    context: int,
    target: Target,
    lookahead: str | None = UNTUNED,
) -> Recipe:
    """Everything that decides what is in a bundle, with nothing left to defaults.

    Names no path of this machine: neither where a local model is nor where the bundle is put.

    Args:
        options: what the build was asked for.
        plans: what was asked of its plans.
        place: the model's name and revision, as options take them; None if it is a local one.
        context: positions that the bundle serves.
        target: what its plans are for, `Target.ONNX` where it has none.
        lookahead: where its lookaheads are from, as the option takes it; None if it is a file.
    """
    recipe: Recipe = {}
    if place is not None:
        name, revision = place
        recipe["model"] = name
        if revision is not None:
            recipe["revision"] = revision
    recipe |= {
        "k": list(options.sorted_lengths),
        "precision": options.precision.value,
        "cache-form": options.cache_form.value,
        "smoothing": options.smoothing,
        "packed": options.packed,
        "prefill-chunk": options.prefill_chunk,
        "context": context,
        ALLOW_BIN: options.allow_bin,
    }
    if lookahead is not None:
        recipe["lookahead"] = lookahead
    if options.lora is not None:
        recipe["lora"] = options.lora.resolve().name
    recipe["target"] = target.value
    return recipe if target is Target.ONNX else recipe | _plan_keys(plans)


def _plan_keys(plans: PlanOptions) -> Recipe:
    """Options of plans; without those that are left to TensorRT."""
    recipe: Recipe = {
        "plans": plans.sharing.value,
        "max-batch": plans.max_batch,
        "hardware-compatibility": plans.hardware_compatibility.value,
        "version-compatible": plans.is_version_compatible,
        "strip": plans.is_stripped,
    }
    if plans.workspace_bytes is not None:
        recipe["workspace"] = -(-plans.workspace_bytes // BYTES_PER_MIB)
    if plans.optimization_level is not None:
        recipe["opt-level"] = plans.optimization_level
    if plans.compute_capabilities:
        recipe["compute-capability"] = list(plans.compute_capabilities)
    return recipe


def format_recipe(recipe: Mapping[str, RecipeValue], *, source: str) -> str:
    """A recipe as TOML, a line a key.

    Args:
        recipe: what to write.
        source: what the manifest says of the model; written as a comment where the recipe itself
            names no model.
    """
    # JSON writes texts, numbers, true, false and lists of them as TOML does.
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in recipe.items()]
    if "lora" in recipe:
        lines.insert(0, "# Give --lora the folder of that name, or change the line below.\n")
    if "lookahead" not in recipe:
        lines.insert(0, "# Give --lookahead: the bundle's own lookahead.safetensors.\n")
    if "model" not in recipe:
        lines.insert(0, f"# Give --model: the bundle was made from {json.dumps(source)}.\n")
    return "".join(lines)
