"""The caches that tuning hands to transformers: both only hold K/V, and neither copies it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["FrozenCache", "GrowingCache"]

KeyValue = tuple[torch.Tensor, torch.Tensor]


class GrowingCache:
    """Room for texts that are written side by side, filled column by column.

    Args:
        num_columns: room for each text.
    """

    is_compileable = False

    def __init__(self, num_columns: int) -> None:
        self._num_columns = num_columns
        self._layers: dict[int, KeyValue] = {}
        self._written: dict[int, int] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object
    ) -> KeyValue:
        """Take new columns of a layer, each [texts, kv_heads, columns, head_dim]; all so far."""
        if layer_idx not in self._layers:
            texts, heads, size = key.shape[0], key.shape[1], key.shape[3]
            room = key.new_empty(2, texts, heads, self._num_columns, size)
            self._layers[layer_idx] = (room[0], room[1])
        start = self._written.get(layer_idx, 0)
        end = self._written[layer_idx] = start + key.shape[2]
        keys, values = self._layers[layer_idx]
        keys[:, :, start:end], values[:, :, start:end] = key, value
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that are filled."""
        return self._written.get(layer_idx, 0)

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with some of the texts."""
        self._layers = {i: (key[rows], value[rows]) for i, (key, value) in self._layers.items()}

    def filled(self) -> list[KeyValue]:
        """Every layer's keys and values, [texts, kv_heads, columns, head_dim] each."""
        end = self.get_seq_length()
        layers = [self._layers[index] for index in range(len(self._layers))]
        return [(key[:, :, :end], value[:, :, :end]) for key, value in layers]


class FrozenCache:
    """K/V of texts that rows behind them see; what the rows write is theirs alone.

    Args:
        layers: keys and values of each layer, [texts, kv_heads, columns, head_dim] each.
    """

    is_compileable = False

    def __init__(self, layers: Sequence[KeyValue]) -> None:
        self._layers = tuple(layers)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object
    ) -> KeyValue:
        """The layer's columns with those of the rows behind them."""
        keys, values = self._layers[layer_idx]
        return torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the texts."""
        return int(self._layers[layer_idx][0].shape[2])
