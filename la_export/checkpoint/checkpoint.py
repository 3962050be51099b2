"""A readable checkpoint: configuration, tensors one at a time, and the PyTorch model."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from la_export.checkpoint.configuration import load_config, make_skeleton, read_config_fields
from la_export.checkpoint.features import (
    active_window,
    check_context,
    check_features,
    check_supported,
    rope_parameters,
)
from la_export.checkpoint.gguf_file import (
    NO_QUANTIZATION,
    check_gguf,
    check_gguf_tensors,
    source_quantization,
)
from la_export.checkpoint.lora import LoraAdapter, read_lora
from la_export.checkpoint.rotary import fix_rotary
from la_export.checkpoint.sources import ModelSource
from la_export.checkpoint.stored_names import StoredAs, find_stored
from la_export.checkpoint.tensors import (
    READABLE_DTYPES,
    BinTensors,
    LoadedTensors,
    SafetensorsTensors,
    StoredTensors,
    to_float32,
)
from la_export.checkpoint.weight_files import WeightFormat
from la_export.layer_kinds import FULL_ATTENTION
from la_runtime.errors import CheckpointError, UnsupportedModelError

__all__ = ["Checkpoint", "load_checkpoint"]

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
# Of float32 weights; larger models are streamed.
LARGEST_HELD_BYTES: Final = 4 << 30
# transformers has its attention as a chain of operators alone.
_WITHOUT_SDPA: Final = frozenset({"gemma2"})
_COMPUTED_BUFFERS: Final = ("inv_freq", ".embed_scale")
# Older folders store what every model computes for itself.
_RECOMPUTED_BUFFERS: Final = (
    ".rotary_emb.inv_freq",
    ".masked_bias",
    ".attn.bias",
    ".attention.bias",
)


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
        lora: adapter that is merged into its weights; None for none.
    """

    source: ModelSource
    config: PreTrainedConfig
    context: int
    tensors: StoredTensors
    source_quantization: str
    tied_embeddings: bool
    lora: LoraAdapter | None = None

    @property
    def window(self) -> int | None:
        """Positions that layers of sliding attention see; None where that is all of them."""
        return active_window(self.config, self.context)

    @property
    def traced_config(self) -> PreTrainedConfig:
        """The configuration to trace: float32, tied as the weights are, no inactive window."""
        config = copy.deepcopy(self.config)
        config.tie_word_embeddings = self.tied_embeddings
        if self.window is None and not _has_rotary_by_kind(config):
            config.sliding_window = None
            if getattr(config, "layer_types", None) is not None:
                config.layer_types = [FULL_ATTENTION] * config.num_hidden_layers
        return config

    def read(self, parameter: str) -> NDArray[np.float32]:
        """One parameter or buffer of the model as float32; nothing is kept.

        Raises:
            CheckpointError: the checkpoint does not hold it.
        """
        if parameter.endswith(_COMPUTED_BUFFERS):
            return _computed_buffer(self.config, parameter, self.context)
        held = to_float32(_load(self.tensors, parameter, self.config, tied=self.tied_embeddings))
        return held if self.lora is None else self.lora.merge(parameter, held)

    @property
    def embedding(self) -> str:
        """The parameter that holds the embedding table."""
        skeleton = make_skeleton(self.source.origin, self.config)
        table = skeleton.get_input_embeddings()
        return next(
            name
            for name, parameter in skeleton.named_parameters(remove_duplicate=False)
            if parameter is table.weight
        )

    def embeddings(self) -> NDArray[np.float32]:
        """[vocab_size, hidden] float32 for the first layer: some models scale the table."""
        skeleton = make_skeleton(self.source.origin, self.config)
        scale = getattr(skeleton.get_input_embeddings(), "scalar_embed_scale", 1.0)
        table = self.read(self.embedding)
        return table if scale == 1.0 else table * np.float32(scale)

    def load_model(self) -> PreTrainedModel:
        """The whole model in PyTorch: float32, in eval mode, transformers' own attention."""
        if isinstance(self.tensors, LoadedTensors):
            model = self.tensors.model
        else:
            model = _load_torch_model(self.source, self.config)
        if self.lora is not None:
            self.lora.merge_into(model)
        fix_rotary(model, self.config, self.context)
        return model

    @property
    def is_large(self) -> bool:
        """Whether its weights are read for each pass rather than held in float32.

        A GGUF file is read by transformers, which holds it whole.
        """
        if isinstance(self.tensors, LoadedTensors):
            return False
        skeleton = make_skeleton(self.source.origin, self.config)
        num_parameters = sum(parameter.numel() for parameter in skeleton.parameters())
        return num_parameters * np.dtype(np.float32).itemsize > LARGEST_HELD_BYTES

    def make_skeleton(self) -> PreTrainedModel:
        """The model without its weights, which lie on the meta device; its buffers are there."""
        config = copy.deepcopy(self.config)
        config.tie_word_embeddings = self.tied_embeddings
        skeleton = make_skeleton(self.source.origin, config)
        fix_rotary(skeleton, self.config, self.context)
        for name, _ in list(skeleton.named_buffers()):
            place, _, leaf = name.rpartition(".")
            value = torch.from_numpy(self.read(name).copy())
            skeleton.get_submodule(place)._buffers[leaf] = value
        skeleton.eval()
        return skeleton

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters of a model of this configuration, by name."""
        state = make_skeleton(self.source.origin, self.config).state_dict()
        return {name: tuple(parameter.shape) for name, parameter in state.items()}

    def source_digest(self) -> str:
        """See `ModelSource.digest`; with an adapter, SHA-256 of that and of the adapter's."""
        digest = self.source.digest()
        if self.lora is None:
            return digest
        return hashlib.sha256(f"{digest} {self.lora.digest}".encode()).hexdigest()


