from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from la_export.checkpoint import Checkpoint, find_model, load_checkpoint
from la_export.checkpoint.facts import count_operators, make_contract, make_model_facts
from la_runtime.errors import CheckpointError, UnsupportedModelError
from tests.tiny_models import make_tiny_config, make_tiny_model

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def _load(folder: Path, *, allow_bin: bool = False) -> Checkpoint:
    source = find_model(str(folder), revision=None, allow_bin=allow_bin)
    return load_checkpoint(source, context=None)


def _assert_reads_the_model(checkpoint: Checkpoint) -> None:
    state = checkpoint.load_model().state_dict()
    for name, tensor in state.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor.numpy())


@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_equals_the_loaded_models(
    make_checkpoint: Callable[..., Path], tied: bool
) -> None:
    checkpoint = _load(make_checkpoint("qwen3", tie_word_embeddings=tied))
    assert checkpoint.tied_embeddings is tied
    assert checkpoint.source_quantization == "none"
    _assert_reads_the_model(checkpoint)


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    model = make_tiny_model(make_tiny_config())
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    _assert_reads_the_model(_load(tmp_path))


def test_bfloat16_weights_are_widened_exactly(tmp_path: Path) -> None:
    model = make_tiny_model(make_tiny_config())
    model.bfloat16()
    model.save_pretrained(tmp_path)
    checkpoint = _load(tmp_path)
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor.float().numpy())
    _assert_reads_the_model(checkpoint)


