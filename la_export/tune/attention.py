"""Attention as tuning needs it: key heads that several query heads share are never copied."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

__all__ = ["TUNING_ATTENTION", "hide", "use_tuning_attention"]

TUNING_ATTENTION = "lookahead_tuning"


def use_tuning_attention(model: PreTrainedModel) -> None:
    """Let a model attend by `TUNING_ATTENTION`; its masks are then 4-D and additive, or none."""
    AttentionInterface.register(TUNING_ATTENTION, _attend)
    model.config._attn_implementation = TUNING_ATTENTION


def hide(is_hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The additive mask of a boolean one: as the contract's, finite in every dtype."""
    masked = -1e4 if dtype is torch.float16 else -1e9
    return torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device).masked_fill(
        is_hidden, masked
    )


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """[batch, rows, heads, head_dim] of queries [batch, heads, rows, head_dim].

    Args:
        module: the attention layer.
        query: [batch, heads, rows, head_dim].
        key: [batch, kv_heads, keys, head_dim].
        value: the same.
        attention_mask: [batch, 1, rows, keys], additive; none lets a row see everything.
        scaling: of the products; by the root of head_dim when not given.
    """
    batch, heads, rows, head_dim = query.shape
    groups = heads // key.shape[1]
    scale = head_dim**-0.5 if scaling is None else scaling
    grouped = (query * scale).reshape(batch, -1, groups * rows, head_dim)
    scores = grouped @ key.transpose(-1, -2)  # [batch, kv_heads, groups * rows, keys]
    if attention_mask is not None:
        by_group = scores.view(batch, -1, groups, rows, key.shape[2])
        scores = (by_group + attention_mask.unsqueeze(1)).view_as(scores)
    shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    attended = (shares @ value).view(batch, heads, rows, head_dim)
    return attended.transpose(1, 2).contiguous(), None
