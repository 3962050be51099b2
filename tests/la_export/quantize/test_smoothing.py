"""Sizes moved from activations into weights: exact, and better in integers."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from la_export.graph.weights import SmoothedReader
from la_export.quantize.calibration import calibrate, find_seams
from la_export.quantize.integers import quantize_rows
from la_export.quantize.rotation import ROTATION_PRODUCTS
from la_export.quantize.smoothing import (
    NO_SMOOTHING,
    Seam,
    Smoothing,
    find_exponents,
)
from la_export.quantize.smoothing_file import read_smoothing, write_smoothing
from la_export.reference import TorchReference
from la_runtime.errors import BundleError
from tests.tiny_models import FAMILIES, make_tiny_config, make_tiny_model

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def make_rows(seed, *, outlier):
    """Activations of which one channel is larger than the others."""
    rows = np.random.default_rng(seed).normal(size=(40, 32)).astype(np.float32)
    rows[:, 5] *= outlier
    return rows


def integer_error(rows, weight, exponents):
    left = quantize_rows(np.ldexp(rows, -exponents.astype(np.int32))).to_float()
    right = quantize_rows(np.ldexp(weight, exponents.astype(np.int32))).to_float()
    return float(np.square(left @ right.T - rows @ weight.T).mean())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_smoothed_model_gives_the_very_numbers_it_gave_before(family):
    model = make_tiny_model(make_tiny_config(family), seed=2)
    with torch.no_grad():
        for layer in model.get_decoder().layers:
            for linear in (layer.self_attn.v_proj, layer.mlp.up_proj):
                linear.weight[::3] *= 40.0
    smoothing = replace(calibrate(model), rotation=None)
    assert any(exponents.any() for exponents in smoothing.rows.values())
    plain = TorchReference(copy.deepcopy(model)).run(TOKENS)

    smoothed = TorchReference(model, smoothing=smoothing).run(TOKENS)

    np.testing.assert_array_equal(smoothed.logits, plain.logits)


@pytest.mark.parametrize("seed", range(5))
def test_an_outlier_costs_less_once_its_size_is_in_the_weights(seed):
    rows = make_rows(seed, outlier=60.0)
    weight = np.random.default_rng(seed + 100).normal(size=(16, 32)).astype(np.float32)

    exponents = find_exponents(np.square(rows).mean(0), np.square(weight).mean(0))

    assert integer_error(rows, weight, exponents) < 0.5 * integer_error(
        rows, weight, np.zeros(32, np.int8)
    )
    assert exponents.argmax() == 5


def test_exponents_are_those_of_the_rule_rounded():
    ones = np.ones(4, np.float32)
    # sqrt(2**20) ** 0.4 = 2**4, less the mean of 4, 0, 0, 0.
    squares = np.array([2.0**20, 1.0, 1.0, 1.0], np.float32)
    np.testing.assert_array_equal(find_exponents(squares, ones), [3, -1, -1, -1])
    # sqrt(2**-20) ** -0.6 = 2**6, less the mean of 6, 0, 0, 0, which is 1.5: to even.
    squares = np.array([2.0**-20, 1.0, 1.0, 1.0], np.float32)
    np.testing.assert_array_equal(find_exponents(ones, squares), [4, -2, -2, -2])
    nothing = find_exponents(np.zeros(4, np.float32), np.zeros(4, np.float32))
    np.testing.assert_array_equal(nothing, [0, 0, 0, 0])


def test_a_value_head_is_scaled_as_each_head_of_its_group_reads_it():
    seam = Seam(before="v", after="o", repeats=2, width=3)
    exponents = np.array([1, 2, 3, 4, 5, 6], np.int8)
    spread = seam.spread(exponents)
    np.testing.assert_array_equal(spread, [1, 2, 3, 1, 2, 3, 4, 5, 6, 4, 5, 6])
    np.testing.assert_array_equal(seam.gather(spread.astype(np.float32)), exponents)


def test_every_layer_has_its_two_seams():
    model = make_tiny_model(make_tiny_config())
    seams = find_seams(model)
    assert len(seams) == 2 * model.config.num_hidden_layers
    for seam in seams:
        features = model.get_parameter(f"{seam.after}.weight").shape[1]
        before = model.get_parameter(f"{seam.before}.weight").shape[0]
        assert before * seam.repeats == features


def test_calibration_is_the_same_every_time_and_leaves_the_model_alone():
    model = make_tiny_model(make_tiny_config(), seed=4)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    torch.manual_seed(1)
    first = calibrate(model)
    torch.manual_seed(2)
    second = calibrate(model)

    assert first.columns.keys() == second.columns.keys()
    for name, exponents in first.columns.items():
        np.testing.assert_array_equal(exponents, second.columns[name])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())


def test_a_reader_gives_out_what_smoothing_makes_of_a_parameter():
    class Source:
        def read(self, parameter):
            return np.arange(6, dtype=np.float32).reshape(2, 3)

    smoothing = Smoothing(rows={"a.weight": np.array([1, 0], np.int8)})
    reader = SmoothedReader(source=Source(), smoothing=smoothing)
    np.testing.assert_array_equal(reader.read("a.weight"), [[0, 0.5, 1], [3, 4, 5]])
    np.testing.assert_array_equal(reader.read("c.weight"), [[0, 1, 2], [3, 4, 5]])
    smoothing = Smoothing(columns={"b.weight": np.array([1, 0, -1], np.int8)})
    reader = SmoothedReader(source=Source(), smoothing=smoothing)
    np.testing.assert_array_equal(reader.read("b.weight"), [[0, 1, 1], [6, 4, 2.5]])
    reader = SmoothedReader(source=Source(), smoothing=NO_SMOOTHING)
    np.testing.assert_array_equal(reader.read("a.weight"), [[0, 1, 2], [3, 4, 5]])


def test_smoothing_survives_its_file_and_a_broken_one_is_refused(tmp_path):
    smoothing = calibrate(make_tiny_model(make_tiny_config(), seed=4))
    path = tmp_path / "smoothing.safetensors"
    write_smoothing(path, smoothing)
    found = read_smoothing(path)
    assert found.rows.keys() == smoothing.rows.keys()
    assert found.columns.keys() == smoothing.columns.keys()
    for name, exponents in smoothing.rows.items():
        np.testing.assert_array_equal(found.rows[name], exponents)
    for name, exponents in smoothing.columns.items():
        np.testing.assert_array_equal(found.columns[name], exponents)
    rotation = smoothing.rotation
    for name in [*rotation.gains, *rotation.readers, *rotation.tables, *rotation.writers, "other"]:
        size = rotation.basis.size
        array = np.random.default_rng(1).normal(size=(size, size)).astype(np.float32)
        np.testing.assert_array_equal(
            found.rotation.apply(name, array), rotation.apply(name, array), err_msg=name
        )
    for name in ROTATION_PRODUCTS:
        np.testing.assert_array_equal(found.rotation.product(name), rotation.product(name))
    path.write_bytes(b"nothing")
    with pytest.raises(BundleError, match=r"smoothing .* cannot be read .*rebuild the bundle"):
        read_smoothing(path)


def spoil_parts(**changes):
    def change(tensors, metadata):
        metadata["rotation"] = json.dumps(json.loads(metadata["rotation"]) | changes)

    return change


def spoil_tensor(name, make):
    def change(tensors, metadata):
        tensors[name] = make(tensors[name])

    return change


def other_metadata(tensors, metadata):
    metadata["rotation"] = "["


@pytest.mark.parametrize(
    "change",
    [
        other_metadata,
        spoil_parts(block=3),
        spoil_parts(block=0),
        spoil_parts(block=1.5),
        spoil_parts(last="no.norm"),
        spoil_parts(readers={"a.weight": ["b.weight"]}),
        spoil_parts(tables="letters"),
        spoil_parts(more=1),
        spoil_tensor("basis.signs", np.zeros_like),
        spoil_tensor("basis.signs", lambda signs: signs[:-1]),
        spoil_tensor("basis.odd", lambda odd: odd * np.nan),
        spoil_tensor("basis.odd", lambda odd: odd[0]),
        spoil_tensor("gains:model.norm.weight", lambda gain: gain[:-1]),
        lambda tensors, metadata: tensors.pop("basis.odd"),
    ],
)
def test_a_file_whose_parts_do_not_belong_together_is_refused(tmp_path, change):
    path = tmp_path / "smoothing.safetensors"
    write_smoothing(path, calibrate(make_tiny_model(make_tiny_config(), seed=4)))
    tensors = load_file(path)
    with safe_open(path, framework="numpy") as file:
        metadata = dict(file.metadata())
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)

    with pytest.raises(BundleError, match=r"smoothing .* cannot be read .*rebuild the bundle"):
        read_smoothing(path)


@pytest.mark.parametrize(
    "overrides", [{"hidden_size": 96}, {"num_hidden_layers": 1}, {"intermediate_size": 90}]
)
def test_the_smoothing_of_another_model_is_refused(overrides):
    smoothing = calibrate(make_tiny_model(make_tiny_config(), seed=4))
    other = make_tiny_model(make_tiny_config(**overrides))

    with pytest.raises(BundleError, match="the smoothing is of another model"):
        TorchReference(other, smoothing=smoothing)
