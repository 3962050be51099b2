"""The sums behind an estimate. Pure; each names where it comes from and what it leaves out.

Bytes of an element are ``width``: 4 in fp32, 2 in fp16 and bf16.
"""

from __future__ import annotations

from typing import Final

from la_export.estimate.shape import ModelShape
from la_export.options import Precision
from la_export.quantize.integers import BLOCK_SIZE
from la_runtime.contract import CacheForm, Dtype
from la_runtime.storage import storage_dtype

__all__ = [
    "activation_bytes",
    "cache_bytes_per_token",
    "cpu_weight_bytes",
    "graph_bytes",
    "joined_cache_bytes",
    "largest_part_bytes",
    "logits_bytes",
    "lookahead_bytes",
    "mask_bytes",
    "plan_bytes",
    "score_bytes",
    "tokenizer_bytes",
    "weight_bytes",
    "width_of",
]

_FLOAT32_BYTES: Final = 4
# Measured on the graphs of SmolLM2-135M (30 layers, 150 kB) and of a tiny model (2 layers).
_GRAPH_BYTES: Final = 12_000
_GRAPH_BYTES_PER_LAYER: Final = 4_600
# Measured: SmolLM2's tokenizer.json, 3.5 MB for 49,152 tokens.
_TOKENIZER_BYTES_PER_TOKEN: Final = 72
# Measured: SmolLM2-135M in fp16 for k of 2 and 4, TensorRT for RTX 1.7.1 and the GPUs it builds for
# by default. Two plans of two profiles were 33.7 MB larger than the weights, one of three 50.5 MB.
_PROFILE_BYTES_PER_LAYER: Final = 562_000


def width_of(dtype: Dtype) -> int:
    """Bytes of an element."""
    return storage_dtype(dtype).itemsize


def weight_bytes(shape: ModelShape, precision: Precision) -> int:
    """Every parameter once, as the weights file holds them.

    Source: the file holds each initializer once, a tied head included; integers with the scales of
    `quantize.integers`, and in int8 the matrices of `quantize.rotation`. Leaves out: what pads
    large tensors to whole pages, less than 4 kB each, and the rotary frequencies.
    """
    if not precision.is_integer:
        return shape.num_parameters * width_of(precision.dtype)
    table = shape.num_table_rows * shape.hidden_size
    floats = shape.num_parameters - shape.num_linears - table
    scales = shape.num_table_rows
    if precision is Precision.INT8:
        linears = shape.num_linears
        scales += shape.num_features
        if shape.turned_block:
            floats += 2 * shape.hidden_size**2 + shape.turned_block**2
    else:
        linears = shape.num_linears // 2
        scales += shape.num_linears // BLOCK_SIZE
    return table + linears + _FLOAT32_BYTES * (scales + floats)


def cpu_weight_bytes(shape: ModelShape, precision: Precision) -> int:
    """The weights as ONNX Runtime's CPU provider holds them.

    Source: measured; in fp16 it keeps the file's pages and a float32 copy to compute with.
    """
    stored = weight_bytes(shape, precision)
    if precision is Precision.FP16:
        return stored + weight_bytes(shape, Precision.FP32)
    return stored


def largest_part_bytes(shape: ModelShape) -> int:
    """The embedding table or a decoder layer in float32, whichever is larger.

    Source: of a large model, a build holds such parts one at a time. A layer is what is left of all
    parameters without two tables, or more where embedding and head are one.
    """
    table = shape.vocab_size * shape.hidden_size
    layer = max(0, shape.num_parameters - 2 * table) // shape.num_layers
    return _FLOAT32_BYTES * max(table, layer)


def plan_bytes(shape: ModelShape, precision: Precision, *, profiles: int) -> int:
    """A plan: the weights once, and each profile's kernels.

    Source: measured with TensorRT for RTX; full TensorRT's kernels were not.
    """
    return weight_bytes(shape, precision) + profiles * _PROFILE_BYTES_PER_LAYER * shape.num_layers


def graph_bytes(shape: ModelShape) -> int:
    """A graph without its weights; a rule of thumb, it hardly matters."""
    return _GRAPH_BYTES + _GRAPH_BYTES_PER_LAYER * shape.num_layers


def lookahead_bytes(shape: ModelShape, k_max: int) -> int:
    """The lookahead vectors, which are stored in float32."""
    return _FLOAT32_BYTES * k_max * shape.hidden_size


def tokenizer_bytes(shape: ModelShape) -> int:
    """The tokenizer's files; a rule of thumb over the vocabulary."""
    return _TOKENIZER_BYTES_PER_TOKEN * shape.vocab_size


def cache_bytes_per_token(shape: ModelShape, dtype: Dtype) -> int:
    """Keys and values of one token in every layer.

    Source: the contract's cache axes, [kv_heads, head_dim] twice a layer.
    """
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * width_of(dtype)


def activation_bytes(shape: ModelShape, dtype: Dtype, rows: int) -> int:
    """What the widest layer holds of so many rows at once, and the K/V they leave behind.

    Source: a decoder layer's tensors that live together: the residual stream and its norm, and
    either queries, keys, values and attention's output, or the MLP's gate and up projections.
    Leaves out: a library's workspace, padding and fragments.
    """
    heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    per_row = 2 * shape.hidden_size + max(heads, 2 * shape.intermediate_size)
    return rows * (per_row * width_of(dtype) + cache_bytes_per_token(shape, dtype))


def score_bytes(shape: ModelShape, *, rows: int, keys: int) -> int:
    """Attention's scores of one layer, where a kernel writes them down, in float32.

    Source: [heads, rows, keys]. ONNX Runtime's CPU kernel does; fused GPU kernels do not.
    """
    return shape.num_heads * rows * keys * _FLOAT32_BYTES


def mask_bytes(dtype: Dtype, *, rows: int, keys: int) -> int:
    """The additive mask of the contract, [rows, keys]."""
    return rows * keys * width_of(dtype)


def joined_cache_bytes(shape: ModelShape, dtype: Dtype, cache_form: CacheForm, *, keys: int) -> int:
    """One layer's keys and values as attention reads them, the block's behind the cache's.

    Source: cache form `concat` joins them into new memory, layer by layer; `scatter` writes the
    block's into the cache.
    """
    if cache_form is CacheForm.SCATTER:
        return 0
    return keys * cache_bytes_per_token(shape, dtype) // shape.num_layers


def logits_bytes(shape: ModelShape, dtype: Dtype, rows: int) -> int:
    """Scores of so many rows over the vocabulary in float32, and in the precision before that.

    Source: the contract's `logits`, and the cast in front of it. Leaves out: what sorting the best
    takes.
    """
    before = 0 if dtype is Dtype.FLOAT32 else width_of(dtype)
    return rows * shape.vocab_size * (_FLOAT32_BYTES + before)
