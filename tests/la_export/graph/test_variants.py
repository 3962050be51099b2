"""Graphs that serve one backend better."""

from __future__ import annotations

import shutil

import onnx
import pytest

from la_export.graph.variants import (
    CPU_GRAPH_FILE,
    CPU_OMITS,
    check_cpu_variant,
    write_cpu_variant,
)
from la_export.options import Precision
from la_runtime.bundle import open_bundle
from la_runtime.contract import CacheForm
from la_runtime.errors import CheckError
from tests.tiny_models import build_tiny_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return open_bundle(build_tiny_bundle(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def graph(bundle, tmp_path):
    shutil.copytree(bundle.root / "onnx", tmp_path / "onnx")
    return tmp_path / "onnx" / "model.onnx"


def check(graph, variant, bundle):
    contract = bundle.manifest.contract
    return check_cpu_variant(graph, variant, contract, context=64, threads=1)


def test_the_variant_lacks_what_it_omits_and_the_nodes_that_made_it(bundle):
    manifest = bundle.manifest
    (variant,) = manifest.variants
    assert (variant.backend, variant.omits) == ("ort-cpu", CPU_OMITS)

    full = onnx.load(bundle.path(manifest.graph), load_external_data=False).graph
    lean = onnx.load(bundle.path(variant.path), load_external_data=False).graph

    omitted = {output.name for output in full.output} - {output.name for output in lean.output}
    assert omitted == set(CPU_OMITS)
    full_operators = sorted(node.op_type for node in full.node)
    assert sorted([*(node.op_type for node in lean.node), "ReduceLogSumExp"]) == full_operators


def test_both_graphs_share_one_weights_file(bundle):
    names = {path.name for path in (bundle.root / "onnx").iterdir()}

    assert names == {"model.onnx", "model.onnx.data", CPU_GRAPH_FILE}


def test_a_variant_that_computes_something_else_is_refused(graph, bundle):
    variant = write_cpu_variant(graph)
    assert check(graph, variant, bundle).value == 0
    model = onnx.load(variant, load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "RMSNormalization")
    next(a for a in node.attribute if a.name == "epsilon").f = 0.5
    onnx.save(model, variant)

    with pytest.raises(CheckError, match=r"differs from the portable graph in logits"):
        check(graph, variant, bundle)


def test_a_variant_with_other_outputs_is_refused(graph, bundle):
    variant = write_cpu_variant(graph)
    model = onnx.load(variant, load_external_data=False)
    del model.graph.output[1]
    onnx.save(model, variant)

    with pytest.raises(CheckError, match=r"has outputs .*expected"):
        check(graph, variant, bundle)


def test_a_scatter_variant_in_half_precision_is_compared_bit_for_bit(report_of, tmp_path):
    report = report_of(("llama", True), (Precision.FP16, CacheForm.SCATTER))
    shutil.copytree(report.bundle / "onnx", tmp_path / "onnx")
    graph = tmp_path / "onnx" / "model.onnx"
    variant = write_cpu_variant(graph)
    assert (
        check_cpu_variant(graph, variant, report.manifest.contract, context=256, threads=1).value
        == 0
    )
    model = onnx.load(variant, load_external_data=False)
    scatters = [node for node in model.graph.node if node.op_type == "TensorScatter"]
    scatters[-1].input[1] = scatters[-2].input[1]
    onnx.save(model, variant)

    with pytest.raises(CheckError, match=r"differs from the portable graph in logits"):
        check_cpu_variant(graph, variant, report.manifest.contract, context=256, threads=1)


def test_a_precision_that_no_cpu_computes_in_has_no_variant(report_of):
    report = report_of(("llama", True), (Precision.BF16, CacheForm.SCATTER))
    assert report.manifest.variants == ()
    assert not (report.bundle / "onnx" / CPU_GRAPH_FILE).exists()
