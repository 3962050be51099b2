"""The integer precisions in PyTorch, against integer arithmetic written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from la_export.quantize.emulation import IntegerLinear, quantize_to_int4, quantize_to_int8
from la_export.quantize.integers import (
    LEAST_SCALE,
    QuantizedBlocks,
    QuantizedRows,
    quantize_blocks,
    quantize_rows,
)
from tests.tiny_models import make_tiny_config, make_tiny_model

TOKENS = [5, 17, 300, 42, 9]
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def _draw(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Numbers whose rows are of very different sizes."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(0.0, 3.0, (shape[0], 1)))
    return (rng.normal(0.0, 1.0, shape) * sizes).astype(np.float32)


def _multiply(rows: NDArray[np.float32], weight: QuantizedRows) -> NDArray[np.float32]:
    """The rule in NumPy: sums in int64, each row quantized as a weight's row is."""
    quantized = quantize_rows(rows)
    sums = quantized.values.astype(np.int64) @ weight.values.astype(np.int64).T
    return sums.astype(np.float32) * weight.scales * quantized.scales[:, np.newaxis]


@pytest.mark.parametrize("columns", [1, 64, 1040, 1041, 5000])
def test_products_are_those_of_integers_whatever_the_length_of_a_row(columns: int) -> None:
    """Largest products, so that a sum that is not exact in float32 would show."""
    rows, weight = np.abs(_draw(3, columns)) + 1e-3, np.abs(_draw(7, columns, seed=1)) + 1e-3
    rows = np.maximum(rows, 0.95 * rows.max(axis=1, keepdims=True))
    weight = quantize_rows(np.maximum(weight, 0.95 * weight.max(axis=1, keepdims=True)))

    found = IntegerLinear(weight, bias=None)(torch.from_numpy(rows)).numpy()

    np.testing.assert_array_equal(found, _multiply(rows, weight))


def test_a_row_gives_the_same_alone_and_among_others() -> None:
    layer = IntegerLinear(quantize_rows(_draw(32, 1500)), bias=None)
    rows = torch.from_numpy(_draw(25, 1500, seed=1))

    together = layer(rows)

    for row, expected in zip(rows, together, strict=True):
        assert torch.equal(layer(row[None])[0], expected)


def test_a_row_of_zeros_gives_the_bias() -> None:
    bias = torch.nn.Parameter(torch.tensor([1.5, -2.0]), requires_grad=False)
    layer = IntegerLinear(quantize_rows(_draw(2, 8)), bias)

    assert torch.equal(layer(torch.zeros(1, 8)), bias[None])


def test_activations_round_half_to_even() -> None:
    identity = quantize_rows(np.eye(4, dtype=np.float32))
    step = np.float32(127) * np.float32(1 / 127)  # the scale of a row whose largest is 127
    rows = torch.tensor([[0.5, 1.5, 2.5, 127.0]]) * float(step)

    found = IntegerLinear(identity, bias=None)(rows)

    one = np.float32(127) * identity.scales[0] * step
    np.testing.assert_array_equal(found[0, :3].numpy(), np.float32([0, 2, 2]) * one)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_int8_holds_every_matrix_in_integers_once(family: str, is_tied: bool) -> None:
    config = make_tiny_config(family, tie_word_embeddings=is_tied)
    weights = dict(make_tiny_model(config).named_parameters(remove_duplicate=False))
    model = make_tiny_model(config)

    quantized = quantize_to_int8(model)

    names = [name for found in quantized for name in found]
    assert sorted(names) == sorted(name for name, weight in weights.items() if weight.dim() == 2)
    assert ((EMBEDDING, HEAD) in quantized) == is_tied
    for (name, *_), found in quantized.items():
        expected = quantize_rows(weights[name].detach().numpy())
        assert isinstance(found, QuantizedRows)
        np.testing.assert_array_equal(found.values, expected.values)
        np.testing.assert_array_equal(found.scales, expected.scales)
    assert not any(type(module) is torch.nn.Linear for module in model.modules())


@pytest.mark.parametrize("is_tied", [True, False])
def test_int4_holds_projections_in_blocks_and_the_ends_as_int8_does(is_tied: bool) -> None:
    config = make_tiny_config("qwen2", tie_word_embeddings=is_tied)
    weights = dict(make_tiny_model(config).named_parameters(remove_duplicate=False))
    model = make_tiny_model(config)

    quantized = quantize_to_int4(model)

    in_int8 = quantize_to_int8(make_tiny_model(config))
    for names, found in quantized.items():
        if EMBEDDING in names or HEAD in names:
            np.testing.assert_array_equal(found.values, in_int8[names].values)
            continue
        expected = quantize_blocks(weights[names[0]].detach().numpy())
        assert isinstance(found, QuantizedBlocks)
        np.testing.assert_array_equal(found.values, expected.values)
        held = model.get_submodule(names[0].removesuffix(".weight")).weight
        np.testing.assert_array_equal(held.detach().numpy(), expected.to_float())


@pytest.mark.parametrize("quantize", [quantize_to_int8, quantize_to_int4])
def test_a_token_is_looked_up_as_int8_times_the_scale_of_its_row(quantize) -> None:
    config = make_tiny_config(tie_word_embeddings=True)
    table = make_tiny_model(config).get_input_embeddings().weight.detach().numpy()
    model = make_tiny_model(config)

    quantize(model)

    found = model.get_input_embeddings()(torch.tensor(TOKENS)).detach().numpy()
    np.testing.assert_array_equal(found, quantize_rows(table).to_float()[TOKENS])


def test_eight_bits_say_about_what_floats_say() -> None:
    """Within the steps of the integers: a wrong scale would be far off."""
    config = make_tiny_config("qwen2", tie_word_embeddings=True)
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        expected = make_tiny_model(config)(ids).logits
        model = make_tiny_model(config)
        quantize_to_int8(model)
        found = model(ids).logits

    share = (found - expected).abs().max() / (expected.max() - expected.min())
    assert 1e-5 < share < 0.05


def test_scales_are_never_so_small_that_something_is_divided_by_zero() -> None:
    quantized = quantize_rows(np.zeros((2, 4), np.float32))

    assert (quantized.scales == LEAST_SCALE).all()
