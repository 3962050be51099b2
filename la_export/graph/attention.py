"""The attention function that tracing sees: one standard `Attention` operator per layer.

It takes keys and values already joined with the cache and the contract's additive mask, so
the operator needs no past inputs, no causality flag and no copy of grouped heads. Scores that are
softcapped are computed in the open: of the operator's softcap, runtimes differ in whether the mask
comes before it or behind.
"""

from __future__ import annotations

from typing import Final

import torch
from transformers import AttentionInterface

from la_runtime.errors import UnsupportedModelError

__all__ = ["ATTENTION_NAME", "attention_forward", "register_attention"]

ATTENTION_NAME: Final = "lookahead"
_HARMLESS: Final = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_router_logits",
        "position_ids",
        "sliding_window",  # the mask has it
        "use_cache",
    }
)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
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
        softcap: bound of the scores before the mask, tanh(score / softcap) * softcap.
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
    if softcap is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return _attend_capped(query, key, value, attention_mask, scale, softcap), None
    attended = torch.onnx.ops.attention(query, key, value, attention_mask, scale=scaling)
    return attended[0].transpose(1, 2).contiguous(), None


def _attend_capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """[batch, block, heads, head_dim]; heads that share keys are rows of one product."""
    batch, heads, block, head_dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, block, head_dim)
    scores = grouped @ key.unsqueeze(2).transpose(-1, -2) * scale  # [b, kv, group, block, keys]
    scores = torch.tanh(scores / softcap) * softcap + mask.unsqueeze(1)
    shares = torch.softmax(scores.float(), dim=-1).to(query.dtype)
    attended = shares @ value.unsqueeze(2)
    return attended.reshape(batch, heads, block, head_dim).transpose(1, 2).contiguous()


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers; doing it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
