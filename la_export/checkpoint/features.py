"""What can be exported, and the name of whatever cannot.

Decides from a configuration alone, before any weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from transformers import PreTrainedConfig

from la_runtime.errors import UnsupportedModelError, UsageError

__all__ = [
    "SUPPORTED_FAMILIES",
    "SUPPORTED_ROPE_KINDS",
    "active_window",
    "check_context",
    "check_features",
    "check_supported",
]

SUPPORTED_FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
SUPPORTED_ROPE_KINDS: Final = ("default", "linear", "llama3")
_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
# Softcapping goes by many names; each changes the scores.
_SOFTCAP: Final = re.compile("soft_?cap", re.IGNORECASE)
# Configuration fields that announce a feature when they are set to something.
_FEATURE_FIELDS: Final[Mapping[str, str]] = {
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "moe_intermediate_size": "a mixture of experts",
    "attn_logit_softcapping": "softcapped attention scores",
    "final_logit_softcapping": "softcapped logits",
    "kv_lora_rank": "latent attention (MLA)",
    "alibi": "ALiBi position biases",
    "is_encoder_decoder": "an encoder",
    "vision_config": "a vision tower",
    "audio_config": "an audio tower",
    "quantization_config": "quantized weights",
}


def check_supported(config: PreTrainedConfig, context: int) -> None:
    """Refuse a configuration that export would get wrong.

    Args:
        config: of the model.
        context: positions the bundle will serve; a wider sliding window never acts.

    Raises:
        UnsupportedModelError: names the feature, the model type and what is supported.
    """
    check_features(config.model_type, config.to_dict())
    rope_kind = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_kind not in SUPPORTED_ROPE_KINDS:
        raise _refusal(config.model_type, f"rotary embedding of kind {rope_kind!r}")
    _check_layer_types(config)
    window = active_window(config, context)
    if window is not None:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} has an active sliding window of {window} tokens "
            f"in a context of {context}, which is not exported yet; "
            f"pass --context {window} or less to build it without"
        )


def check_features(model_type: str, fields: Mapping[str, Any]) -> None:
    """Refuse by model type and by fields of a raw configuration.

    Raises:
        UnsupportedModelError: names the feature, the model type and what is supported.
    """
    for field, feature in _FEATURE_FIELDS.items():
        value = fields.get(field)
        if value is None or value is False or value == 0:
            continue
        if field == "quantization_config" and isinstance(value, Mapping):
            feature = f"weights quantized with {value.get('quant_method', 'an unknown method')}"
        raise _refusal(model_type, feature)
    for field, value in fields.items():
        if _SOFTCAP.search(field) and value is not None and value is not False and value != 0:
            raise _refusal(model_type, f"softcapped scores ({field})")
    if model_type not in SUPPORTED_FAMILIES:
        needs_code = ", which needs code from its repository" if "auto_map" in fields else ""
        raise UnsupportedModelError(
            f"model type {model_type!r}{needs_code} is not supported; "
            f"supported are {', '.join(SUPPORTED_FAMILIES)}"
        )


def _check_layer_types(config: PreTrainedConfig) -> None:
    kinds = set(getattr(config, "layer_types", None) or ())
    other = sorted(str(kind) for kind in kinds - {_FULL, _SLIDING})
    if other:
        raise _refusal(config.model_type, f"layers of type {other[0]}")
    if _SLIDING in kinds and getattr(config, "sliding_window", None) is None:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} has layers of type {_SLIDING} without a "
            "sliding_window; correct its config.json"
        )


def _refusal(model_type: str, feature: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"model type {model_type!r} has {feature}, which is not exported yet; supported are "
        f"dense {', '.join(SUPPORTED_FAMILIES)} models with full attention"
    )


def active_window(config: PreTrainedConfig, context: int) -> int | None:
    """The sliding window that some layer would feel within `context` positions."""
    window = getattr(config, "sliding_window", None)
    if window is None or window >= context:
        return None
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and _SLIDING not in layer_types:
        return None
    return int(window)


def check_context(config: PreTrainedConfig, context: int | None) -> int:
    """The context to export for: the model's own, or a smaller one that was asked for.

    Raises:
        UsageError: `context` is below 2 or above what the model was made for.
    """
    longest = int(config.max_position_embeddings)
    if context is None:
        return longest
    if not 2 <= context <= longest:
        raise UsageError(
            f"--context {context} is out of range: this model takes 2 to {longest} positions"
        )
    return context
