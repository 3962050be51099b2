"""Texts with what the frozen model made of them, computed when first asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from la_export.tune.passes import TextStates, read_texts_once
from la_export.tune.texts import OwnText

__all__ = ["TextLibrary"]


class TextLibrary:
    """Keeps K/V of as many texts as the memory allows, and computes the others each time.

    Args:
        model: the frozen model.
        texts: all of them.
        memory_bytes: most that is kept.
    """

    def __init__(
        self, model: PreTrainedModel, texts: Sequence[OwnText], *, memory_bytes: int
    ) -> None:
        self.texts = tuple(texts)
        self._model = model
        self._left = memory_bytes
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self.texts)

    def states(self, indices: Sequence[int]) -> TextStates:
        """States of some texts, side by side."""
        missing = [index for index in indices if index not in self._kept]
        found = dict(self._kept)
        if missing:
            found |= self._compute(missing)
        width = max(len(self.texts[index].token_ids) for index in indices)
        stacked = torch.stack([_widen(found[i][0], width, axis=-2) for i in indices])
        hidden = torch.stack([_widen(found[i][1], width, axis=-2) for i in indices])
        num_layers = stacked.shape[1] // 2
        layers = tuple((stacked[:, 2 * i], stacked[:, 2 * i + 1]) for i in range(num_layers))
        return TextStates(layers=layers, hidden=hidden)

    def _compute(self, missing: Sequence[int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        states = read_texts_once(self._model, [self.texts[index] for index in missing])
        # [texts, 2 * layers, kv_heads, columns, head_dim]
        stacked = torch.stack([part for layer in states.layers for part in layer], dim=1)
        found = {}
        for row, index in enumerate(missing):
            length = len(self.texts[index].token_ids)
            entry = (stacked[row, ..., :length, :].clone(), states.hidden[row, :length].clone())
            found[index] = entry
            size = sum(part.nbytes for part in entry)
            if size <= self._left:
                self._left -= size
                self._kept[index] = entry
        return found


def _widen(part: torch.Tensor, width: int, axis: int) -> torch.Tensor:
    """Zeros behind the last column; nothing sees them."""
    missing = width - part.shape[axis]
    return torch.nn.functional.pad(part, (0, 0, 0, missing)) if missing else part
