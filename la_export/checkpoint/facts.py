"""States what a checkpoint is: the manifest's model facts and the graph's contract."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from pydantic import ValidationError

from la_export.checkpoint.checkpoint import Checkpoint
from la_export.checkpoint.configuration import make_skeleton
from la_export.checkpoint.features import rope_parameters
from la_export.layer_kinds import FULL_ATTENTION, count_kv_heads, layer_kinds
from la_runtime.bundle import ModelFacts, RopeFacts
from la_runtime.contract import CacheForm, Contract, Dtype
from la_runtime.errors import CheckpointError, UnsupportedModelError

__all__ = [
    "TOP_C",
    "OperatorCounts",
    "build_disk_bytes",
    "check_input_features",
    "check_no_experts",
    "count_operators",
    "count_parameters",
    "make_contract",
    "make_model_facts",
    "scatter_capacity",
]

TOP_C: Final = 8
_CAPACITY_STEP: Final = 8
_NORMS: Final = ("RMSNorm", "CohereLayerNorm")
_INTERLEAVED_ROTARY: Final = ("cohere",)
# Graph, tokenizer and reports beside the weights.
_OTHER_BYTES: Final = 32 << 20


def scatter_capacity(context: int, *, prefill_chunk: int, k_max: int) -> int:
    """Cache places per sequence in cache form `scatter`.

    Behind the context lies room for the widest pass, all of whose rows are written: a chunk of a
    prompt with the first group behind it, or a step of the full layout. It is a multiple of 8, so
    that a sequence ends at one of the 256 bytes to which GPUs want memory aligned.

    Args:
        context: positions to serve.
        prefill_chunk: most prompt tokens of a pass.
        k_max: largest lookahead length.
    """
    places = context + max(min(prefill_chunk, context) + k_max, (k_max + 1) ** 2)
    return math.ceil(places / _CAPACITY_STEP) * _CAPACITY_STEP


def build_disk_bytes(weights: int, *, num_plans: int) -> int:
    """Bytes on the disk while a bundle is built: its weights, and what plans take beside.

    Args:
        weights: bytes that they are stored in.
        num_plans: plans that hold the weights once more.
    """
    return weights * (1 + num_plans) + _OTHER_BYTES


def make_contract(
    checkpoint: Checkpoint,
    k_max: int,
    *,
    dtype: Dtype = Dtype.FLOAT32,
    cache_form: CacheForm = CacheForm.CONCAT,
    prefill_chunk: int,
) -> Contract:
    """The contract of a graph for this model.

    Args:
        checkpoint: the model.
        k_max: number of lookahead vectors.
        dtype: of weights, activations and cache.
        cache_form: how K/V reach the cache.
        prefill_chunk: see `scatter_capacity`.

    Raises:
        CheckpointError: the configuration's sizes make no model.
    """
    config = checkpoint.config
    heads = config.num_attention_heads
    capacity = scatter_capacity(checkpoint.context, prefill_chunk=prefill_chunk, k_max=k_max)
    try:
        return Contract(
            cache_form=cache_form,
            num_layers=config.num_hidden_layers,
            num_kv_heads=count_kv_heads(config),
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            k_max=k_max,
            top_c=min(TOP_C, config.vocab_size),
            compute_dtype=dtype,
            kv_dtype=dtype,
            window=checkpoint.window,
            capacity=capacity if cache_form is CacheForm.SCATTER else None,
        )
    except (ValueError, TypeError) as error:
        raise _make_error(checkpoint, error) from error


def make_model_facts(
    checkpoint: Checkpoint, *, num_parameters: int, eos_token_ids: tuple[int, ...]
) -> ModelFacts:
    """The manifest's facts about the source model; reads every byte of its weights.

    Raises:
        CheckpointError: the configuration holds a value that a manifest cannot.
    """
    config, source = checkpoint.config, checkpoint.source
    try:
        facts = ModelFacts(
            name=source.name,
            family=config.model_type,
            source=source.origin,
            revision=source.revision,
            source_quantization=checkpoint.source_quantization,
            source_digest="",
            num_parameters=num_parameters,
            num_attention_heads=config.num_attention_heads,
            context=checkpoint.context,
            rope=_make_rope_facts(checkpoint),
            sliding_window=checkpoint.window,
            merged_adapter=None if checkpoint.lora is None else checkpoint.lora.name,
            tied_embeddings=checkpoint.tied_embeddings,
            bos_token_id=config.bos_token_id,
            eos_token_ids=eos_token_ids,
        )
    except (ValueError, TypeError, KeyError) as error:
        raise _make_error(checkpoint, error) from error
    return facts.model_copy(update={"source_digest": checkpoint.source_digest()})


def count_parameters(checkpoint: Checkpoint) -> int:
    """Parameters of the model, shared ones counted once; no weight is read."""
    return sum(
        parameter.numel()
        for parameter in make_skeleton(
            checkpoint.source.origin, checkpoint.traced_config
        ).parameters()
    )


def check_no_experts(checkpoint: Checkpoint, *, precision: str) -> None:
    """The model may not be a mixture of experts.

    Args:
        checkpoint: the model.
        precision: that has no product of experts, for the message.

    Raises:
        UnsupportedModelError: it is one.
    """
    if getattr(checkpoint.config, "num_experts", None):
        raise UnsupportedModelError(
            f"model type {checkpoint.config.model_type!r} is a mixture of experts, whose products "
            f"--precision {precision} does not have; build with --precision fp32, fp16 or bf16"
        )


def check_input_features(checkpoint: Checkpoint, *, block_size: int, precision: str) -> None:
    """Every linear layer must divide its input features into whole blocks; no weight is read.

    Args:
        checkpoint: the model.
        block_size: input features that share a scale.
        precision: that has such blocks, for the message.

    Raises:
        UnsupportedModelError: a layer does not.
    """
    skeleton = make_skeleton(checkpoint.source.origin, checkpoint.traced_config)
    for name, layer in skeleton.named_modules():
        if isinstance(layer, torch.nn.Linear) and layer.in_features % block_size:
            raise UnsupportedModelError(
                f"{name} has {layer.in_features} input features; --precision {precision} needs a "
                f"multiple of {block_size}: build with another --precision"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCounts:
    """How often operators must be in the graph of a model.

    Args:
        attentions: of the standard operator; softcapped scores are computed in the open.
        rotations: of the standard operator, for queries and for keys; rotations of neighbouring
            channels are computed in the open.
        tables: of rotary angles.
        norms: root mean square normalizations: those of layers, the last, those of heads. Cohere's
            subtract the mean before.
    """

    attentions: int
    rotations: int
    tables: int
    norms: int


def count_operators(checkpoint: Checkpoint) -> OperatorCounts:
    """Counted in the model's own modules; no weight is read."""
    config = checkpoint.traced_config
    skeleton = make_skeleton(checkpoint.source.origin, config)
    num_layers = int(config.num_hidden_layers)
    is_capped = config.model_type == "gemma2" and config.attn_logit_softcapping is not None
    turned = getattr(config, "no_rope_layers", None) or [1] * num_layers
    return OperatorCounts(
        attentions=0 if is_capped else num_layers,
        rotations=0 if config.model_type in _INTERLEAVED_ROTARY else 2 * sum(map(bool, turned)),
        tables=max(1, len(rope_parameters(config).keys() & layer_kinds(config))),
        norms=sum(type(module).__name__.endswith(_NORMS) for module in skeleton.modules()),
    )


def _make_rope_facts(checkpoint: Checkpoint) -> RopeFacts:
    """Keys that are null are not set; those of layers with a window have their kind in front."""
    by_kind = {
        kind: {key: value for key, value in parameters.items() if value is not None}
        for kind, parameters in rope_parameters(checkpoint.config).items()
    }
    fields = by_kind.pop(FULL_ATTENTION)
    others = {f"{kind}.{key}": v for kind, values in by_kind.items() for key, v in values.items()}
    return RopeFacts(
        kind=fields.pop("rope_type", "default"),
        theta=fields.pop("rope_theta"),
        parameters=fields | others,
    )


def _make_error(checkpoint: Checkpoint, error: Exception) -> CheckpointError:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        reason = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    else:
        reason = str(error)
    return CheckpointError(f"{checkpoint.source.origin}: its configuration is not valid ({reason})")
