"""The contract's tensors in every cache form and order of keys and values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from la_runtime.contract import Axis, CacheForm, Contract, KvOrder, Name
from la_runtime.errors import UsageError

CONCAT = Contract(
    num_layers=2,
    num_kv_heads=3,
    head_dim=4,
    hidden_size=24,
    vocab_size=50,
    k_max=2,
    top_c=8,
)
FIXED = replace(CONCAT, cache_form=CacheForm.SCATTER, capacity=64)
GROWING = replace(CONCAT, cache_form=CacheForm.SCATTER)


def axes_of(contract: Contract) -> dict[str, tuple[Axis | int, ...]]:
    return {spec.name: spec.axes for spec in (*contract.inputs, *contract.outputs)}


@pytest.mark.parametrize(
    ("contract", "places", "keys"),
    [(CONCAT, Axis.PAST, Axis.KEYS), (FIXED, 64, 64), (GROWING, Axis.KEYS, Axis.KEYS)],
    ids=["concat", "fixed", "growing"],
)
def test_a_cache_has_as_many_places_as_its_form_says(contract, places, keys):
    ordered = replace(contract, kv_order=KvOrder.SEQUENCE_MAJOR)
    head_major, sequence_major = axes_of(contract), axes_of(ordered)

    assert head_major[contract.past_names[3]] == (Axis.BATCH, 3, places, 4)
    assert sequence_major[contract.past_names[3]] == (Axis.BATCH, places, 12)
    for axes in (head_major, sequence_major):
        assert axes[Name.ATTENTION_MASK] == (Axis.BATCH, 1, Axis.BLOCK, keys)


def test_the_order_of_keys_and_values_changes_nothing_but_the_axes_of_the_cache():
    for contract in (CONCAT, FIXED, GROWING):
        ordered = axes_of(replace(contract, kv_order=KvOrder.SEQUENCE_MAJOR))
        cached = {*contract.past_names, *contract.present_names, *contract.block_names}

        assert {name: axes for name, axes in ordered.items() if name not in cached} == {
            name: axes for name, axes in axes_of(contract).items() if name not in cached
        }


def test_a_block_leaves_in_the_order_of_the_cache():
    ordered = axes_of(replace(CONCAT, kv_order=KvOrder.SEQUENCE_MAJOR))

    assert axes_of(CONCAT)["block.1.value"] == (Axis.BATCH, 3, Axis.BLOCK, 4)
    assert ordered["block.1.value"] == (Axis.BATCH, Axis.BLOCK, 12)


@pytest.mark.parametrize("contract", [FIXED, GROWING], ids=["fixed", "growing"])
def test_what_a_graph_writes_in_place_has_the_axes_of_its_past(contract):
    axes = axes_of(contract)

    assert axes[Name.WRITE_INDEX] == (Axis.BATCH,)
    for past, present in zip(contract.past_names, contract.present_names, strict=True):
        assert axes[present] == axes[past]


def test_only_a_cache_that_is_written_in_place_can_have_a_capacity():
    with pytest.raises(
        UsageError, match="capacity is 64 in cache form concat; only scatter can have one"
    ):
        replace(CONCAT, capacity=64)
    with pytest.raises(UsageError, match="capacity must be at least 1, got 0"):
        replace(FIXED, capacity=0)
