"""Adapters as values: what belongs together, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from la_export.adapter import NO_ADAPTER, Adapter, AdapterPair, expand_name, is_of_adapter


def make_pair(**changes):
    parts = {
        "layers": ("a.q", "a.k"),
        "sizes": (4, 2),
        "reduce": np.ones((3, 5), np.float32),
        "expand": np.arange(18, dtype=np.float32).reshape(6, 3),
    }
    return AdapterPair(**(parts | changes))


def test_each_layer_has_its_own_rows():
    parts = dict(make_pair().parts())

    assert parts["a.q"].tolist() == make_pair().expand[:4].tolist()
    assert parts["a.k"].tolist() == make_pair().expand[4:].tolist()


def test_parameters_are_named_after_layers():
    names = [name for name, _ in Adapter(pairs=(make_pair(),)).parameters()]

    assert names == [make_pair().reduce_name, expand_name("a.q"), expand_name("a.k")]
    assert all(map(is_of_adapter, names))
    assert not is_of_adapter("a.q.weight")


def test_weights_are_counted():
    assert NO_ADAPTER.num_weights == 0
    assert Adapter(pairs=(make_pair(),)).num_weights == 15 + 18


@pytest.mark.parametrize(
    "changes",
    [
        {"sizes": (4,)},
        {"sizes": (4, 3)},
        {"layers": (), "sizes": ()},
        {"reduce": np.ones((2, 5), np.float32)},
        {"reduce": np.ones(3, np.float32)},
        {"expand": np.full((6, 3), np.nan, np.float32)},
    ],
)
def test_parts_that_do_not_belong_together_are_refused(changes):
    with pytest.raises(ValueError, match=r"a\.q|layers have"):
        make_pair(**changes)


def test_a_layer_has_one_pair():
    with pytest.raises(ValueError, match="two pairs"):
        Adapter(pairs=(make_pair(), make_pair()))
