"""The weights each peer runs: the source in float32, converted once and kept in a cache folder.

All of them come from the very numbers that our own bundles were built from.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from safetensors.torch import save_file

from la_export.bench.peers.environments import Environment, run_logged
from la_export.bench.peers.programs import PeerWeights
from la_export.bench.peers.race import Report
from la_export.checkpoint import Checkpoint, ModelSource
from la_export.checkpoint.tokenizer_files import read_tokenizer
from la_runtime.errors import NotRunError

__all__ = ["ensure_source", "ensure_weights", "write_source"]

_FOLDER: Final = "models"
_DIGITS: Final = 16
_HEAD: Final = "lm_head.weight"


def models_folder(cache: Path, source: ModelSource) -> Path:
    """Where everything made of one source is."""
    return cache / _FOLDER / source.digest()[:_DIGITS]


def ensure_source(
    source: ModelSource,
    cache: Path,
    load: Callable[[ModelSource], Checkpoint],
    report: Report,
) -> Path:
    """The model as transformers reads it, in float32.

    Args:
        source: the model.
        cache: where peers are kept.
        load: reads its checkpoint; called only if the folder is not there yet.
        report: told in a line what takes long.
    """
    folder = models_folder(cache, source) / "float32"
    if not folder.is_dir():
        report("writing the model in float32 (once)")
        with _made_aside(folder) as partial:
            write_source(load(source), partial)
    return folder


def write_source(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a checkpoint's weights, configuration and tokenizer, without what quantized them."""
    model = checkpoint.load_model()
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (name == _HEAD and checkpoint.tied_embeddings)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        **checkpoint.config.to_dict(),
        "architectures": [type(model).__name__],
        "dtype": "float32",
    }
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    read_tokenizer(checkpoint).write(folder)


def ensure_weights(
    weights: PeerWeights,
    environment: Environment,
    *,
    source: ModelSource,
    float32: Path,
    cache: Path,
    report: Report,
) -> Path:
    """A peer's weights, made by its own converter unless they are there.

    Args:
        weights: what is wanted.
        environment: that the converter runs in.
        source: the model.
        float32: its folder from `ensure_source`.
        cache: where peers are kept.
        report: told in a line what takes long.

    Returns:
        What the driver opens.

    Raises:
        NotRunError: the converter wants a GGUF file, and the source is none.
        HostError: the converter failed.
    """
    if not weights.command:
        return float32
    if weights.needs_gguf and source.gguf_name is None:
        raise NotRunError(
            f"{environment.name} wants a source that is a GGUF file, got {source.origin}; "
            "leave it out of --peers"
        )
    digest = _digest_conversion(weights, environment)[:_DIGITS]
    name = f"{environment.name}-{weights.precision}"
    folder = models_folder(cache, source) / f"{name}-{digest}"
    if not folder.is_dir():
        report(f"making {weights.precision} weights for {environment.name} (once)")
        with _made_aside(folder) as partial, tempfile.TemporaryDirectory() as scratch:
            places = {
                "bin": environment.folder(cache) / "bin",
                "source": float32,
                "gguf": source.weight_files[0],
                "scratch": scratch,
                "out": partial,
            }
            command = [word.format_map(places) for word in weights.command]
            run_logged(command, cache / "logs" / f"convert-{name}.log")
    return folder / weights.file


def _digest_conversion(weights: PeerWeights, environment: Environment) -> str:
    """Of what decides the result: the environment, the command, and the script that it runs."""
    scripts = [
        Path(word).read_text(encoding="utf-8") if word.endswith(".py") else word
        for word in weights.command
    ]
    facts = [environment.digest, scripts]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


@contextmanager
def _made_aside(folder: Path) -> Iterator[Path]:
    """A new folder that gets its name only when the block has ended well."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
