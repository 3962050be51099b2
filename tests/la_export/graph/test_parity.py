from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from la_export.graph.parity import check_parity
from la_export.graph.weights import WEIGHTS_FILE
from la_export.options import BuildOptions, Precision
from la_export.pipeline import BuildReport, build
from la_export.reference import TorchReference
from la_runtime.bundle import GRAPH_PATH
from la_runtime.contract import CacheForm
from la_runtime.errors import CheckError
from tests.la_export.conftest import Form
from tests.tiny_models import make_tiny_config, make_tiny_model, make_tiny_tokenizer

VARIANT = ("llama", True)


@pytest.fixture
def path(report_of: Callable[[tuple[str, bool]], BuildReport], tmp_path: Path) -> Path:
    """A copy of a good graph that a test may break."""
    source = (report_of(VARIANT).bundle / GRAPH_PATH).parent
    return shutil.copytree(source, tmp_path / "onnx") / "model.onnx"


@pytest.fixture
def check(
    path: Path,
    report_of: Callable[[tuple[str, bool]], BuildReport],
    checkpoint_of: Callable[[tuple[str, bool]], Path],
) -> Callable[[], object]:
    reference = TorchReference.load(str(checkpoint_of(VARIANT)))
    contract = report_of(VARIANT).manifest.contract
    return lambda: check_parity(path, contract, reference, context=256, threads=1)


Check = Callable[[Path], object]


@pytest.fixture
def in_form(
    report_of: Callable[..., BuildReport],
    checkpoint_of: Callable[[tuple[str, bool]], Path],
    tmp_path: Path,
) -> Callable[[Form], tuple[Path, Check]]:
    """A copy of a good graph of another form, and the check of it."""

    def copy(form: Form) -> tuple[Path, Check]:
        report = report_of(VARIANT, form)
        source = (report.bundle / GRAPH_PATH).parent
        path = shutil.copytree(source, tmp_path / "form") / "model.onnx"
        contract = report.manifest.contract
        precision, _ = form
        reference = TorchReference.load(str(checkpoint_of(VARIANT)), precision=precision)
        return path, lambda path: check_parity(path, contract, reference, context=256, threads=1)

    return copy


def _edit(path: Path, change: Callable[[onnx.GraphProto], None]) -> None:
    model = onnx.load(path, load_external_data=False)
    change(model.graph)
    onnx.save(model, path)


def _set_scale(graph: onnx.GraphProto) -> None:
    node = [node for node in graph.node if node.op_type == "Attention"][-1]
    next(entry for entry in node.attribute if entry.name == "scale").f *= 1.01


def _set_epsilon(graph: onnx.GraphProto) -> None:
    node = next(node for node in graph.node if node.op_type == "RMSNormalization")
    next(entry for entry in node.attribute if entry.name == "epsilon").f = 1e-2


def _swap_rotary(graph: onnx.GraphProto) -> None:
    node = next(node for node in graph.node if node.op_type == "RotaryEmbedding")
    node.input[1], node.input[2] = node.input[2], node.input[1]


def _ignore_mask(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        if node.op_type == "Attention":
            node.input[3] = ""
            node.attribute.append(onnx.helper.make_attribute("is_causal", 1))


def _ignore_lookahead(graph: onnx.GraphProto) -> None:
    node = [node for node in graph.node if node.op_type == "Where"][-1]
    node.input[1] = node.input[2]


def _first_rows_only(graph: onnx.GraphProto) -> None:
    """Ask for row 0 wherever the input asks for another."""
    node = next(node for node in graph.node if node.op_type == "GatherElements")
    place = list(graph.node).index(node)
    zero = onnx.numpy_helper.from_array(np.zeros(1, np.int64), "no_row")
    graph.initializer.append(zero)
    graph.node.insert(
        place, onnx.helper.make_node("Mul", [node.input[1], "no_row"], ["first_rows"], name="first")
    )
    node.input[1] = "first_rows"


def test_good_graph_passes(check: Callable[[], object]) -> None:
    check()


@pytest.mark.parametrize(
    "fault",
    [_set_scale, _set_epsilon, _swap_rotary, _ignore_mask, _ignore_lookahead, _first_rows_only],
)
def test_fault_in_the_graph_is_caught(
    path: Path, check: Callable[[], object], fault: Callable[[onnx.GraphProto], None]
) -> None:
    _edit(path, fault)
    with pytest.raises(CheckError, match="differs from PyTorch"):
        check()


@pytest.mark.parametrize(
    "form", [(Precision.FP16, CacheForm.CONCAT), (Precision.BF16, CacheForm.SCATTER)]
)
@pytest.mark.parametrize("fault", [_set_scale, _set_epsilon, _ignore_lookahead])
def test_fault_in_a_half_precision_graph_is_caught(
    in_form: Callable[[Form], tuple[Path, Check]],
    form: Form,
    fault: Callable[[onnx.GraphProto], None],
) -> None:
    """Faults of a hundredth, which the allowance of half precision alone might hide."""
    path, check = in_form(form)
    check(path)
    _edit(path, fault)
    with pytest.raises(CheckError, match="differs from PyTorch"):
        check(path)


def _write_elsewhere(graph: onnx.GraphProto, *nodes: onnx.NodeProto) -> None:
    """Let every layer write where the last of these nodes says."""
    for node in graph.node:
        if node.op_type == "TensorScatter":
            node.input[2] = nodes[-1].output[0]
    for place, node in enumerate(nodes):
        graph.node.insert(place, node)


def _node(operator: str, inputs: list[str], output: str, **attributes: int) -> onnx.NodeProto:
    return onnx.helper.make_node(operator, inputs, [output], name=output, **attributes)


def _ignore_write_index(graph: onnx.GraphProto) -> None:
    _write_elsewhere(graph, _node("Sub", ["write_index", "write_index"], "zeros"))


def _write_one_place_late(graph: onnx.GraphProto) -> None:
    graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1, np.int64), "one"))
    _write_elsewhere(graph, _node("Add", ["write_index", "one"], "late"))


