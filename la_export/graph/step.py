"""One step of the model as a function of the contract's inputs: what gets traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from la_export.graph.kv_cache import make_step_cache
from la_export.layer_kinds import FULL_ATTENTION, SLIDING_ATTENTION, layer_kinds
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
        self._kinds = layer_kinds(model.config)

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
        sliding_mask = None
        if self._contract.window is not None:
            sliding_mask, *cache_inputs = cache_inputs  # type: ignore[assignment]
        cache = make_step_cache(self._contract, cache_inputs)
        with self._scoring(logits_rows):
            logits = self.model(
                inputs_embeds=self._embed(input_ids, lookahead_embeddings),
                attention_mask=self._masks(attention_mask, sliding_mask),
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
            ).logits.float()  # [batch, rows, vocab_size]
        top_logits, top_ids = torch.topk(logits, self._contract.top_c, dim=-1)
        logsumexp = torch.logsumexp(logits, dim=-1)
        return (logits, top_ids, top_logits, logsumexp, *cache.written)

    @contextmanager
    def _scoring(self, rows: torch.Tensor) -> Iterator[None]:
        """Let the head read these rows alone; what a model does to its scores is its own.

        Args:
            rows: [batch, rows] of the block.
        """

        def gather(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
            (hidden,) = inputs  # [batch, block, hidden]
            index = rows.unsqueeze(-1).expand(-1, -1, self._contract.hidden_size)
            return (torch.gather(hidden, 1, index),)

        handle = self.model.get_output_embeddings().register_forward_pre_hook(gather)
        try:
            yield
        finally:
            handle.remove()

    def _masks(
        self, full: torch.Tensor, sliding: torch.Tensor | None
    ) -> torch.Tensor | Mapping[str, torch.Tensor]:
        """As transformers' decoders take them: one for all layers, or one for each kind of them."""
        if sliding is None:
            return full
        if self._kinds == {SLIDING_ATTENTION}:
            return sliding
        return {FULL_ATTENTION: full, SLIDING_ATTENTION: sliding}

    def _embed(self, input_ids: torch.Tensor, lookahead_embeddings: torch.Tensor) -> torch.Tensor:
        """Two lookups and a choice, so that neither table is ever copied."""
        vocab_size = self._contract.vocab_size
        is_lookahead = input_ids >= vocab_size  # [batch, block]
        tokens = self.model.get_input_embeddings()(torch.where(is_lookahead, 0, input_ids))
        lookaheads = nn.functional.embedding(
            torch.where(is_lookahead, input_ids - vocab_size, 0), lookahead_embeddings
        )
        return torch.where(is_lookahead.unsqueeze(-1), lookaheads, tokens)
