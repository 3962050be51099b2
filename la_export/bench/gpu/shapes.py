"""Sizes of decoders that are timed with weights of no meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["DEEPSEEK_7B", "LLAMA_7B", "QWEN25_7B", "SHAPES", "SMOLLM2_135M", "DecoderShape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """A decoder of the Llama family, or of Qwen2's, whose queries, keys and values have biases.

    Args:
        name: what it is called.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: width of a head.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        vocab_size: rows of the embedding table.
        is_tied: whether the head reads that table.
        context: positions.
        rope_theta: base of the rotary embedding.
        has_biases: whether it is one of Qwen2's.
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    is_tied: bool
    context: int
    rope_theta: float = 10_000.0
    has_biases: bool = False

    @property
    def num_read(self) -> int:
        """Parameters that a step reads: all but an embedding table that is looked up alone."""
        queries = self.num_heads * self.head_dim
        keys = self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys)
        mlp = 3 * self.hidden_size * self.intermediate_size
        norms = (2 * self.num_layers + 1) * self.hidden_size
        return self.num_layers * (attention + mlp) + norms + self.vocab_size * self.hidden_size

    @property
    def kv_per_token(self) -> int:
        """Elements of keys and values that a token leaves in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


SMOLLM2_135M: Final = DecoderShape(
    name="smollm2-135m",
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_size=576,
    intermediate_size=1536,
    vocab_size=49_152,
    is_tied=True,
    context=8192,
    rope_theta=100_000.0,
)
LLAMA_7B: Final = DecoderShape(
    name="llama-7b",
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=11_008,
    vocab_size=32_000,
    is_tied=False,
    context=2048,
)
QWEN25_7B: Final = DecoderShape(
    name="qwen2.5-7b",
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    hidden_size=3584,
    intermediate_size=18_944,
    vocab_size=152_064,
    is_tied=False,
    context=32_768,
    rope_theta=1_000_000.0,
    has_biases=True,
)
DEEPSEEK_7B: Final = DecoderShape(
    name="deepseek-7b",
    num_layers=30,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=11_008,
    vocab_size=102_400,
    is_tied=False,
    context=4096,
)
SHAPES: Final = {shape.name: shape for shape in (SMOLLM2_135M, LLAMA_7B, QWEN25_7B, DEEPSEEK_7B)}
