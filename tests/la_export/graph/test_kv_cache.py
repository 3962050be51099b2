from __future__ import annotations

import pytest
import torch

from la_export.graph.kv_cache import make_step_cache
from la_runtime.contract import CacheForm, Contract


def _make_contract(cache_form: CacheForm) -> Contract:
    return Contract(
        cache_form=cache_form,
        num_layers=2,
        num_kv_heads=1,
        head_dim=4,
        hidden_size=4,
        vocab_size=6,
        k_max=1,
        top_c=2,
        capacity=7 if cache_form is CacheForm.SCATTER else None,
    )


def _random(places: int) -> torch.Tensor:
    return torch.randn(2, 1, places, 4)


def test_concat_cache_attends_to_past_and_block_and_gives_out_the_block() -> None:
    past, block = [_random(5) for _ in range(4)], [_random(3) for _ in range(4)]
    cache = make_step_cache(_make_contract(CacheForm.CONCAT), past)
    for layer in (1, 0):
        found = cache.update(block[2 * layer], block[2 * layer + 1], layer)
        for joined, before, new in zip(found, past[2 * layer :], block[2 * layer :], strict=False):
            assert torch.equal(joined, torch.cat([before, new], dim=2))
    assert cache.get_seq_length() == 5
    assert all(map(torch.equal, cache.written, block))


def test_scatter_cache_attends_to_what_it_gives_out_at_full_capacity() -> None:
    """What it writes shows in the graph alone: traced, the operator stands for itself."""
    past, block = [_random(7) for _ in range(4)], [_random(3) for _ in range(4)]
    cache = make_step_cache(_make_contract(CacheForm.SCATTER), [torch.tensor([4, 1]), *past])
    attended = [cache.update(block[2 * layer], block[2 * layer + 1], layer) for layer in (0, 1)]
    assert [id(tensor) for tensor in cache.written] == [
        id(tensor) for pair in attended for tensor in pair
    ]
    assert {tuple(tensor.shape) for tensor in cache.written} == {(2, 1, 7, 4)}


@pytest.mark.parametrize("cache_form", CacheForm)
def test_layer_that_updates_twice_is_a_bug(cache_form: CacheForm) -> None:
    tensors = [torch.tensor([0, 0]), *(_random(7) for _ in range(4))]
    cache = make_step_cache(
        _make_contract(cache_form), tensors if cache_form is CacheForm.SCATTER else tensors[1:]
    )
    cache.update(_random(3), _random(3), 0)
    with pytest.raises(AssertionError, match="layer 0 updated its cache twice"):
        cache.update(_random(3), _random(3), 0)
