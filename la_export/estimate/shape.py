"""The sizes of a model that memory depends on."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ModelShape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder's sizes.

    Args:
        name: of the model.
        num_parameters: shared ones counted once.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: width of a head.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        vocab_size: rows of the embedding table.
        context: positions to serve.
        num_linears: weights of linear layers, the head's not among them.
        num_features: output features of those layers.
        num_table_rows: rows of the embedding and of a head of its own.
        turned_block: channels that int8 turns at a time before a down projection; 0 where it does
            not turn the model's stream.
    """

    name: str
    num_parameters: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    context: int
    num_linears: int = 0
    num_features: int = 0
    num_table_rows: int = 0
    turned_block: int = 0
