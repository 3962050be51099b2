"""What can be exported, and the name of whatever cannot.

Decides from a configuration alone, before any weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from transformers import PreTrainedConfig

from la_export.layer_kinds import FULL_ATTENTION, SLIDING_ATTENTION, layer_kinds
from la_runtime.errors import UnsupportedModelError, UsageError

__all__ = [
    "LENGTH_DEPENDENT_ROPE_KINDS",
    "SUPPORTED_FAMILIES",
    "SUPPORTED_ROPE_KINDS",
    "active_window",
    "check_context",
    "check_features",
    "check_supported",
    "rope_parameters",
]

SUPPORTED_FAMILIES: Final = (
    "cohere",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "stablelm",
)
# transformers computes their frequencies from the length of the text.
LENGTH_DEPENDENT_ROPE_KINDS: Final = frozenset({"dynamic", "longrope"})
SUPPORTED_ROPE_KINDS: Final = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
# Softcapping goes by many names; each changes the scores. These families' own code does it.
_SOFTCAP: Final = re.compile("soft_?cap", re.IGNORECASE)
_SOFTCAPPED: Final = ("gemma2", "gemma3_text")
_MOST_STRETCHED: Final = 1_000_000
_MIXTURES: Final = ("qwen3_moe",)
# Configuration fields that announce a feature when they are set to something.
_MIXTURE: Final = "a mixture of experts"
_FEATURE_FIELDS: Final[Mapping[str, str]] = {
    "num_local_experts": _MIXTURE,
    "num_experts": _MIXTURE,
    "n_routed_experts": _MIXTURE,
    "moe_intermediate_size": _MIXTURE,
    "kv_lora_rank": "latent attention (MLA)",
    "alibi": "ALiBi position biases",
    "is_encoder_decoder": "an encoder",
    "use_bidirectional_attention": "attention to later tokens",
    "vision_config": "a vision tower",
    "audio_config": "an audio tower",
    "quantization_config": "quantized weights",
}


def check_supported(config: PreTrainedConfig) -> None:
    """Refuse a configuration that export would get wrong.

    Raises:
        UnsupportedModelError: names the feature, the model type and what is supported.
    """
    check_features(config.model_type, config.to_dict())
    by_layer = rope_parameters(config)
    for parameters in by_layer.values():
        rope_kind = parameters.get("rope_type", "default")
        if rope_kind not in SUPPORTED_ROPE_KINDS:
            raise _refusal(config.model_type, f"rotary embedding of kind {rope_kind!r}")
        if rope_kind in LENGTH_DEPENDENT_ROPE_KINDS and len(by_layer) > 1:
            raise _refusal(
                config.model_type, f"rotary embedding of kind {rope_kind!r} in some layers alone"
            )
    _check_layer_types(config)


def rope_parameters(config: PreTrainedConfig) -> dict[str, Mapping[str, Any]]:
    """Rotary embeddings by the kind of layer that has them; by ``full_attention`` if all share one.

    Args:
        config: its `rope_parameters` are an object, or one for each kind of layer.
    """
    found = config.rope_parameters or {}
    kinds = (FULL_ATTENTION, SLIDING_ATTENTION)
    nested = {kind: found[kind] for kind in kinds if isinstance(found.get(kind), Mapping)}
    return nested or {FULL_ATTENTION: found}


def check_features(model_type: str, fields: Mapping[str, Any]) -> None:
    """Refuse by model type and by fields of a raw configuration.

    Raises:
        UnsupportedModelError: names the feature, the model type and what is supported.
    """
    for field, feature in _FEATURE_FIELDS.items():
        value = fields.get(field)
        if value is None or value is False or value == 0:
            continue
        if feature == _MIXTURE and model_type in _MIXTURES:
            continue
        if field == "quantization_config" and isinstance(value, Mapping):
            feature = f"weights quantized with {value.get('quant_method', 'an unknown method')}"
        raise _refusal(model_type, feature)
    for field, value in fields.items():
        is_set = value is not None and value is not False and value != 0
        if _SOFTCAP.search(field) and is_set and model_type not in _SOFTCAPPED:
            raise _refusal(model_type, f"softcapped scores ({field})")
    if model_type not in SUPPORTED_FAMILIES:
        needs_code = ", which needs code from its repository" if "auto_map" in fields else ""
        raise UnsupportedModelError(
            f"model type {model_type!r}{needs_code} is not supported; "
            f"supported are {', '.join(SUPPORTED_FAMILIES)}"
        )


def _check_layer_types(config: PreTrainedConfig) -> None:
    kinds = layer_kinds(config)
    other = sorted(kinds - {FULL_ATTENTION, SLIDING_ATTENTION})
    if other:
        raise _refusal(config.model_type, f"layers of type {other[0]}")
    if SLIDING_ATTENTION in kinds and getattr(config, "sliding_window", None) is None:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} has layers of type {SLIDING_ATTENTION} without a "
            "sliding_window; correct its config.json"
        )


def _refusal(model_type: str, feature: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"model type {model_type!r} has {feature}, which is not exported yet; supported are "
        f"{', '.join(SUPPORTED_FAMILIES)} models without it"
    )


def active_window(config: PreTrainedConfig, context: int) -> int | None:
    """The sliding window that some layer would feel within `context` positions."""
    window = getattr(config, "sliding_window", None)
    if window is None or window >= context or SLIDING_ATTENTION not in layer_kinds(config):
        return None
    return int(window)


def check_context(config: PreTrainedConfig, context: int | None) -> int:
    """The context to export for: the model's own, or another that was asked for.

    A model whose frequencies depend on the length of the text takes more positions than it was
    made for, as many times as its configuration says.

    Raises:
        UsageError: `context` is below 2 or above what the model takes.
    """
    made_for = int(config.max_position_embeddings)
    if context is None:
        return made_for
    factors = [
        parameters.get("factor")
        for parameters in rope_parameters(config).values()
        if parameters.get("rope_type") == "dynamic"
    ]
    stretches = [f for f in factors if isinstance(f, int | float) and 1 <= f < _MOST_STRETCHED]
    longest = int(made_for * max(stretches, default=1.0))
    if not 2 <= context <= longest:
        raise UsageError(
            f"--context {context} is out of range: this model takes 2 to {longest} positions"
        )
    return context
