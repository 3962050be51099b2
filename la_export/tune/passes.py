"""The two passes of tuning: the frozen model over texts, and lookahead groups behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from la_export.tune.attention import hide
from la_export.tune.groups import GroupBlock
from la_export.tune.kv_cache import FrozenCache, GrowingCache, KeyValue
from la_export.tune.lookaheads import Lookaheads
from la_export.tune.texts import OwnText
from la_runtime.layout import GroupMask

__all__ = ["TextStates", "read_texts_once", "run_groups"]

_PAD = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStates:
    """What the frozen model made of some texts, padded on the right to one length.

    Args:
        layers: keys and values of each layer, [texts, kv_heads, columns, head_dim] each.
        hidden: [texts, columns, hidden] what the head reads.
    """

    layers: tuple[KeyValue, ...]
    hidden: torch.Tensor

    @property
    def num_columns(self) -> int:
        """Of the longest text."""
        return int(self.hidden.shape[1])


@torch.no_grad()
def read_texts_once(model: PreTrainedModel, texts: Sequence[OwnText]) -> TextStates:
    """One causal pass over whole texts."""
    width = max(len(text.token_ids) for text in texts)
    rows = [[*text.token_ids, *[_PAD] * (width - len(text.token_ids))] for text in texts]
    ids = torch.tensor(rows, device=model.device)
    columns = torch.arange(width, device=model.device)
    mask = hide(columns > columns.unsqueeze(-1), model.dtype).expand(len(texts), 1, -1, -1)
    cache = GrowingCache(width)
    hidden = model.get_decoder()(
        input_ids=ids,
        attention_mask=mask,
        position_ids=columns.expand(len(texts), -1),
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    return TextStates(layers=tuple(cache.filled()), hidden=hidden)


def run_groups(
    model: PreTrainedModel,
    lookaheads: Lookaheads,
    states: TextStates,
    block: GroupBlock,
    group_mask: GroupMask,
) -> torch.Tensor:
    """What the head reads of every slot, [texts, rows, hidden]."""
    device = model.device
    is_hidden = torch.from_numpy(block.hidden(states.num_columns, group_mask)).to(device)
    vectors = lookaheads.vectors.to(model.dtype)
    with lookaheads.attached(model):
        hidden: torch.Tensor = model.get_decoder()(
            inputs_embeds=vectors[torch.from_numpy(block.slots).to(device)],
            attention_mask=hide(is_hidden.unsqueeze(1), model.dtype),
            position_ids=torch.from_numpy(block.positions).to(device),
            past_key_values=FrozenCache(states.layers),
            use_cache=True,
        ).last_hidden_state
    return hidden
