from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from la_export.checkpoint.facts import OperatorCounts
from la_export.graph.check import check_graph_file
from la_export.graph.weights import WEIGHTS_FILE
from la_export.options import Precision
from la_export.pipeline import BuildReport
from la_runtime.bundle import GRAPH_PATH
from la_runtime.contract import CacheForm, Contract
from la_runtime.errors import CheckError
from tests.la_export.conftest import Form

# Two a layer and the last one.
COUNTS = OperatorCounts(attentions=2, rotations=4, tables=1, norms=5)


@pytest.fixture
def contract(report_of: Callable[[tuple[str, bool]], BuildReport]) -> Contract:
    return report_of(("llama", True)).manifest.contract


@pytest.fixture
def path(report_of: Callable[[tuple[str, bool]], BuildReport], tmp_path: Path) -> Path:
    """A copy of a good graph that a test may break."""
    source = (report_of(("llama", True)).bundle / GRAPH_PATH).parent
    return shutil.copytree(source, tmp_path / "onnx") / "model.onnx"


@pytest.fixture
def in_form(
    report_of: Callable[..., BuildReport], tmp_path: Path
) -> Callable[[Form], tuple[Path, Contract]]:
    """A copy of a good graph of another form, and its contract."""

    def copy(form: Form) -> tuple[Path, Contract]:
        report = report_of(("llama", True), form)
        source = (report.bundle / GRAPH_PATH).parent
        return shutil.copytree(source, tmp_path / "form") / "model.onnx", report.manifest.contract

    return copy


def _edit(path: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    model = onnx.load(path, load_external_data=False)
    change(model)
    onnx.save(model, path)


def _node(model: onnx.ModelProto, operator: str) -> onnx.NodeProto:
    node: onnx.NodeProto = next(node for node in model.graph.node if node.op_type == operator)
    return node


def test_good_graph_passes(path: Path, contract: Contract) -> None:
    result = check_graph_file(path, contract, COUNTS)
    assert result.value == result.bound == 0.0


def _rename_input(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if name == "position_ids":
                node.input[place] = "positions"
    model.graph.input[1].name = "positions"


def _rename_axis(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "sequence"


def _swap_outputs(model: onnx.ModelProto) -> None:
    outputs = [onnx.ValueInfoProto.FromString(o.SerializeToString()) for o in model.graph.output]
    del model.graph.output[:]
    model.graph.output.extend([*outputs[:-2], outputs[-1], outputs[-2]])


def _foreign_operator(model: onnx.ModelProto) -> None:
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    _node(model, "Sigmoid").domain = "com.microsoft"


def _second_cosine(model: onnx.ModelProto) -> None:
    cosine = _node(model, "Cos")
    place = list(model.graph.node).index(cosine)
    model.graph.node.insert(
        place, onnx.helper.make_node("Cos", list(cosine.input), ["again"], name="again")
    )


def _transpose_weight(model: onnx.ModelProto) -> None:
    matmul = _node(model, "MatMul")
    place = list(model.graph.node).index(matmul)
    node = onnx.helper.make_node("Transpose", [matmul.input[1]], ["turned"], name="turn")
    model.graph.node.insert(place, node)


def _inline_weight(model: onnx.ModelProto) -> None:
    big = next(t for t in model.graph.initializer if t.dims == [64, 64])
    size = 64 * 64 * 4
    del big.external_data[:]
    big.data_location = onnx.TensorProto.DEFAULT
    big.raw_data = bytes(size)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_rename_input, r"inputs differ: missing \['position_ids'\], unexpected \['positions'\]"),
        (_rename_axis, "input input_ids is .*'sequence'"),
        (_swap_outputs, "outputs differ"),
        (_foreign_operator, "com.microsoft"),
        (_second_cosine, "2 Cos operators, expected 1"),
        (_transpose_weight, r"weight .* is transposed in the graph"),
        (_inline_weight, "bytes is not in model.onnx.data"),
    ],
)
def test_planted_fault_is_named(
    path: Path,
    contract: Contract,
    fault: Callable[[onnx.ModelProto], None],
    message: str,
) -> None:
    _edit(path, fault)
    with pytest.raises(CheckError, match=message):
        check_graph_file(path, contract, COUNTS)