def test_allowed_pickle_weights_equal_safetensors(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    expected = load_file(folder / "model.safetensors")
    torch.save(expected, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    checkpoint = _load(folder, allow_bin=True)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor.numpy())


class _Payload:
    """Would touch a file if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_pickle_with_code_is_refused_and_not_run(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_checkpoint()
    (folder / "model.safetensors").unlink()
    torch.save({"x": _Payload(tmp_path / "touched")}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin .* not executed"):
        _load(folder, allow_bin=True)
    assert not (tmp_path / "touched").exists()


def test_two_different_tables_are_not_tied(make_checkpoint: Callable[..., Path]) -> None:
    """Transformers unties such a checkpoint; so must we."""
    folder = make_checkpoint(tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors[HEAD] = tensors[EMBEDDING] + 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = _load(folder)
    assert not checkpoint.tied_embeddings
    assert not checkpoint.traced_config.tie_word_embeddings
    _assert_reads_the_model(checkpoint)


def test_missing_head_is_named(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    tensors = load_file(folder / "model.safetensors")
    del tensors[HEAD]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"no tensor {HEAD}"):
        _load(folder).read(HEAD)


def test_damaged_weights_are_refused(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        _load(folder)


def test_tensor_of_another_shape_is_refused_before_it_is_read(
    make_checkpoint: Callable[..., Path],
) -> None:
    folder = make_checkpoint()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(
        CheckpointError, match=r"gate_proj\.weight has shape \[96, 64\].*\[128, 64\]"
    ):
        _load(folder)


def test_one_truncated_shard_of_several_is_named(tmp_path: Path) -> None:
    make_tiny_model(make_tiny_config()).save_pretrained(tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=rf"{shard.name} cannot be read .*copy it again"):
        _load(tmp_path)


def test_tensor_that_no_shard_of_the_index_holds_is_named(tmp_path: Path) -> None:
    make_tiny_model(make_tiny_config()).save_pretrained(tmp_path, max_shard_size="50KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    lost = content["weight_map"].pop("model.norm.weight")
    content["weight_map"] = {
        name: shard for name, shard in content["weight_map"].items() if shard != lost
    }
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="the checkpoint has no tensor model"):
        _load(tmp_path)


def test_damaged_config_is_refused(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        _load(folder)


def test_unsupported_type_is_refused_before_its_weights_are_read(
    make_checkpoint: Callable[..., Path],
) -> None:
    folder = make_checkpoint()
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"llama"', '"mixtral"'))
    (folder / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(UnsupportedModelError, match="'mixtral' is not supported"):
        _load(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "abc"),
        ("num_attention_heads", 0),
        ("max_position_embeddings", None),
        ("bos_token_id", [1, 2]),
        ("eos_token_id", "2"),
        ("eos_token_id", [2, None]),
        ("rope_parameters", 5),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4}),
        ("hidden_act", "nope"),
        ("vocab_size", -1),
        ("num_hidden_layers", "2"),
        ("layer_types", 5),
        ("rms_norm_eps", []),
        ("dtype", "float99"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_impossible_value_in_the_config_is_one_clear_error(
    make_checkpoint: Callable[..., Path], family: str, field: str, value: object
) -> None:
    folder = make_checkpoint(family)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(CheckpointError) as raised:
        make_contract(_load(folder), k_max=2, prefill_chunk=512)
    assert "\n" not in str(raised.value)


def test_heads_that_do_not_divide_the_model_are_refused(
    make_checkpoint: Callable[..., Path],
) -> None:
    folder = make_checkpoint()
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_attention_heads": 5}))
    with pytest.raises(CheckpointError, match="not a multiple of the number of attention heads"):
        _load(folder)


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("extra", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.x"])
def test_tensor_that_the_model_does_not_read_is_refused(
    make_checkpoint: Callable[..., Path], extra: str
) -> None:
    folder = make_checkpoint()
    _rewrite(folder, lambda tensors: tensors.update({extra: torch.ones(64)}))
    with pytest.raises(CheckpointError, match=f"1 tensors .* first {extra}"):
        _load(folder)


def test_stored_rotary_frequencies_are_harmless(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _rewrite(folder, lambda tensors: tensors.update({name: torch.ones(8)}))
    _load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_numbers_that_need_scales_are_refused(
    make_checkpoint: Callable[..., Path], dtype: torch.dtype
) -> None:
    folder = make_checkpoint()
    name = "model.layers.0.mlp.up_proj.weight"
    _rewrite(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(UnsupportedModelError, match=f"{name} is stored as .* no quantization"):
        _load(folder)


def _to_bin(folder: Path, **options: bool) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin", **options)
    return tensors


def test_pickle_weights_from_before_zip_files_are_read(
    make_checkpoint: Callable[..., Path],
) -> None:
    folder = make_checkpoint()
    expected = _to_bin(folder, _use_new_zipfile_serialization=False)
    checkpoint = _load(folder, allow_bin=True)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor.numpy())
    _assert_reads_the_model(checkpoint)


def test_pickle_with_something_else_than_tensors_is_refused(
    make_checkpoint: Callable[..., Path],
) -> None:
    folder = make_checkpoint()
    tensors = _to_bin(folder)
    torch.save(tensors | {"model.norm.weight": 3}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds a int under 'model\.norm\.weight'"):
        _load(folder, allow_bin=True)


@pytest.mark.parametrize(("family", "norms"), [("llama", 5), ("qwen2", 5), ("qwen3", 9)])
def test_normalizations_are_counted_with_those_of_the_heads(
    make_checkpoint: Callable[..., Path], family: str, norms: int
) -> None:
    assert count_operators(_load(make_checkpoint(family))).norms == norms


def test_rotary_facts_leave_out_what_is_null(make_checkpoint: Callable[..., Path]) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "extra": None}
    checkpoint = _load(make_checkpoint(rope_parameters=rope))
    facts = make_model_facts(checkpoint, num_parameters=1, eos_token_ids=())
    assert facts.rope.parameters == {"factor": 2.0}


def test_rotary_fact_that_no_manifest_can_hold_is_refused(
    make_checkpoint: Callable[..., Path],
) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "extra": {"deep": 1}}
    checkpoint = _load(make_checkpoint(rope_parameters=rope))
    with pytest.raises(CheckpointError, match=r"its configuration is not valid .*extra"):
        make_model_facts(checkpoint, num_parameters=1, eos_token_ids=())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    ],
)
def test_rotary_frequencies_equal_their_formula(
    make_checkpoint: Callable[..., Path], rope: dict[str, float]
) -> None:
    checkpoint = _load(make_checkpoint(rope_parameters=rope))
    exponents = np.arange(0, 16, 2, dtype=np.float32) / 16
    expected = 1.0 / (rope["rope_theta"] ** exponents) / rope.get("factor", 1.0)
    found = checkpoint.read("model.rotary_emb.inv_freq")
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_source_digest_is_that_of_the_weight_file(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    expected = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert _load(folder).source_digest() == expected
