"""Writes a checkpoint of a known shape with weights of no meaning, one shard in memory at a time.

    scripts/make_checkpoint --config llama-7b --out FOLDER

For speed and memory only: its text is noise. Numbers are drawn once and repeated, because nothing
that is timed depends on them and drawing seven billion takes minutes.
"""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from la_export.bench.gpu.shapes import SHAPES, DecoderShape

__all__ = ["write_configuration", "write_random_checkpoint"]

_SHARD_BYTES: Final = 2 * 10**9
# A prime number, so that no row of a matrix begins where another one does.
_POOL: Final = (1 << 22) - 3
_SPREAD: Final = 0.02
_WIDTH: Final = 2
_SPECIAL: Final = ("<unk>", "<s>", "</s>")
_END: Final = 2


def write_random_checkpoint(
    folder: Path, shape: DecoderShape, *, shard_bytes: int = _SHARD_BYTES, seed: int = 0
) -> Path:
    """Write configuration, float16 weights in shards, and a tokenizer of bytes.

    Args:
        folder: made when missing.
        shape: of the model.
        shard_bytes: most bytes of a shard; memory holds one.
        seed: of the numbers.

    Returns:
        `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pool = np.random.default_rng(seed).normal(0.0, _SPREAD, _POOL).astype(np.float16)
    shards = list(_split(_list_tensors(shape), shard_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: _draw(pool, name, size) for name, size in names.items()}
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file_name)
    total = sum(_WIDTH * math.prod(size) for names in shards for size in names.values())
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )
    write_configuration(folder, shape)
    _write_tokenizer(folder, shape)
    return folder


def write_configuration(folder: Path, shape: DecoderShape) -> Path:
    """Write the configuration alone, which is all that an estimate reads."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _config(shape))
    return folder


def _list_tensors(shape: DecoderShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and size of every tensor, as transformers' Llama has them."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries = shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
        if shape.has_biases:
            yield f"{prefix}.self_attn.q_proj.bias", (queries,)
            yield f"{prefix}.self_attn.k_proj.bias", (keys,)
            yield f"{prefix}.self_attn.v_proj.bias", (keys,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not shape.is_tied:
        yield "lm_head.weight", (shape.vocab_size, hidden)


def _split(
    tensors: Iterator[tuple[str, tuple[int, ...]]], shard_bytes: int
) -> Iterator[dict[str, tuple[int, ...]]]:
    """Shards of at most so many bytes, or of one tensor that is larger."""
    shard: dict[str, tuple[int, ...]] = {}
    held = 0
    for name, size in tensors:
        needed = _WIDTH * math.prod(size)
        if shard and held + needed > shard_bytes:
            yield shard
            shard, held = {}, 0
        shard[name] = size
        held += needed
    yield shard


def _draw(pool: NDArray[np.float16], name: str, size: tuple[int, ...]) -> NDArray[np.float16]:
    """Numbers from somewhere in the pool; norms are ones, so that activations keep their size."""
    if "norm" in name:
        return np.ones(size, np.float16)
    start = zlib.crc32(name.encode()) % _POOL
    return np.resize(np.roll(pool, -start), size)


def _config(shape: DecoderShape) -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM" if shape.has_biases else "LlamaForCausalLM"],
        "model_type": "qwen2" if shape.has_biases else "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.is_tied,
        "torch_dtype": "float16",
        "bos_token_id": 1,
        "eos_token_id": _END,
    }


def _write_tokenizer(folder: Path, shape: DecoderShape) -> None:
    """Bytes as tokens, and fillers up to the vocabulary's size that no text gives."""
    letters = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    fillers = [f"<filler_{index}>" for index in range(shape.vocab_size - len(letters))]
    vocabulary = {token: index for index, token in enumerate([*letters, *fillers])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=_SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "<unk>",
            "bos_token": "<s>",
            "eos_token": "</s>",
        },
    )


def _write_json(path: Path, record: dict[str, object]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


@click.command()
@click.option("--config", "name", required=True, type=click.Choice(sorted(SHAPES)))
@click.option("--out", "folder", required=True, type=click.Path(path_type=Path), metavar="DIR")
def _main(name: str, folder: Path) -> None:
    """Write a checkpoint of a known shape with weights of no meaning into a folder."""
    if folder.exists() and any(folder.iterdir()):
        raise click.BadParameter(f"{folder} holds something already", param_hint="--out")
    shape = SHAPES[name]
    needed, free = _WIDTH * (shape.num_read + shape.vocab_size * shape.hidden_size), _free(folder)
    if free < needed:
        raise click.ClickException(
            f"not enough disk space for {folder}: about {needed / 1e9:.1f} GB are needed, "
            f"{free / 1e9:.1f} GB are free"
        )
    write_random_checkpoint(folder, shape)
    size = sum(path.stat().st_size for path in folder.iterdir())
    click.echo(json.dumps({"folder": str(folder), "bytes": size}))


def _free(folder: Path) -> int:
    """Bytes on the disk where a folder is, or is to be."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(there).free


if __name__ == "__main__":
    _main()
