from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from la_export.checkpoint.facts import scatter_capacity
from la_export.graph.sample import Sample, make_sample
from la_export.reference import TorchReference
from la_runtime.contract import CacheForm, Contract, Dtype, Name, masked_value
from tests.tiny_models import make_tiny_config, make_tiny_model

CONTEXT = 256


@pytest.fixture(scope="module")
def reference() -> TorchReference:
    return TorchReference(make_tiny_model(make_tiny_config(num_hidden_layers=1)))


def _make(
    reference: TorchReference,
    *,
    context: int = CONTEXT,
    capacity: int | None = None,
    k_max: int = 4,
    dtype: Dtype = Dtype.FLOAT32,
) -> Sample:
    contract = Contract(
        cache_form=CacheForm.CONCAT if capacity is None else CacheForm.SCATTER,
        num_layers=1,
        num_kv_heads=2,
        head_dim=16,
        hidden_size=64,
        vocab_size=320,
        k_max=k_max,
        top_c=8,
        compute_dtype=dtype,
        kv_dtype=dtype,
        capacity=capacity,
    )
    return make_sample(contract, reference, context=context)


def test_forms_pose_the_same_batch_with_columns_where_each_has_them(
    reference: TorchReference,
) -> None:
    joined = _make(reference).make_feeds()
    placed = _make(reference, capacity=300).make_feeds()
    for name in (Name.INPUT_IDS, Name.POSITION_IDS, Name.LOGITS_ROWS, Name.LOOKAHEAD_EMBEDDINGS):
        np.testing.assert_array_equal(joined[name], placed[name])
    lengths = placed[Name.WRITE_INDEX]
    assert len(set(lengths.tolist())) == 2, "a batch of one length would hide a wrong index"
    block, longest = joined[Name.INPUT_IDS].shape[1], int(lengths.max())
    for index, length in enumerate(lengths):
        seen = {
            name: feeds[Name.ATTENTION_MASK][index, 0] == 0
            for name, feeds in (("joined", joined), ("placed", placed))
        }
        np.testing.assert_array_equal(seen["joined"][:, :length], seen["placed"][:, :length])
        np.testing.assert_array_equal(
            seen["joined"][:, longest:], seen["placed"][:, length : length + block]
        )
        assert not seen["joined"][:, length:longest].any()
        assert not seen["placed"][:, length + block :].any()


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.FLOAT16])
def test_feeds_have_the_contracts_dtypes_and_hidden_keys_its_masked_value(
    reference: TorchReference, dtype: Dtype
) -> None:
    sample = _make(reference, capacity=300, dtype=dtype)
    feeds = sample.make_feeds()
    for spec in sample.contract.inputs:
        assert feeds[spec.name].dtype == np.dtype(spec.dtype)
    assert set(np.unique(feeds[Name.ATTENTION_MASK])) == {0.0, masked_value(dtype)}


def test_second_sequence_ends_with_the_context(reference: TorchReference) -> None:
    positions = _make(reference).make_feeds()[Name.POSITION_IDS]
    assert positions[1].max() == CONTEXT - 1


@pytest.mark.parametrize("make_feeds", [Sample.make_feeds, Sample.make_prompt_feeds])
@pytest.mark.parametrize(("context", "k_max"), tuple(product((1, 2, 3, 4, 7, 40), (1, 2, 16))))
def test_block_fits_the_least_capacity_of_any_context(
    reference: TorchReference, make_feeds: object, context: int, k_max: int
) -> None:
    assert callable(make_feeds)
    capacity = scatter_capacity(context, prefill_chunk=1, k_max=k_max)
    feeds = make_feeds(_make(reference, context=context, capacity=capacity, k_max=k_max))
    block = feeds[Name.INPUT_IDS].shape[1]
    assert (feeds[Name.WRITE_INDEX] + block <= capacity).all()
