"""Products of integers: the same for a row whatever rows stand beside it, and those of the rule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import pytest

from la_export.graph.integer_nodes import find_integer_products
from la_export.graph.integer_parity import check_integer_products
from la_export.graph.parity import check_parity
from la_export.graph.sample import make_sample
from la_export.graph.session import GraphSession
from la_export.graph.twin import float_activations_twin
from la_export.options import Precision
from la_export.quantize.integers import quantize_rows
from la_export.quantize.smoothing_file import SMOOTHING_PATH, read_smoothing
from la_export.reference import TorchReference
from la_runtime.bundle import open_bundle
from la_runtime.contract import Name
from la_runtime.errors import CheckError
from tests.tiny_models import build_tiny_bundle

# SmolLM2-135M's own shapes, so that the kernels are those that it runs.
SHAPES = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 1,
}
MANY_ROWS = 25


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide")
    return open_bundle(build_tiny_bundle(folder, precision=Precision.INT8, **SHAPES))


@pytest.fixture(params=["portable", "lean"])
def graph(request, bundle):
    """Path and contract of one of its graphs."""
    manifest = bundle.manifest
    if request.param == "portable":
        return bundle.path(manifest.graph), manifest.contract
    (variant,) = manifest.variants
    return bundle.path(variant.path), variant.contract_of(manifest.contract)


@pytest.fixture
def sample(bundle, graph):
    reference = TorchReference.load(
        str(bundle.root.parent / "checkpoint"),
        precision=Precision.INT8,
        smoothing=read_smoothing(bundle.path(SMOOTHING_PATH)),
    )
    made = make_sample(bundle.manifest.contract, reference, context=bundle.manifest.model.context)
    return replace(made, contract=graph[1])


def cut_out(path, place):
    """A session of one product alone: its rows as input, what it gives as output."""
    model = ir.load(path)
    graph = model.graph
    product = list(find_integer_products(graph))[place]
    rows = ir.Value(name="rows_in", type=ir.TensorType(ir.DataType.FLOAT))
    for reader, index in list(product.activation.uses()):
        reader.replace_input_with(index, rows)
    kept = {Name.INPUT_IDS, Name.LOGITS_ROWS}
    graph.inputs[:] = [rows, *(value for value in graph.inputs if value.name in kept)]
    result = product.by_row.outputs[0]
    result.name, result.type = "rows_out", ir.TensorType(ir.DataType.FLOAT)
    graph.outputs[:] = [result]
    common_passes.RemoveUnusedNodesPass()(model)
    part = path.with_name(f".{place}.{path.name}")
    ir.save(model, part)
    try:
        return product, GraphSession(part, 1)
    finally:
        part.unlink()


@pytest.mark.parametrize("place", range(5))  # q k v; output; gate up; down; head
def test_every_linear_layer_gives_a_row_the_same_bits_alone_and_among_others(graph, place):
    product, session = cut_out(graph[0], place)
    rows = np.random.default_rng(7).normal(size=(1, MANY_ROWS, product.weight.shape[0]))
    rows = rows.astype(np.float32)
    rows[0, 3] = 0

    def run(block):
        ids = np.zeros(block.shape[:2], np.int64)
        feeds = {"rows_in": block, Name.INPUT_IDS.value: ids, Name.LOGITS_ROWS.value: ids}
        return session.run(feeds)["rows_out"]

    together = run(rows)
    alone = np.concatenate([run(rows[:, [row]]) for row in range(MANY_ROWS)], axis=1)

    np.testing.assert_array_equal(alone, together)
    assert not together[0, 3].any()
    np.testing.assert_allclose(together[0], expect(rows[0], product), rtol=4e-7, atol=0)


def expect(rows, product):
    """By NumPy, from integers that are exact in float64."""
    quantized = quantize_rows(rows)
    weight = product.weight.const_value.numpy().astype(np.float64)
    sums = (quantized.values.astype(np.float64) @ weight).astype(np.float32)
    scaled = sums * product.scales.const_value.numpy()
    return (scaled * quantized.scales[:, np.newaxis]).reshape(len(rows), -1)


def test_products_recomputed_from_the_graphs_own_activations_agree(graph, sample):
    path, _ = graph
    result = check_integer_products(path, sample, 1)
    assert result.value <= result.bound


def test_weights_with_other_scales_are_refused(graph, bundle):
    """Product by product all is well: it is the twin that differs from PyTorch."""
    path, contract = graph
    model = ir.load(path)
    product = next(iter(find_integer_products(model.graph)))
    numbers = np.float32(1.01) * product.scales.const_value.numpy()
    product.scales.const_value = ir.tensor(numbers, name=product.scales.name)
    spoiled = path.with_name(f".spoiled.{path.name}")
    ir.save(model, spoiled)
    reference = TorchReference.load(
        str(bundle.root.parent / "checkpoint"),
        precision=Precision.INT8,
        smoothing=read_smoothing(bundle.path(SMOOTHING_PATH)),
    )
    is_lean = contract != bundle.manifest.contract
    omits = bundle.manifest.variants[0].omits if is_lean else ()

    def check(place):
        context = bundle.manifest.model.context
        return check_parity(place, contract, reference, context=context, threads=1, omits=omits)

    check(path)
    try:
        with pytest.raises(CheckError, match=r"differs from PyTorch in float_activations\."):
            check(spoiled)
    finally:
        spoiled.unlink()


def test_a_quantizer_with_another_step_is_noticed(graph, sample):
    path, _ = graph
    model = ir.load(path)
    product = next(iter(find_integer_products(model.graph)))
    step = product.row_scales.producer()
    constant = next(v for v in step.inputs if v.is_initializer())
    constant.const_value = ir.tensor(np.float32(1 / 126), name=constant.name)
    spoiled = path.with_name(f".spoiled.{path.name}")
    ir.save(model, spoiled)

    result = check_integer_products(spoiled, sample, 1)
    spoiled.unlink()
    assert result.value > result.bound


def test_the_twin_multiplies_the_same_weights_by_floats(graph, sample, bundle):
    path, _ = graph
    before = {entry.name for entry in path.parent.iterdir()}
    reference = TorchReference.load(
        str(bundle.root.parent / "checkpoint"),
        precision=Precision.INT8,
        smoothing=read_smoothing(bundle.path(SMOOTHING_PATH)),
    )
    ids = [5, 6, 7, 8]
    with reference.float_activations():
        expected = reference.scores(ids)
    integers = reference.scores(ids)
    prompt = replace(
        sample,
        sequences=(replace(sample.sequences[0], past_ids=tuple(ids)),),
        truths=sample.truths[:1],
    )
    with float_activations_twin(path) as twin:
        found = GraphSession(twin, 1).run(prompt.make_prompt_feeds())[Name.LOGITS][0, ::-1]

    spread = np.ptp(expected)
    assert np.abs(found - expected).max() < 1e-5 * spread
    assert np.abs(integers - expected).max() > 1e-4 * spread
    assert {entry.name for entry in path.parent.iterdir()} == before
