"""Reads a model's shape from its configuration. No weight is read, and none is downloaded."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig

from la_export.checkpoint.checkpoint import EMBEDDING, HEAD
from la_export.checkpoint.configuration import load_config, make_skeleton, read_config_fields
from la_export.checkpoint.features import check_context, check_features, check_supported
from la_export.checkpoint.gguf_file import check_gguf
from la_export.checkpoint.sources import ModelSource, WeightFormat, find_configuration
from la_export.estimate.shape import ModelShape
from la_export.layer_kinds import count_kv_heads
from la_export.quantize.calibration import is_turned
from la_export.quantize.rotation import largest_block

__all__ = ["make_shape", "read_shape"]


def read_shape(model: str, *, revision: str | None, context: int | None) -> ModelShape:
    """Find a model and read its sizes; whether the head is tied is as its configuration says.

    Args:
        model: folder, `.gguf` file, hub id or known name.
        revision: hub revision.
        context: positions to serve; the model's own limit when not given.

    Raises:
        LookaheadError: it cannot be found, or is not supported.
    """
    source = find_configuration(model, revision=revision)
    _check_declared(source)
    config = load_config(source)
    served = check_context(config, context)
    check_supported(config)
    return make_shape(config, name=source.name, context=served)


def make_shape(config: PreTrainedConfig, *, name: str, context: int) -> ModelShape:
    """The sizes of a model; whether the head is tied is as the configuration says.

    Args:
        config: a supported configuration.
        name: of the model.
        context: positions to serve.
    """
    skeleton = make_skeleton(name, config)
    parameters = dict(skeleton.named_parameters())
    if config.tie_word_embeddings and EMBEDDING in parameters:
        parameters.pop(HEAD, None)
    ends = (skeleton.get_input_embeddings().weight, skeleton.get_output_embeddings().weight)
    tables = [p for p in parameters.values() if any(p is end for end in ends)]
    linears = [
        module.weight
        for module in skeleton.modules()
        if isinstance(module, nn.Linear) and not any(module.weight is end for end in ends)
    ]
    heads = config.num_attention_heads
    return ModelShape(
        name=name,
        num_parameters=sum(parameter.numel() for parameter in parameters.values()),
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=count_kv_heads(config),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        context=context,
        num_linears=sum(weight.numel() for weight in linears),
        num_features=sum(len(weight) for weight in linears),
        num_table_rows=sum(len(table) for table in tables),
        turned_block=largest_block(config.intermediate_size) if is_turned(config) else 0,
    )


def _check_declared(source: ModelSource) -> None:
    """Refuse by the declared fields first: transformers may fail over those it does not know."""
    if source.weight_format is WeightFormat.GGUF:
        check_gguf(source.weight_files[0])
        return
    fields = read_config_fields(source)
    check_features(str(fields.get("model_type")), fields)
