"""A readable checkpoint: configuration, tensors one at a time, and the PyTorch model."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from la_export.checkpoint.features import check_context, check_features, check_supported
from la_export.checkpoint.gguf_file import NO_QUANTIZATION, check_gguf, source_quantization
from la_export.checkpoint.sources import ModelSource, WeightFormat
from la_export.checkpoint.tensors import (
    BinTensors,
    LoadedTensors,
    SafetensorsTensors,
    StoredTensors,
    to_float32,
)
from la_runtime.errors import CheckpointError

__all__ = ["Checkpoint", "load_checkpoint"]

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
_HASH_CHUNK_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A supported model, ready to be read.

    Args:
        source: where its files are.
        config: its configuration.
        context: positions the bundle will serve.
        tensors: its stored tensors.
        source_quantization: lossy storage type, or `none`.
        tied_embeddings: whether the head reads the embedding table.
    """

    source: ModelSource
    config: PreTrainedConfig
    context: int
    tensors: StoredTensors
    source_quantization: str
    tied_embeddings: bool

    @property
    def traced_config(self) -> PreTrainedConfig:
        """The configuration to trace: float32, tied as the weights are, no inactive window."""
        config = copy.deepcopy(self.config)
        config.tie_word_embeddings = self.tied_embeddings
        config.sliding_window = None
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = ["full_attention"] * config.num_hidden_layers
        return config

    def read(self, parameter: str) -> NDArray[np.float32]:
        """One parameter or buffer of the model as float32; nothing is kept.

        Raises:
            CheckpointError: the checkpoint does not hold it.
        """
        if parameter.endswith(".inv_freq"):
            return _rotary_frequencies(self.config, parameter)
        return to_float32(_load(self.tensors, parameter, tied=self.tied_embeddings))

    def load_model(self) -> PreTrainedModel:
        """The whole model in PyTorch: float32, in eval mode, transformers' own attention."""
        if isinstance(self.tensors, LoadedTensors):
            return self.tensors.model
        return _load_torch_model(self.source)

    def source_digest(self) -> str:
        """SHA-256 over the bytes of the weight files in the order of their names."""
        digest = hashlib.sha256()
        for path in self.source.weight_files:
            with path.open("rb") as stream:
                while chunk := stream.read(_HASH_CHUNK_BYTES):
                    digest.update(chunk)
        return digest.hexdigest()


def load_checkpoint(source: ModelSource, *, context: int | None) -> Checkpoint:
    """Read a configuration, refuse what is not supported, and open the weights.

    Args:
        source: from `find_model`.
        context: positions to serve; the model's own limit when not given.

    Raises:
        UnsupportedModelError: the model has a feature that is not exported yet.
        UsageError: `context` is out of range.
        CheckpointError: a file is damaged, or a tensor is missing.
    """
    if source.weight_format is WeightFormat.GGUF:
        return _load_gguf(source, context)
    fields = _read_config_fields(source)
    check_features(str(fields.get("model_type")), fields)
    config = _load_config(source)
    served = check_context(config, context)
    check_supported(config, served)
    reader = BinTensors if source.weight_format is WeightFormat.BIN else SafetensorsTensors
    tensors = reader(source.weight_files)
    return Checkpoint(
        source=source,
        config=config,
        context=served,
        tensors=tensors,
        source_quantization=NO_QUANTIZATION,
        tied_embeddings=_is_tied(config, tensors),
    )


def _load_gguf(source: ModelSource, context: int | None) -> Checkpoint:
    quantization = source_quantization(check_gguf(source.weight_files[0]))
    config = _load_config(source)
    served = check_context(config, context)
    check_supported(config, served)
    return Checkpoint(
        source=source,
        config=config,
        context=served,
        tensors=LoadedTensors(_load_torch_model(source)),
        source_quantization=quantization,
        tied_embeddings=bool(config.tie_word_embeddings),
    )


def _load_torch_model(source: ModelSource) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        source.folder,
        gguf_file=source.gguf_name,
        dtype=torch.float32,
        attn_implementation="sdpa",
        trust_remote_code=False,
        local_files_only=True,
        use_safetensors=source.weight_format is not WeightFormat.BIN,
    )
    model.eval()
    return model


def _read_config_fields(source: ModelSource) -> dict[str, Any]:
    path = source.folder / "config.json"
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{source.origin}: config.json cannot be read ({error})") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{source.origin}: config.json is not a JSON object")
    return fields


def _load_config(source: ModelSource) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            source.folder,
            gguf_file=source.gguf_name,
            trust_remote_code=False,
            local_files_only=True,
        )
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(
            f"{source.origin}: its configuration cannot be read ({error})"
        ) from error
    return config


def _is_tied(config: PreTrainedConfig, tensors: StoredTensors) -> bool:
    """As transformers decides: tied when asked for, unless two different tables are stored."""
    if not config.tie_word_embeddings:
        return False
    if not {EMBEDDING, HEAD} <= tensors.names():
        return True
    return torch.equal(tensors.load(EMBEDDING), tensors.load(HEAD))


def _load(tensors: StoredTensors, parameter: str, *, tied: bool) -> torch.Tensor:
    names = tensors.names()
    shared = {EMBEDDING: HEAD, HEAD: EMBEDDING} if tied else {}
    for name in (parameter, shared.get(parameter)):
        if name is not None and name in names:
            return tensors.load(name)
    raise CheckpointError(
        f"the checkpoint has no tensor {parameter}; expected a complete causal language model"
    )


def _rotary_frequencies(config: PreTrainedConfig, parameter: str) -> NDArray[np.float32]:
    """The buffer that transformers computes and never stores."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rotary = model.get_submodule(parameter.removesuffix(".inv_freq"))
    buffer = type(rotary)(config=config).inv_freq
    return to_float32(buffer)
