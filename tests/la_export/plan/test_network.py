from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import helper

from la_export.plan.log import make_log
from la_export.plan.namespace import Installation
from la_export.plan.network import (
    ParsedGraph,
    check_network,
    let_attention_decompose,
    read_graph,
)
from la_runtime.contract import CacheForm, Contract, Dtype
from la_runtime.errors import PlanError
from tests.la_export.plan.graphs import make_contract, make_model, save_model

DTYPES = [Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BFLOAT16]


def _read(installation: Installation, graph: Path) -> ParsedGraph:
    log = make_log(installation.trt)
    return read_graph(installation, installation.trt.Builder(log), graph, log=log)


@pytest.mark.parametrize("cache_form", CacheForm)
@pytest.mark.parametrize("dtype", DTYPES)
def test_network_has_names_dtypes_and_dimensions_of_the_contract(
    cache_form: CacheForm,
    dtype: Dtype,
    installation: Installation,
    graph_of: Callable[[CacheForm, Dtype], Path],
) -> None:
    parsed = _read(installation, graph_of(cache_form, dtype))

    check_network(installation.trt, parsed.network, make_contract(cache_form, dtype))


def _with_other_layers(contract: Contract) -> Contract:
    return replace(contract, num_layers=3)


def _with_other_dtype(contract: Contract) -> Contract:
    return replace(contract, compute_dtype=Dtype.FLOAT32)


def _with_other_vocabulary(contract: Contract) -> Contract:
    return replace(contract, vocab_size=81)


def _with_other_vectors(contract: Contract) -> Contract:
    return replace(contract, k_max=7)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_with_other_layers, "input past_key_values.2.key is in one of them only"),
        (_with_other_dtype, "input attention_mask is DataType.HALF, expected float32"),
        (
            _with_other_vectors,
            r"input lookahead_embeddings has dimensions [8, 32], expected [7, 32]",
        ),
        (
            _with_other_vocabulary,
            "output logits has dimensions [-1, -1, 80], expected [-1, -1, 81]",
        ),
    ],
)
def test_graph_of_another_contract_is_refused(
    change: Callable[[Contract], Contract],
    problem: str,
    installation: Installation,
    graph_of: Callable[[CacheForm, Dtype], Path],
) -> None:
    parsed = _read(installation, graph_of(CacheForm.CONCAT, Dtype.FLOAT16))

    with pytest.raises(PlanError) as caught:
        check_network(installation.trt, parsed.network, change(make_contract()))

    assert f"the graph is not the manifest's: {problem}; build the bundle again" == str(
        caught.value
    )


def test_dimension_of_another_name_is_refused(installation: Installation, tmp_path: Path) -> None:
    """Ranges are given by name: a graph with other names would get none."""
    model = make_model(make_contract())
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "width"

    parsed = _read(installation, save_model(tmp_path, model))

    with pytest.raises(PlanError, match=r"input input_ids has dimensions \['batch', 'width'\]"):
        check_network(installation.trt, parsed.network, make_contract())


def test_every_attention_may_be_decomposed(
    installation: Installation, graph_of: Callable[[CacheForm, Dtype], Path]
) -> None:
    trt = installation.trt
    parsed = _read(installation, graph_of(CacheForm.CONCAT, Dtype.FLOAT32))

    assert let_attention_decompose(trt, parsed.network) == make_contract().num_layers

    layers = [parsed.network.get_layer(index) for index in range(parsed.network.num_layers)]
    attentions = [layer for layer in layers if layer.type == trt.LayerType.ATTENTION_OUTPUT]
    for layer in attentions:
        layer.__class__ = trt.IAttentionOutputLayer
    assert [layer.attention.decomposable for layer in attentions] == [True, True]


# --- what cannot be imported


def _with_present_outputs(nodes: list[onnx.NodeProto]) -> None:
    for node in nodes:
        if node.op_type == "Attention":
            node.output.extend([f"{node.name}.key", f"{node.name}.value"])


def _with_past_inputs(nodes: list[onnx.NodeProto]) -> None:
    for layer, node in enumerate(node for node in nodes if node.op_type == "Attention"):
        node.input.extend([f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"])


def _with_contributed_operator(nodes: list[onnx.NodeProto]) -> None:
    for node in nodes:
        if node.op_type == "Sigmoid":
            node.op_type, node.domain = "QuickGelu", "com.microsoft"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            _with_present_outputs,
            ["'layer0.attention', operator Attention: ", "only supports Attention nodes with one"],
        ),
        (
            _with_past_inputs,
            ["'layer0.attention', operator Attention: ", "Setting past_key for the Attention"],
        ),
        (
            _with_contributed_operator,
            [
                "node 25, operator QuickGelu: ",
                "; node 52, operator QuickGelu: ",
                "Plugin not found",
            ],
        ),
    ],
)
def test_graph_that_cannot_be_imported_is_told_with_node_operator_and_reason(
    change: Callable[[list[onnx.NodeProto]], None],
    told: list[str],
    installation: Installation,
    tmp_path: Path,
) -> None:
    model = make_model(make_contract(), change=change)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))

    with pytest.raises(PlanError) as caught:
        _read(installation, save_model(tmp_path, model))

    message = str(caught.value)
    assert message.startswith(f"the graph model.onnx cannot be imported by {installation.title}: ")
    for part in (*told, "or use --target onnx"):
        assert part in message


def test_cache_whose_capacity_is_open_is_told(installation: Installation, tmp_path: Path) -> None:
    model = make_model(make_contract(CacheForm.SCATTER))
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("past", "present")):
            value.type.tensor_type.shape.dim[2].dim_param = "capacity"

    with pytest.raises(PlanError) as caught:
        _read(installation, save_model(tmp_path, model))

    assert "operator TensorScatter: " in str(caught.value)
    assert "must have a static sequence length dimension" in str(caught.value)
    assert "catchCudaError" not in str(caught.value)


def test_file_that_is_no_graph_is_told(installation: Installation, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")

    with pytest.raises(PlanError, match="Failed to parse the ONNX model"):
        _read(installation, tmp_path / "model.onnx")
