"""One step of the model as a function of the contract's inputs: what gets traced."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from la_export.graph.kv_cache import make_step_cache
from la_runtime.contract import Contract

__all__ = ["DecoderStep"]


class DecoderStep(nn.Module):
    """Wraps a transformers decoder so that its signature is the contract's.

    Args:
        model: a causal language model with attention `ATTENTION_NAME`.
        contract: names the sizes of the outputs.
    """

    def __init__(self, model: PreTrainedModel, contract: Contract) -> None:
        super().__init__()
        self.model = model
        self._contract = contract

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        lookahead_embeddings: torch.Tensor,
        logits_rows: torch.Tensor,
        *cache_inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Inputs and outputs in the order of `Contract.inputs` and `Contract.outputs`."""
        cache = make_step_cache(self._contract, cache_inputs)
        hidden = self.model.get_decoder()(
            inputs_embeds=self._embed(input_ids, lookahead_embeddings),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state  # [batch, block, hidden]
        index = logits_rows.unsqueeze(-1).expand(-1, -1, self._contract.hidden_size)
        wanted = torch.gather(hidden, 1, index)  # [batch, rows, hidden]
        logits = self.model.get_output_embeddings()(wanted).float()  # [batch, rows, vocab_size]
        top_logits, top_ids = torch.topk(logits, self._contract.top_c, dim=-1)
        logsumexp = torch.logsumexp(logits, dim=-1)
        return (logits, top_ids, top_logits, logsumexp, *cache.written)

    def _embed(self, input_ids: torch.Tensor, lookahead_embeddings: torch.Tensor) -> torch.Tensor:
        """Two lookups and a choice, so that neither table is ever copied."""
        vocab_size = self._contract.vocab_size
        is_lookahead = input_ids >= vocab_size  # [batch, block]
        tokens = self.model.get_input_embeddings()(torch.where(is_lookahead, 0, input_ids))
        lookaheads = nn.functional.embedding(
            torch.where(is_lookahead, input_ids - vocab_size, 0), lookahead_embeddings
        )
        return torch.where(is_lookahead.unsqueeze(-1), lookaheads, tokens)