def test_truncated_weights_are_noticed(path: Path, contract: Contract) -> None:
    data = path.parent / WEIGHTS_FILE
    data.write_bytes(data.read_bytes()[:-4096])
    with pytest.raises(CheckError):
        check_graph_file(path, contract, COUNTS)


def test_missing_weights_are_noticed(path: Path, contract: Contract) -> None:
    (path.parent / WEIGHTS_FILE).unlink()
    with pytest.raises(CheckError, match=r"onnx\.checker"):
        check_graph_file(path, contract, COUNTS)


def test_normalization_that_was_not_fused_is_noticed(path: Path, contract: Contract) -> None:
    with pytest.raises(CheckError, match="5 RMSNormalization operators, expected 9"):
        check_graph_file(path, contract, replace(COUNTS, norms=9))


def _newer_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 25


def _scatter_missing(model: onnx.ModelProto) -> None:
    """The last layer attends to its past alone and gives it out again."""
    node = [node for node in model.graph.node if node.op_type == "TensorScatter"][-1]
    node.op_type = "Identity"
    del node.input[1:]
    del node.attribute[:]


def _second_attention_output(model: onnx.ModelProto) -> None:
    node = _node(model, "Attention")
    node.output.extend(["unused_key", "unused_value"])


def _cast_initializer(model: onnx.ModelProto, suffix: str, held: type, used: int) -> None:
    """Hold an initializer in one dtype and use it in another."""
    del model.graph.value_info[:]
    tensor = next(t for t in model.graph.initializer if t.name.endswith(suffix))
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.ones(tensor.dims, held), tensor.name))
    user = next(node for node in model.graph.node if tensor.name in node.input)
    place = list(model.graph.node).index(user)
    user.input[list(user.input).index(tensor.name)] = "cast_weight"
    cast = onnx.helper.make_node("Cast", [tensor.name], ["cast_weight"], name="cast", to=used)
    model.graph.node.insert(place, cast)


def _float32_weight(model: onnx.ModelProto) -> None:
    _cast_initializer(model, "model.norm.weight", np.float32, onnx.TensorProto.FLOAT16)


def _rounded_frequencies(model: onnx.ModelProto) -> None:
    _cast_initializer(model, "inv_freq", np.float16, onnx.TensorProto.FLOAT)


def _norm_in_half(model: onnx.ModelProto) -> None:
    node = _node(model, "RMSNormalization")
    next(entry for entry in node.attribute if entry.name == "stash_type").i = 10


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_newer_opset, "opset 25, expected 24"),
        (_scatter_missing, "3 TensorScatter operators, expected 4"),
        (_second_attention_output, "Attention has 4 inputs and 3 outputs, expected 4 and 1"),
        (_float32_weight, "initializer model.norm.weight is FLOAT, expected FLOAT16"),
        (_rounded_frequencies, "inv_freq is FLOAT16, expected FLOAT"),
        (_norm_in_half, "a normalization is computed in FLOAT16, expected FLOAT"),
    ],
)
def test_planted_fault_of_a_half_precision_scatter_graph_is_named(
    in_form: Callable[[Form], tuple[Path, Contract]],
    fault: Callable[[onnx.ModelProto], None],
    message: str,
) -> None:
    path, contract = in_form((Precision.FP16, CacheForm.SCATTER))
    _edit(path, fault)
    with pytest.raises(CheckError, match=message):
        check_graph_file(path, contract, COUNTS)


def test_types_that_do_not_go_together_are_refused_by_the_checker(
    path: Path, contract: Contract
) -> None:
    def narrow(model: onnx.ModelProto) -> None:
        cast = onnx.helper.make_attribute("to", onnx.TensorProto.FLOAT16)
        _node(model, "Cast").attribute[0].CopyFrom(cast)

    _edit(path, narrow)
    with pytest.raises(CheckError, match=r"refused by onnx\.checker"):
        check_graph_file(path, contract, COUNTS)


def test_graph_of_another_precision_is_refused(
    in_form: Callable[[Form], tuple[Path, Contract]], contract: Contract
) -> None:
    path, _ = in_form((Precision.BF16, CacheForm.CONCAT))
    with pytest.raises(CheckError, match=r"input attention_mask is .*BFLOAT16.*expected .*FLOAT"):
        check_graph_file(path, contract, COUNTS)
