from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from la_export.checkpoint import find_model, load_checkpoint
from la_export.checkpoint.facts import check_input_features, make_contract, scatter_capacity
from la_runtime.contract import CacheForm, Dtype
from la_runtime.errors import CheckpointError, UnsupportedModelError


@pytest.mark.parametrize(
    ("context", "prefill_chunk", "k_max", "capacity"),
    [
        # A chunk and a group behind it is the widest pass.
        (8192, 512, 8, 8192 + 512 + 8),
        # All of it rounded up to a multiple of 8. No chunk is longer than the context.
        (256, 512, 4, 256 + 256 + 4 + 4),
        # A step of the full layout is wider than the chunk.
        (64, 16, 8, 64 + 81 + 7),
        (64, 73, 8, 64 + 81 + 7),
        (64, 1, 1, 64 + 4 + 4),
    ],
)
def test_capacity_has_room_for_the_widest_pass_behind_the_context(
    context: int, prefill_chunk: int, k_max: int, capacity: int
) -> None:
    assert scatter_capacity(context, prefill_chunk=prefill_chunk, k_max=k_max) == capacity


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BFLOAT16])
def test_contract_states_dtype_form_and_capacity(
    make_checkpoint: Callable[..., Path], dtype: Dtype
) -> None:
    source = find_model(str(make_checkpoint()), revision=None, allow_bin=False)
    checkpoint = load_checkpoint(source, context=100)
    concat = make_contract(checkpoint, 2, dtype=dtype, prefill_chunk=40)
    assert concat.compute_dtype is concat.kv_dtype is dtype
    assert (concat.cache_form, concat.capacity) == (CacheForm.CONCAT, None)
    scatter = make_contract(
        checkpoint, 2, dtype=dtype, cache_form=CacheForm.SCATTER, prefill_chunk=40
    )
    assert (scatter.cache_form, scatter.capacity) == (CacheForm.SCATTER, 144)


def test_sizes_that_make_no_model_are_one_clear_error(
    make_checkpoint: Callable[..., Path],
) -> None:
    source = find_model(str(make_checkpoint()), revision=None, allow_bin=False)
    checkpoint = load_checkpoint(source, context=None)
    checkpoint.config.num_key_value_heads = -1
    with pytest.raises(CheckpointError, match="num_kv_heads must be at least 1, got -1"):
        make_contract(checkpoint, 2, prefill_chunk=512)


def test_layer_that_is_not_of_whole_blocks_is_named(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint(intermediate_size=80)
    source = find_model(str(folder), revision=None, allow_bin=False)
    checkpoint = load_checkpoint(source, context=None)
    check_input_features(checkpoint, block_size=16, precision="int4")
    with pytest.raises(
        UnsupportedModelError, match=r"layers\.0\.mlp\.down_proj has 80 .* int4 .* multiple of 32"
    ):
        check_input_features(checkpoint, block_size=32, precision="int4")
