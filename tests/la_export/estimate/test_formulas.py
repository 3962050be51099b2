from __future__ import annotations

from dataclasses import replace

import pytest

from la_export.estimate.formulas import (
    activation_bytes,
    cache_bytes_per_token,
    joined_cache_bytes,
    logits_bytes,
    lookahead_bytes,
    mask_bytes,
    score_bytes,
    weight_bytes,
    width_of,
)
from la_export.estimate.shape import ModelShape
from la_export.options import Precision
from la_runtime.contract import CacheForm, Dtype

# Llama 7B: published sizes.
LLAMA_7B = ModelShape(
    name="llama-7b",
    num_parameters=6_738_415_616,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=11008,
    vocab_size=32000,
    context=2048,
)
SMALL = ModelShape(
    name="small",
    num_parameters=1000,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=64,
    intermediate_size=96,
    vocab_size=320,
    context=128,
)


def test_a_7b_in_fp16_weighs_13_and_a_half_gigabytes_and_half_a_megabyte_a_token() -> None:
    assert weight_bytes(LLAMA_7B, Precision.FP16) == 13_476_831_232
    assert cache_bytes_per_token(LLAMA_7B, Dtype.FLOAT16) == 512 * 1024


@pytest.mark.parametrize(
    ("precision", "width"), [(Precision.FP32, 4), (Precision.FP16, 2), (Precision.BF16, 2)]
)
def test_each_precision_has_its_width(precision: Precision, width: int) -> None:
    assert width_of(precision.dtype) == width
    assert weight_bytes(SMALL, precision) == 1000 * width


def test_integers_have_scales_and_what_turns_them() -> None:
    # 640 in linear layers of 20 features, tables of 4 rows by 64, 104 floats.
    shape = replace(SMALL, num_linears=640, num_features=20, num_table_rows=4)
    assert weight_bytes(shape, Precision.INT8) == 640 + 256 + 4 * (20 + 4 + 104)
    assert weight_bytes(shape, Precision.INT4) == 320 + 256 + 4 * (20 + 4 + 104)
    turned = replace(shape, turned_block=32)
    added = weight_bytes(turned, Precision.INT8) - weight_bytes(shape, Precision.INT8)
    assert added == 4 * (2 * 64 * 64 + 32 * 32)
    assert weight_bytes(turned, Precision.INT4) == weight_bytes(shape, Precision.INT4)


def test_activations_are_the_wider_of_attention_and_mlp_and_what_the_rows_leave_behind() -> None:
    # Residual and norm 128, heads (4 + 2 + 2 + 4) x 16 = 192, gate and up 192; K/V 2 x 2 x 32.
    assert activation_bytes(SMALL, Dtype.FLOAT32, 1) == 4 * (128 + 192 + 128)
    assert activation_bytes(SMALL, Dtype.FLOAT16, 5) == 5 * 2 * (128 + 192 + 128)


def test_scores_masks_and_logits_are_their_shapes() -> None:
    assert score_bytes(SMALL, rows=3, keys=10) == 4 * 3 * 10 * 4
    assert mask_bytes(Dtype.FLOAT16, rows=3, keys=10) == 60
    assert logits_bytes(SMALL, Dtype.FLOAT32, 2) == 2 * 320 * 4
    assert logits_bytes(SMALL, Dtype.BFLOAT16, 2) == 2 * 320 * 6
    assert lookahead_bytes(SMALL, 4) == 4 * 64 * 4


def test_only_the_growing_cache_is_joined_with_the_block() -> None:
    assert joined_cache_bytes(SMALL, Dtype.FLOAT32, CacheForm.CONCAT, keys=10) == 10 * 64 * 4
    assert joined_cache_bytes(SMALL, Dtype.FLOAT32, CacheForm.SCATTER, keys=10) == 0
