"""The attention function that tracing sees: one standard `Attention` operator per layer.

It takes keys and values already joined with the cache and the contract's additive mask, so
the operator needs no past inputs, no causality flag and no copy of grouped heads.
"""

from __future__ import annotations

from typing import Final

import torch
from transformers import AttentionInterface

from la_runtime.errors import UnsupportedModelError

__all__ = ["ATTENTION_NAME", "attention_forward", "register_attention"]

ATTENTION_NAME: Final = "lookahead"
_HARMLESS: Final = frozenset(
    {"cache_position", "dropout", "is_causal", "output_attentions", "position_ids", "use_cache"}
)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **features: object,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention in the signature of transformers' attention interface.

    Args:
        module: the attention layer; only named in messages.
        query: [batch, heads, block, head_dim], rotated.
        key: [batch, kv_heads, keys, head_dim], rotated.
        value: [batch, kv_heads, keys, head_dim].
        attention_mask: [batch, 1, block, keys] additive.
        scaling: factor on the scores.
        features: whatever else the layer asks for; anything that would change the result
            is refused.

    Returns:
        Output [batch, block, heads, head_dim] and no weights.

    Raises:
        UnsupportedModelError: the layer uses an attention feature that is not exported yet.
    """
    unknown = sorted(
        name
        for name, feature in features.items()
        if feature is not None and feature is not False and name not in _HARMLESS
    )
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} uses the attention feature {', '.join(unknown)}, "
            "which is not exported yet"
        )
    assert attention_mask is not None, "the step always passes a mask"
    attended = torch.onnx.ops.attention(query, key, value, attention_mask, scale=scaling)
    return attended[0].transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers; doing it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
