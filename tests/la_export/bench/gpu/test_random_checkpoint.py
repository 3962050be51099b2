from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from la_export.bench.gpu.random_checkpoint import (
    _list_tensors,
    _main,
    write_random_checkpoint,
)
from la_export.bench.gpu.shapes import DEEPSEEK_7B, LLAMA_7B, QWEN25_7B, SMOLLM2_135M
from la_export.checkpoint import find_model, load_checkpoint
from la_export.checkpoint.tokenizer_files import read_tokenizer

TINY = replace(
    SMOLLM2_135M,
    name="tiny",
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=64,
    intermediate_size=96,
    vocab_size=512,
    is_tied=False,
    context=128,
)


def test_it_is_a_checkpoint_that_transformers_and_a_build_read(tmp_path) -> None:
    folder = write_random_checkpoint(tmp_path / "tiny", TINY, shard_bytes=60_000)

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3, "several shards"
    source = find_model(str(folder), revision=None, allow_bin=False)
    checkpoint = load_checkpoint(source, context=None)
    assert checkpoint.context == 128
    assert not checkpoint.tied_embeddings
    assert read_tokenizer(checkpoint).vocab_size == TINY.vocab_size
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("Why? é")) == "Why? é"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7]])).logits
    assert torch.isfinite(logits).all()
    assert float(logits.std()) > 0


def test_qwens_have_biases(tmp_path) -> None:
    folder = write_random_checkpoint(tmp_path / "tiny", replace(TINY, has_biases=True))

    source = find_model(str(folder), revision=None, allow_bin=False)
    checkpoint = load_checkpoint(source, context=None)
    assert checkpoint.config.model_type == "qwen2"
    assert np.ptp(checkpoint.read("model.layers.1.self_attn.k_proj.bias")) > 0


@pytest.mark.parametrize(
    ("shape", "billions"), [(LLAMA_7B, 6.74), (QWEN25_7B, 7.62), (DEEPSEEK_7B, 6.91)]
)
def test_shapes_have_as_many_parameters_as_their_models(shape, billions) -> None:
    total = sum(math.prod(size) for _, size in _list_tensors(shape))
    assert total / 1e9 == pytest.approx(billions, abs=0.01)


def test_the_program_refuses_a_folder_that_holds_something(tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    done = CliRunner().invoke(_main, ["--config", "llama-7b", "--out", str(tmp_path)])

    assert done.exit_code == 2
    assert "holds something already" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_no_two_rows_of_a_matrix_as_wide_as_a_7bs_are_the_same(tmp_path) -> None:
    wide = replace(TINY, hidden_size=4096, vocab_size=2100, num_layers=1, intermediate_size=8)
    wide = replace(wide, num_heads=1, num_kv_heads=1)

    folder = write_random_checkpoint(tmp_path / "wide", wide)

    (file,) = folder.glob("*.safetensors")
    head = load_file(file)["lm_head.weight"]
    assert head.shape == (2100, 4096)
    assert len({row.tobytes() for row in head}) == 2100


def test_no_shard_is_larger_than_asked_but_for_a_single_tensor(tmp_path) -> None:
    folder = write_random_checkpoint(tmp_path / "tiny", TINY, shard_bytes=60_000)

    sizes = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    table = 2 * TINY.vocab_size * TINY.hidden_size
    header = 4096
    assert all(size <= max(60_000, table) + header for size in sizes.values())


def test_the_same_seed_writes_the_same_bytes(tmp_path) -> None:
    one, other = (write_random_checkpoint(tmp_path / name, TINY) for name in ("one", "other"))

    (first,), (second,) = (list(folder.glob("*.safetensors")) for folder in (one, other))
    assert first.read_bytes() == second.read_bytes()
