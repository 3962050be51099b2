"""A readable checkpoint: configuration, tensors one at a time, and the PyTorch model."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from la_export.checkpoint.configuration import load_config, make_skeleton, read_config_fields
from la_export.checkpoint.features import check_context, check_features, check_supported
from la_export.checkpoint.gguf_file import (
    NO_QUANTIZATION,
    check_gguf,
    check_gguf_tensors,
    source_quantization,
)
from la_export.checkpoint.sources import ModelSource
from la_export.checkpoint.tensors import (
    READABLE_DTYPES,
    BinTensors,
    LoadedTensors,
    SafetensorsTensors,
    StoredTensors,
    to_float32,
)
from la_export.checkpoint.weight_files import WeightFormat
from la_runtime.errors import CheckpointError, UnsupportedModelError

__all__ = ["Checkpoint", "load_checkpoint"]

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
# Older folders store what every model computes for itself.
_RECOMPUTED_BUFFERS: Final = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


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

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters of a model of this configuration, by name."""
        state = make_skeleton(self.source.origin, self.config).state_dict()
        return {name: tuple(parameter.shape) for name, parameter in state.items()}

    def source_digest(self) -> str:
        """See `ModelSource.digest`."""
        return self.source.digest()


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
    fields = read_config_fields(source)
    check_features(str(fields.get("model_type")), fields)
    config = load_config(source)
    served = check_context(config, context)
    check_supported(config, served)
    reader = BinTensors if source.weight_format is WeightFormat.BIN else SafetensorsTensors
    tensors = reader(source.weight_files)
    is_tied = _is_tied(config, tensors)
    parameters = frozenset(make_skeleton(source.origin, config).state_dict())
    check_tensors(tensors, parameters, tied=is_tied)
    return Checkpoint(
        source=source,
        config=config,
        context=served,
        tensors=tensors,
        source_quantization=NO_QUANTIZATION,
        tied_embeddings=is_tied,
    )


def _load_gguf(source: ModelSource, context: int | None) -> Checkpoint:
    reader = check_gguf(source.weight_files[0])
    config = load_config(source)
    served = check_context(config, context)
    check_supported(config, served)
    check_gguf_tensors(reader, make_skeleton(source.origin, config).state_dict())
    return Checkpoint(
        source=source,
        config=config,
        context=served,
        tensors=LoadedTensors(_load_torch_model(source)),
        source_quantization=source_quantization(reader),
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


def _is_tied(config: PreTrainedConfig, tensors: StoredTensors) -> bool:
    """As transformers decides: tied when asked for, unless two different tables are stored."""
    if not config.tie_word_embeddings:
        return False
    if not {EMBEDDING, HEAD} <= tensors.names():
        return True
    return torch.equal(tensors.load(EMBEDDING), tensors.load(HEAD))


def check_tensors(tensors: StoredTensors, parameters: frozenset[str], *, tied: bool) -> None:
    """The stored tensors must be those of the model: none missing, none left over.

    Args:
        tensors: of the checkpoint.
        parameters: names that the model of its configuration reads.
        tied: whether embedding table and head are one.

    Raises:
        CheckpointError: a tensor is missing, or the model would not read it.
        UnsupportedModelError: a tensor is stored in numbers that need scales.
    """
    for parameter in sorted(parameters):
        stored = _stored_name(tensors, parameter, tied=tied)
        if tensors.dtype(stored) not in READABLE_DTYPES:
            raise UnsupportedModelError(
                f"tensor {stored} is stored as {tensors.dtype(stored)}, and config.json has no "
                f"quantization_config that says what it means; supported are "
                f"{', '.join(sorted(READABLE_DTYPES))}"
            )
    unread = sorted(
        name for name in tensors.names() - parameters if not name.endswith(_RECOMPUTED_BUFFERS)
    )
    if unread:
        raise CheckpointError(
            f"the checkpoint has {len(unread)} tensors that the model of its config.json does not "
            f"read, first {unread[0]}; config and weights do not belong together"
        )


def _load(tensors: StoredTensors, parameter: str, *, tied: bool) -> torch.Tensor:
    return tensors.load(_stored_name(tensors, parameter, tied=tied))


def _stored_name(tensors: StoredTensors, parameter: str, *, tied: bool) -> str:
    names = tensors.names()
    shared = {EMBEDDING: HEAD, HEAD: EMBEDDING} if tied else {}
    for name in (parameter, shared.get(parameter)):
        if name is not None and name in names:
            return name
    raise CheckpointError(
        f"the checkpoint has no tensor {parameter}; expected a complete causal language model"
    )


def _rotary_frequencies(config: PreTrainedConfig, parameter: str) -> NDArray[np.float32]:
    """The buffer that transformers computes and never stores."""
    rotary = make_skeleton("this model", config).get_submodule(parameter.removesuffix(".inv_freq"))
    return to_float32(type(rotary)(config=config).get_buffer("inv_freq"))
