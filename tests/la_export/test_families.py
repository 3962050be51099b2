"""Every family from a folder to tokens: built, opened, and what PyTorch generates.

Builds check logits, keys and values against PyTorch as well; here is what comes out at the end, at
any k, with windows that act and contexts that a text outgrows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from la_export.options import Precision
from la_export.pipeline import BuildOptions, build
from la_export.reference import TorchReference
from la_runtime import Engine
from la_runtime.bundle import open_bundle
from la_runtime.contract import CacheForm, Name
from la_runtime.layout import Layout
from tests.tiny_models import (
    FAMILIES,
    OTHER_FAMILIES,
    VOCAB_SIZE,
    make_tiny_checkpoint,
)

K = 4
WINDOW = 8
NUM_TOKENS = 24
PROMPT_LENGTHS = (1, WINDOW - 1, 3 * WINDOW)
ROPE = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0, 1.0, 1.5, 1.5, 2.0, 2.0, 3.0, 4.0],
    },
}


# Of these, a model's own tables and those of its longest text, in the default run.
USUAL = {("yarn", 256), ("longrope", 256), ("dynamic", 48)}


def prompts(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, length).tolist() for length in PROMPT_LENGTHS]


def build_and_read(
    folder: Path, family: str, *, context: int | None = None, **fields: Any
) -> tuple[Path, TorchReference]:
    """A bundle, and the same model in PyTorch with the tables that the bundle has."""
    checkpoint = make_tiny_checkpoint(folder / "checkpoint", family, **fields)
    options = BuildOptions(
        model=str(checkpoint), lookahead_lengths=(K,), out=folder / "bundle", context=context
    )
    bundle = build(options).bundle
    return bundle, TorchReference.load(str(checkpoint), context=context)


def check_tokens(bundle: Path, reference: TorchReference) -> None:
    """At every k, in every layout, planned and in a batch: what transformers generates."""
    with Engine.open(bundle, threads=1) as engine:
        for prompt in prompts():
            expected = reference.generate_greedy(prompt, NUM_TOKENS, ())
            for ways in (
                {"k": 0},
                {"k": K, "layout": Layout.FULL},
                {"k": 2, "layout": Layout.ROOT_ONLY},
                {},
            ):
                found = engine.generate(prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True, **ways)
                assert list(found.token_ids) == expected, ways
        together = engine.generate(prompts(), max_new_tokens=NUM_TOKENS, ignore_eos=True)
        for prompt, found in zip(prompts(), together, strict=True):
            assert list(found.token_ids) == reference.generate_greedy(prompt, NUM_TOKENS, ())


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_a_family_generates_what_pytorch_does(family: str, tmp_path: Path) -> None:
    check_tokens(*build_and_read(tmp_path, family))


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mistral", {"sliding_window": WINDOW}),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        ),
        ("phi3", {"sliding_window": WINDOW}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": WINDOW}),
    ],
)
def test_windows_are_those_of_pytorch(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    bundle, reference = build_and_read(tmp_path, family, **fields)

    assert open_bundle(bundle).manifest.contract.window == WINDOW
    check_tokens(bundle, reference)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_cache_of_fixed_places_has_windows_too(family: str, tmp_path: Path) -> None:
    checkpoint = make_tiny_checkpoint(tmp_path / "checkpoint", family, sliding_window=WINDOW)
    options = BuildOptions(
        model=str(checkpoint),
        lookahead_lengths=(K,),
        out=tmp_path / "bundle",
        cache_form=CacheForm.SCATTER,
        prefill_chunk=16,
    )
    check_tokens(build(options).bundle, TorchReference.load(str(checkpoint)))


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f == "olmo2" else pytest.mark.slow) for f in OTHER_FAMILIES],
)
def test_a_family_is_built_in_half_precision(family: str, tmp_path: Path) -> None:
    """OLMo 2's rotations are traced to another pattern there."""
    checkpoint = make_tiny_checkpoint(tmp_path / "model", family)
    options = BuildOptions(
        model=str(checkpoint),
        lookahead_lengths=(2,),
        precision=Precision.FP16,
        out=tmp_path / "bundle",
    )

    assert {check.name for check in build(options).manifest.checks} >= {"contract", "logits"}


@pytest.mark.parametrize(
    "precision", [Precision.FP16, pytest.param(Precision.BF16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma3_text", {}),
        ("granite", {"residual_multiplier": 0.22, "embedding_multiplier": 11.3}),
        ("cohere", {"logit_scale": 0.8333}),
    ],
)
def test_factors_of_a_model_s_code_are_rounded_as_its_weights_are(
    family: str, fields: dict[str, Any], precision: Precision, tmp_path: Path
) -> None:
    """The root of 96, by which Gemma scales its table, is no number of 16 bits."""
    folder = make_tiny_checkpoint(tmp_path / "model", family, hidden_size=96, **fields)

    report = build(
        BuildOptions(
            model=str(folder), lookahead_lengths=(2,), precision=precision, out=tmp_path / "bundle"
        )
    )

    checks = {check.name: check for check in report.manifest.checks}
    assert checks["float32_twin.logits"].value <= checks["float32_twin.logits"].bound


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    bundle, reference = build_and_read(tmp_path, "mistral", sliding_window=64, context=64)

    contract = open_bundle(bundle).manifest.contract
    assert contract.window is None
    assert Name.SLIDING_ATTENTION_MASK not in [spec.name for spec in contract.inputs]
    check_tokens(bundle, reference)


@pytest.mark.parametrize(
    ("kind", "context"),
    [
        pytest.param(kind, context, marks=() if (kind, context) in USUAL else pytest.mark.slow)
        for kind in ROPE
        for context in (48, 256)
    ],
)
def test_rotary_tables_are_those_of_the_context(kind: str, context: int, tmp_path: Path) -> None:
    """Where the table depends on the length, PyTorch is given that of the whole context."""
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **ROPE[kind]}
    bundle, reference = build_and_read(tmp_path, "llama", context=context, rope_parameters=rope)

    assert open_bundle(bundle).manifest.model.rope.kind == kind
    check_tokens(bundle, reference)


def test_scaled_tables_are_rounded_in_half_precision(tmp_path: Path) -> None:
    """The build counts its rotations, and compares its float32 twin with PyTorch."""
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, **ROPE["yarn"]}
    checkpoint = make_tiny_checkpoint(tmp_path / "model", rope_parameters=rope)
    options = BuildOptions(
        model=str(checkpoint),
        lookahead_lengths=(2,),
        precision=Precision.FP16,
        out=tmp_path / "bundle",
    )

    checks = {check.name: check for check in build(options).manifest.checks}
    assert checks["float32_twin.logits"].value <= checks["float32_twin.logits"].bound


def test_dynamic_tables_reach_beyond_the_length_a_model_was_made_for(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    bundle, reference = build_and_read(
        tmp_path, "llama", context=128, rope_parameters=rope, max_position_embeddings=64
    )
    prompt = prompts()[2] * 4

    with Engine.open(bundle, threads=1) as engine:
        found = engine.generate(prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True, k=K)

    assert len(prompt) > 64
    assert list(found.token_ids) == reference.generate_greedy(prompt, NUM_TOKENS, ())


def test_every_supported_family_has_a_tiny_model() -> None:
    from la_export.checkpoint.features import SUPPORTED_FAMILIES

    assert set(SUPPORTED_FAMILIES) == {*FAMILIES, *OTHER_FAMILIES}
