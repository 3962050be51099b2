"""The experts function that tracing sees: every expert's product of every row, then a weighted sum.

Which experts a row takes is known only when the graph runs. Gathering their weights would copy
them row by row, and a loop is control flow, which compilers refuse; so all are multiplied, and a
row gives weight zero to those it did not choose.
"""

from __future__ import annotations

from typing import Final

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

__all__ = ["EXPERTS_NAME", "experts_forward", "register_experts"]

EXPERTS_NAME: Final = "lookahead"


def experts_forward(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """A mixture of experts in the signature of transformers' experts interface.

    Args:
        module: the experts, with `gate_up_proj` [experts, 2 * inner, hidden] and `down_proj`
            [experts, hidden, inner].
        hidden_states: [rows, hidden].
        top_k_index: [rows, k] the experts of each row.
        top_k_weights: [rows, k] their weights.

    Returns:
        [rows, hidden].
    """
    gate_up_proj, down_proj = module.gate_up_proj, module.down_proj
    assert isinstance(gate_up_proj, torch.Tensor), "experts have joined projections"
    assert isinstance(down_proj, torch.Tensor), "experts have projections back"
    chosen = torch.nn.functional.one_hot(top_k_index, len(gate_up_proj)).to(top_k_weights.dtype)
    shares = (chosen * top_k_weights.unsqueeze(-1)).sum(dim=1)  # [rows, experts]
    joined = torch.matmul(hidden_states, gate_up_proj.transpose(1, 2))
    gate, up = joined.chunk(2, dim=-1)  # [experts, rows, inner] each
    inner = module.act_fn(gate) * up  # type: ignore[operator]
    outputs = torch.matmul(inner, down_proj.transpose(1, 2))
    weights = shares.T.unsqueeze(-1).to(outputs.dtype)  # [experts, rows, 1]
    # A choice, no product: what an expert makes of rows that are not its own may be infinite.
    weighted = torch.where(weights > 0, outputs * weights, 0)  # [experts, rows, hidden]
    return weighted.sum(dim=0)


def register_experts() -> None:
    """Make `EXPERTS_NAME` known to transformers; doing it again changes nothing."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)
