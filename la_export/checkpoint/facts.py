"""States what a checkpoint is: the manifest's model facts and the graph's contract."""

from __future__ import annotations

import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from la_export.checkpoint.checkpoint import Checkpoint
from la_runtime.bundle import ModelFacts, RopeFacts
from la_runtime.contract import Contract

__all__ = ["TOP_C", "count_parameters", "make_contract", "make_model_facts"]

TOP_C = 8


def make_contract(checkpoint: Checkpoint, k_max: int) -> Contract:
    """The contract of a graph for this model.

    Args:
        checkpoint: the model.
        k_max: number of lookahead vectors.
    """
    config = checkpoint.config
    heads = config.num_attention_heads
    return Contract(
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        k_max=k_max,
        top_c=min(TOP_C, config.vocab_size),
    )


def make_model_facts(
    checkpoint: Checkpoint,
    *,
    num_parameters: int,
    source_digest: str,
    eos_token_ids: tuple[int, ...],
) -> ModelFacts:
    """The manifest's facts about the source model."""
    config, source = checkpoint.config, checkpoint.source
    return ModelFacts(
        name=source.name,
        family=config.model_type,
        source=source.origin,
        revision=source.revision,
        source_quantization=checkpoint.source_quantization,
        source_digest=source_digest,
        num_parameters=num_parameters,
        num_attention_heads=config.num_attention_heads,
        context=checkpoint.context,
        rope=_make_rope_facts(checkpoint),
        sliding_window=None,
        tied_embeddings=checkpoint.tied_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_ids=eos_token_ids,
    )


def count_parameters(checkpoint: Checkpoint) -> int:
    """Parameters of the model, shared ones counted once; no weight is read."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(checkpoint.traced_config)
    return sum(parameter.numel() for parameter in model.parameters())


def _make_rope_facts(checkpoint: Checkpoint) -> RopeFacts:
    fields = dict(checkpoint.config.rope_parameters)
    return RopeFacts(
        kind=fields.pop("rope_type", "default"),
        theta=fields.pop("rope_theta"),
        parameters=fields,
    )
