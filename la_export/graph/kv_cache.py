"""The cache object that tracing hands to transformers: joins the past and keeps the block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["BlockCache"]


class BlockCache:
    """Stands in for a transformers cache during one traced step.

    Args:
        past: key and value of each layer, each [batch, kv_heads, past, head_dim].
    """

    is_compileable = False

    def __init__(self, past: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._past = tuple(past)
        self._block: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record the block's K/V of a layer; return them behind the past."""
        assert layer_idx not in self._block, f"layer {layer_idx} updated its cache twice"
        self._block[layer_idx] = (key, value)
        past_key, past_value = self._past[layer_idx]
        return torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Places in the past, as transformers asks for it."""
        return self._past[layer_idx][0].shape[2]

    @property
    def block(self) -> tuple[torch.Tensor, ...]:
        """The block's key 0, value 0, key 1, ..., each [batch, kv_heads, block, head_dim]."""
        return tuple(tensor for layer in range(len(self._past)) for tensor in self._block[layer])
