"""Graphs that serve one backend better."""

from __future__ import annotations

import shutil
from collections import Counter

import onnx
import pytest

from la_export.graph.variants import (
    CPU_GRAPH_FILE,
    CPU_OMITS,
    check_variant,
    write_cpu_variant,
)
from la_export.options import Precision
from la_export.reference import TorchReference
from la_runtime.bundle import open_bundle
from la_runtime.contract import CacheForm, KvOrder, RowPlaces
from la_runtime.errors import CheckError
from tests.tiny_models import FAMILIES, build_tiny_bundle

HALF = (Precision.FP16, CacheForm.SCATTER)
# What the lean graph is made to be without: heads moved about, a cache joined with the block.
UNWANTED = {"Transpose", "Sigmoid"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return open_bundle(build_tiny_bundle(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def make_graph(bundle, tmp_path):
    """A copy of a bundle's graphs, to be spoiled, and how to check the variant among them."""

    def make(root=bundle.root, precision=Precision.FP32):
        shutil.copytree(root / "onnx", tmp_path / "onnx")
        manifest = open_bundle(root).manifest
        graph = tmp_path / "onnx" / "model.onnx"
        variant = write_cpu_variant(graph, manifest.contract, precision)
        checkpoint = str(root.parent / "checkpoint")

        def check():
            reference = TorchReference.load(checkpoint, precision=precision)
            return check_variant(
                graph,
                graph.with_name(CPU_GRAPH_FILE),
                variant,
                reference,
                contract=manifest.contract,
                context=manifest.model.context,
                threads=1,
            )

        return graph.with_name(CPU_GRAPH_FILE), check

    return make


def spoil(path, change):
    model = onnx.load(path, load_external_data=False)
    change(model.graph)
    onnx.save(model, path)


def other_epsilon(graph):
    node = next(n for n in graph.node if n.op_type == "RMSNormalization")
    next(a for a in node.attribute if a.name == "epsilon").f = 0.5


def other_cache(graph):
    scatters = [node for node in graph.node if node.op_type in ("ScatterND", "TensorScatter")]
    block = 2 if scatters[-1].op_type == "ScatterND" else 1
    scatters[-1].input[block] = scatters[-2].input[block]


def one_output_less(graph):
    del graph.output[1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
def test_the_lean_graph_moves_no_head_and_copies_no_cache(tmp_path, family, precision):
    bundle = open_bundle(build_tiny_bundle(tmp_path, family, precision=precision))
    manifest = bundle.manifest
    (variant,) = manifest.variants
    assert (variant.backend, variant.omits) == ("ort-cpu", CPU_OMITS)
    assert (variant.kv_order, variant.cache_form) == (KvOrder.SEQUENCE_MAJOR, CacheForm.SCATTER)
    assert variant.row_places is RowPlaces.CHOSEN

    lean = onnx.load(bundle.path(variant.path), load_external_data=False).graph

    operators = Counter(node.op_type for node in lean.node)
    assert not UNWANTED & set(operators)
    layers = manifest.contract.num_layers
    assert operators["ScatterND"] == 2 * layers
    assert operators["QuickGelu"] == layers
    # The places of rows; the spare row: of the mask, of each query.
    assert operators["Concat"] == 2 + layers
    if precision is Precision.INT8:  # q k v; output; gate up; down; head
        assert operators["SkipSimplifiedLayerNormalization"] == 2 * layers
        assert operators["MatMulIntegerToFloat"] == 4 * layers + 1
        # What turns lookahead vectors, the head's input, and that of each down projection.
        assert operators["MatMul"] == 2 + layers
    assert [output.name for output in lean.output][:3] == ["logits", "top_ids", "top_logits"]


def test_both_graphs_share_one_weights_file(bundle):
    names = {path.name for path in (bundle.root / "onnx").iterdir()}

    assert names == {"model.onnx", "model.onnx.data", CPU_GRAPH_FILE}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_epsilon, r"differs from PyTorch in ort-cpu\.logits"),
        (other_cache, r"differs from PyTorch in ort-cpu\.logits"),
        (one_output_less, r"breaks the contract: outputs differ: missing \['top_ids'\]"),
    ],
)
def test_a_lean_graph_that_is_another_is_refused(make_graph, change, message):
    variant, check = make_graph()
    check()
    spoil(variant, change)

    with pytest.raises(CheckError, match=message):
        check()


def test_a_half_precision_variant_is_compared_bit_for_bit(report_of, checkpoint_of, tmp_path):
    report = report_of(("llama", True), HALF)
    shutil.copytree(report.bundle / "onnx", tmp_path / "onnx")
    graph, contract = tmp_path / "onnx" / "model.onnx", report.manifest.contract
    variant = write_cpu_variant(graph, contract, HALF[0])
    reference = TorchReference.load(str(checkpoint_of(("llama", True))), precision=HALF[0])

    def check():
        path = graph.with_name(CPU_GRAPH_FILE)
        return check_variant(
            graph, path, variant, reference, contract=contract, context=256, threads=1
        )

    (found,) = check()
    assert found.value == 0
    spoil(graph.with_name(CPU_GRAPH_FILE), other_cache)

    with pytest.raises(CheckError, match=r"differs from the portable graph in logits"):
        check()
    write_cpu_variant(graph, contract, HALF[0])
    spoil(graph.with_name(CPU_GRAPH_FILE), one_output_less)
    with pytest.raises(CheckError, match=r"has outputs .*expected"):
        check()


def test_a_precision_that_no_cpu_computes_in_has_no_variant(report_of):
    report = report_of(("llama", True), (Precision.BF16, CacheForm.SCATTER))
    assert report.manifest.variants == ()
