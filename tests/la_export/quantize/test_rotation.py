"""A turned residual stream: the same model, of smoother rows."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from la_export.quantize.calibration import calibrate, find_rotation
from la_export.quantize.integers import quantize_rows
from la_export.quantize.rotation import HEAD_ROTATION, LOOKAHEAD_ROTATION, make_basis
from la_export.reference import TorchReference
from tests.tiny_models import FAMILIES, make_tiny_config, make_tiny_model

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
SIZES = [1, 2, 7, 16, 48, 576]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_a_basis_is_orthogonal_and_the_same_every_time(size):
    matrix = make_basis(size).matrix().astype(np.float64)

    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-6)
    np.testing.assert_array_equal(make_basis(size).matrix(), make_basis(size).matrix())


@pytest.mark.parametrize("size", SIZES)
def test_turning_is_multiplying_by_the_matrix(size):
    basis, rows, columns = make_basis(size), normal(5, size), normal(size, 3)
    matrix, diagonal = basis.matrix().astype(np.float64), normal(size)

    np.testing.assert_allclose(basis.turn(rows), rows @ matrix, atol=1e-5)
    np.testing.assert_allclose(basis.turn_columns(columns), matrix.T @ columns, atol=1e-5)
    expected = matrix.T @ np.diag(diagonal) @ matrix
    np.testing.assert_allclose(basis.conjugate(diagonal), expected, atol=1e-5)


def test_many_rows_are_turned_like_each_of_them():
    basis, rows = make_basis(24), normal(5000, 24)

    turned = basis.turn(rows)

    np.testing.assert_array_equal(turned[4500:4501], basis.turn(rows[4500:4501]))
    assert basis.turn(rows[:0]).shape == (0, 24)


def test_a_row_with_one_large_channel_is_quantized_better_when_turned():
    rows = normal(40, 576)
    rows[:, 5] *= 60.0
    basis = make_basis(576)

    def error(array):
        return np.square(quantize_rows(array).to_float() - array).mean()

    assert error(basis.turn(rows)) < 0.1 * error(rows)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_turned_model_says_what_it_said(family, tied):
    model = make_tiny_model(make_tiny_config(family, tie_word_embeddings=tied), seed=2)
    with torch.no_grad():  # a norm of ones would hide where its weight went
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.2, 3.0)
    config = model.config
    vectors = normal(2, config.hidden_size, seed=3)
    ids = [*TOKENS, config.vocab_size, config.vocab_size + 1]
    plain = TorchReference(copy.deepcopy(model)).run(ids, vectors)

    turned = TorchReference(model, smoothing=calibrate(model)).run(ids, vectors)

    spread = float(np.ptp(plain.logits))
    np.testing.assert_allclose(turned.logits, plain.logits, atol=2e-6 * spread)


def test_every_parameter_of_the_stream_plays_one_part():
    model = make_tiny_model(make_tiny_config("qwen2"))
    rotation = find_rotation(model)
    parts = [rotation.gains, rotation.readers, rotation.tables, rotation.writers]
    touched = [name for part in parts for name in part]
    assert len(touched) == len(set(touched))

    left = {name for name, _ in model.named_parameters()} - set(touched)

    # Their outputs are no channels of the stream, and what is added to them is not either.
    assert {name.rsplit(".", 2)[-2] for name in left} == {"q_proj", "k_proj", "v_proj"}
    assert all(name.endswith(".bias") for name in left)
    assert rotation.product(LOOKAHEAD_ROTATION).shape == rotation.product(HEAD_ROTATION).shape