def _write_all_behind_the_longest(graph: onnx.GraphProto) -> None:
    """As in cache form `concat`: right for a batch of one length."""
    _write_elsewhere(
        graph,
        _node("ReduceMax", ["write_index"], "longest", keepdims=1),
        _node("Sub", ["write_index", "write_index"], "zeros"),
        _node("Add", ["longest", "zeros"], "behind_longest"),
    )


def _mask_softly(graph: onnx.GraphProto) -> None:
    """Hidden places weigh exp(-16): too little to see in the scores while they hold zeros."""
    graph.initializer.append(onnx.numpy_helper.from_array(np.float32([1.6e-8]), "soft"))
    for node in graph.node:
        if node.op_type == "Attention":
            node.input[3] = "soft_mask"
    graph.node.insert(0, _node("Mul", ["attention_mask", "soft"], "soft_mask"))


def _forget_the_past(graph: onnx.GraphProto) -> None:
    """Attention reads the whole cache, but only the block leaves the graph."""
    scatter = [node for node in graph.node if node.op_type == "TensorScatter"][-1]
    past, block, index = scatter.input
    present = scatter.output[0]
    for node in graph.node:
        node.input[:] = ["whole" if name == present else name for name in node.input]
    scatter.output[0] = "whole"
    graph.node.append(_node("Sub", [past, past], "no_past"))
    graph.node.append(_node("TensorScatter", ["no_past", block, index], present, axis=2))


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (_ignore_write_index, "logits"),
        (_write_one_place_late, "logits"),
        (_write_all_behind_the_longest, "logits"),
        (_mask_softly, "stale_places"),
        (_forget_the_past, "other_places"),
    ],
)
def test_fault_in_the_use_of_the_cache_is_caught(
    in_form: Callable[[Form], tuple[Path, Check]],
    fault: Callable[[onnx.GraphProto], None],
    where: str,
) -> None:
    path, check = in_form((Precision.FP32, CacheForm.SCATTER))
    check(path)
    _edit(path, fault)
    with pytest.raises(CheckError, match=f"differs from PyTorch in {where}:"):
        check(path)


def test_one_changed_weight_is_caught(path: Path, check: Callable[[], object]) -> None:
    data = path.parent / WEIGHTS_FILE
    values = np.fromfile(data, np.float32)
    values[len(values) // 2] += 1.0
    values.tofile(data)
    with pytest.raises(CheckError, match=r"differs from PyTorch in \w+.* no bundle was written"):
        check()


def test_worst_tokens_in_place_of_best_are_caught(path: Path, check: Callable[[], object]) -> None:
    def smallest(graph: onnx.GraphProto) -> None:
        node = next(node for node in graph.node if node.op_type == "TopK")
        next(entry for entry in node.attribute if entry.name == "largest").i = 0

    _edit(path, smallest)
    with pytest.raises(CheckError, match="in top"):
        check()


def test_model_that_says_one_thing_is_refused(tmp_path: Path) -> None:
    """Weights of zero give equal scores everywhere, with which nothing can be compared."""
    model = make_tiny_model(make_tiny_config(num_hidden_layers=1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.save_pretrained(tmp_path / "zero")
    make_tiny_tokenizer().save(str(tmp_path / "zero" / "tokenizer.json"))
    options = BuildOptions(
        model=str(tmp_path / "zero"), lookahead_lengths=(2,), out=tmp_path / "out"
    )
    with pytest.raises(CheckError, match="every value of logits is 0"):
        build(options)
    assert not (tmp_path / "out").exists()