def load_checkpoint(
    source: ModelSource, *, context: int | None, lora: Path | None = None
) -> Checkpoint:
    """Read a configuration, refuse what is not supported, and open the weights.

    Args:
        source: from `find_model`.
        context: positions to serve; the model's own limit when not given.
        lora: folder of a PEFT adapter to merge.

    Raises:
        UnsupportedModelError: the model or the adapter has a feature that is not exported yet.
        UsageError: `context` is out of range.
        CheckpointError: a file is damaged, or a tensor is missing.
    """
    if source.weight_format is WeightFormat.GGUF:
        if lora is not None:
            raise UnsupportedModelError(
                "--lora is merged into safetensors alone; give --model such a folder, not a GGUF "
                "file"
            )
        return _load_gguf(source, context)
    fields = read_config_fields(source)
    check_features(str(fields.get("model_type")), fields)
    config = load_config(source)
    served = check_context(config, context)
    check_supported(config)
    reader = BinTensors if source.weight_format is WeightFormat.BIN else SafetensorsTensors
    tensors = reader(source.weight_files)
    is_tied = _is_tied(config, tensors)
    state = make_skeleton(source.origin, config).state_dict()
    shapes = {name: tuple(parameter.shape) for name, parameter in state.items()}
    check_tensors(tensors, shapes, config, tied=is_tied)
    checkpoint = Checkpoint(
        source=source,
        config=config,
        context=served,
        tensors=tensors,
        source_quantization=NO_QUANTIZATION,
        tied_embeddings=is_tied,
    )
    return checkpoint if lora is None else replace(checkpoint, lora=_read_lora(lora, checkpoint))


def _read_lora(folder: Path, checkpoint: Checkpoint) -> LoraAdapter:
    """Tables that are tied are one parameter, which no product of two matrices can change twice."""
    adapter = read_lora(folder, checkpoint.shapes())
    if checkpoint.tied_embeddings and (changed := {EMBEDDING, HEAD} & adapter.names.keys()):
        raise UnsupportedModelError(
            f"--lora {adapter.name} changes {min(changed)}, which is tied to another table; merge "
            "it with PEFT and build from that folder"
        )
    return adapter


