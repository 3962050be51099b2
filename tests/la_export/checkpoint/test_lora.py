"""Merging a PEFT adapter: what PyTorch says with it beside the weights, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from la_export.checkpoint import find_model, load_checkpoint
from la_export.checkpoint.lora import read_lora
from la_export.options import BuildOptions
from la_export.pipeline import build
from la_export.reference import TorchReference
from la_export.verify.source_model import open_checkpoint
from la_runtime import Engine
from la_runtime.bundle import open_bundle
from la_runtime.errors import (
    CheckpointError,
    LookaheadError,
    NotRunError,
    UnsupportedModelError,
    UsageError,
)
from tests.tiny_models import make_tiny_checkpoint

RANK = 4
LAYERS = ("self_attn.q_proj", "mlp.down_proj")
TOKENS = [5, 17, 90, 33, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint")


def load(folder: Path, lora: Path | None = None):
    source = find_model(str(folder), revision=None, allow_bin=False)
    return load_checkpoint(source, context=None, lora=lora)


def write_adapter(path: Path, model: Path, *, drop: str = "", **fields: Any) -> Path:
    """As PEFT saves one of rank `RANK`, alpha 6."""
    path.mkdir(parents=True, exist_ok=True)
    shapes = load(model).shapes()
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for index in range(2):
        for layer in LAYERS:
            name = f"model.layers.{index}.{layer}"
            out_features, in_features = shapes[f"{name}.weight"]
            for part, shape in (("A", (RANK, in_features)), ("B", (out_features, RANK))):
                drawn = torch.randn(shape, generator=generator) * 0.2
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = drawn
    tensors = {name: t for name, t in tensors.items() if not drop or drop not in name}
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "bias": "none"} | fields
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def scores_with(model: Path, adapter: Path, scalings: dict[str, float]) -> np.ndarray:
    """Two matrices beside each weight: y = W x + scaling * B (A x)."""
    loaded = load(model).load_model()
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, scaling in scalings.items():
        first, second = (
            tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in ("A", "B")
        )
        loaded.get_submodule(name).register_forward_hook(
            lambda _, inputs, output, a=first, b=second, s=scaling: (
                output + s * (inputs[0] @ a.T) @ b.T
            )
        )
    return TorchReference(loaded).scores(TOKENS)


@pytest.mark.parametrize(
    ("fields", "scaling_of"),
    [
        ({}, lambda name: 6 / RANK),
        ({"use_rslora": True}, lambda name: 6 / RANK**0.5),
        ({"alpha_pattern": {"q_proj": 2}}, lambda name: (2 if "q_proj" in name else 6) / RANK),
        (
            {"alpha_pattern": {"model.layers.0.self_attn.q_proj": 2, "q_proj": 9}},
            lambda name: ((2 if ".0." in name else 9) if "q_proj" in name else 6) / RANK,
        ),
        ({"alpha_pattern": {"layers.1.*": 1}}, lambda name: (1 if ".1." in name else 6) / RANK),
    ],
)
def test_a_merged_model_says_what_both_say_together(
    fields: dict[str, Any], scaling_of: Any, folder: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "style", folder, **fields)
    names = [f"model.layers.{index}.{layer}" for index in range(2) for layer in LAYERS]

    merged = TorchReference(load(folder, adapter).load_model()).scores(TOKENS)

    expected = scores_with(folder, adapter, {name: scaling_of(name) for name in names})
    np.testing.assert_allclose(merged, expected, atol=2e-5 * float(np.ptp(expected)))
    plain = TorchReference(load(folder).load_model()).scores(TOKENS)
    assert np.abs(merged - plain).max() > 0.01 * np.ptp(plain)


def test_what_is_read_one_at_a_time_is_what_the_model_holds(folder: Path, tmp_path: Path) -> None:
    checkpoint = load(folder, write_adapter(tmp_path / "style", folder))
    for name, parameter in checkpoint.load_model().named_parameters():
        np.testing.assert_array_equal(checkpoint.read(name), parameter.detach().numpy(), name)


def test_a_bundle_with_an_adapter_merged_says_so_and_decodes_as_pytorch(
    folder: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "style", folder)
    options = BuildOptions(
        model=str(folder), lookahead_lengths=(2,), lora=adapter, out=tmp_path / "bundle"
    )

    bundle = open_bundle(build(options).bundle)

    model = bundle.manifest.model
    assert model.merged_adapter == "style"
    assert model.source_digest != load(folder).source_digest()
    assert bundle.manifest.recipe["lora"] == "style"
    expected = TorchReference(load(folder, adapter).load_model())
    with Engine.open(bundle.root, threads=1) as engine:
        found = engine.generate(TOKENS, k=2, max_new_tokens=12, ignore_eos=True)
    assert list(found.token_ids) == expected.generate_greedy(TOKENS, 12, ())

    again = open_checkpoint(bundle.manifest, str(folder), otherwise="stop", lora=adapter)
    assert again.source_digest() == model.source_digest
    with pytest.raises(NotRunError, match="has the adapter style merged; name its folder"):
        open_checkpoint(bundle.manifest, str(folder), otherwise="stop")
    other = write_adapter(tmp_path / "other", folder, lora_alpha=7)
    with pytest.raises(NotRunError, match="not the one the bundle was made from"):
        open_checkpoint(bundle.manifest, str(folder), otherwise="stop", lora=other)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"peft_type": "IA3"}, UnsupportedModelError, "of kind 'IA3'; only LORA"),
        ({"use_dora": True}, UnsupportedModelError, "has DoRA"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedModelError, "has whole modules"),
        ({"init_lora_weights": "pissa_niter_4"}, UnsupportedModelError, "'pissa_niter_4'"),
        ({"alpha_pattern": {"(a+)+": 1}}, CheckpointError, "alpha_pattern of --lora style"),
        ({"alpha_pattern": {"q_proj(": 1}}, CheckpointError, "alpha_pattern of --lora style"),
        ({"alpha_pattern": ["q_proj"]}, CheckpointError, "alpha_pattern of --lora style"),
        ({"lora_alpha": None}, CheckpointError, "lora_alpha of --lora style is None"),
        ({"bias": "all"}, UnsupportedModelError, "changes biases"),
        ({"fan_in_fan_out": True}, UnsupportedModelError, "transposed weights"),
        ({"drop": "layers.0.mlp.down_proj.lora_B"}, CheckpointError, "half of a pair"),
    ],
)
def test_other_adapters_are_refused(
    fields: dict[str, Any],
    error: type[LookaheadError],
    message: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    adapter = write_adapter(tmp_path / "style", folder, **fields)
    with pytest.raises(error, match=message):
        load(folder, adapter)


def test_an_adapter_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    wide = make_tiny_checkpoint(tmp_path / "wide", hidden_size=96, num_attention_heads=6)
    adapter = write_adapter(tmp_path / "style", wide)
    with pytest.raises(CheckpointError, match=r"has matrices of shapes .* another model"):
        load(folder, adapter)


def test_a_name_that_the_model_does_not_have_is_refused(folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "style", folder)
    with pytest.raises(CheckpointError, match="which this model does not have"):
        read_lora(adapter, {})


def test_folders_without_an_adapter_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no folder with an adapter_config\.json"):
        load(folder, tmp_path / "nothing")
    adapter = write_adapter(tmp_path / "style", folder)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin is a pickle"):
        load(folder, adapter)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        load(folder, adapter)