def _load_gguf(source: ModelSource, context: int | None) -> Checkpoint:
    reader = check_gguf(source.weight_files[0])
    config = load_config(source)
    served = check_context(config, context)
    check_supported(config)
    check_gguf_tensors(reader, make_skeleton(source.origin, config).state_dict())
    return Checkpoint(
        source=source,
        config=config,
        context=served,
        tensors=LoadedTensors(_load_torch_model(source, config)),
        source_quantization=source_quantization(reader),
        tied_embeddings=bool(config.tie_word_embeddings),
    )


def _load_torch_model(source: ModelSource, config: PreTrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        source.folder,
        gguf_file=source.gguf_name,
        dtype=torch.float32,
        attn_implementation="eager" if config.model_type in _WITHOUT_SDPA else "sdpa",
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


def check_tensors(
    tensors: StoredTensors,
    shapes: Mapping[str, tuple[int, ...]],
    config: PreTrainedConfig,
    *,
    tied: bool,
) -> None:
    """The stored tensors must be those of the model: none missing, none left over.

    Args:
        tensors: of the checkpoint.
        shapes: of what the model of its configuration reads, by name.
        config: of the model.
        tied: whether embedding table and head are one.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or the model would not read it.
        UnsupportedModelError: a tensor is stored in numbers that need scales.
    """
    read: set[str] = set(shapes)
    for stored in sorted(
        name
        for parameter in shapes
        for name in _stored_as(tensors, parameter, config, tied=tied).names
    ):
        read.add(stored)
        if tensors.dtype(stored) not in READABLE_DTYPES:
            raise UnsupportedModelError(
                f"tensor {stored} is stored as {tensors.dtype(stored)}, and config.json has no "
                f"quantization_config that says what it means; supported are "
                f"{', '.join(sorted(READABLE_DTYPES))}"
            )
    for parameter, shape in shapes.items():
        stored_as = _stored_as(tensors, parameter, config, tied=tied)
        if len(stored_as.names) == 1 and tensors.shape(stored_as.names[0]) != shape:
            raise CheckpointError(
                f"tensor {stored_as.names[0]} has shape {list(tensors.shape(stored_as.names[0]))}, "
                f"the configuration expects {list(shape)}; config and weights do not belong "
                "together"
            )
    unread = sorted(
        name for name in tensors.names() - read if not name.endswith(_RECOMPUTED_BUFFERS)
    )
    if unread:
        raise CheckpointError(
            f"the checkpoint has {len(unread)} tensors that the model of its config.json does not "
            f"read, first {unread[0]}; config and weights do not belong together"
        )


def _load(
    tensors: StoredTensors, parameter: str, config: PreTrainedConfig, *, tied: bool
) -> torch.Tensor:
    stored = _stored_as(tensors, parameter, config, tied=tied)
    return stored.join([tensors.load(name) for name in stored.names])


def _stored_as(
    tensors: StoredTensors, parameter: str, config: PreTrainedConfig, *, tied: bool
) -> StoredAs:
    """As files have it, or under the model's own name, or the table's that it is tied to."""
    names = tensors.names()
    shared = {EMBEDDING: HEAD, HEAD: EMBEDDING} if tied else {}
    usual = find_stored(parameter, config)
    for name in (parameter, shared.get(parameter)):
        if name is not None and name in names:
            return StoredAs((name,), _only)
    missing = [name for name in usual.names if name not in names]
    if missing:
        raise CheckpointError(
            f"the checkpoint has no tensor {missing[0]}; expected a complete causal language model"
        )
    return usual


def _only(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    (tensor,) = tensors
    return tensor


def _has_rotary_by_kind(config: PreTrainedConfig) -> bool:
    """Whether layers with a window turn otherwise, so that their kind matters without one too."""
    return len(rope_parameters(config)) > 1


def _computed_buffer(config: PreTrainedConfig, parameter: str, context: int) -> NDArray[np.float32]:
    """A buffer that transformers computes and never stores."""
    place, _, name = parameter.rpartition(".")
    skeleton = make_skeleton("this model", config)
    module = skeleton.get_submodule(place)
    if not name.endswith("inv_freq"):
        return np.array(module.scalar_embed_scale, np.float32)
    made = type(module)(config=config)
    fix_rotary(made, config, context)
    return to_float32(made.get_buffer(name))
