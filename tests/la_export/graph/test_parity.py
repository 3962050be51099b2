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
from la_export.options import BuildOptions
from la_export.pipeline import BuildReport, build
from la_export.reference import TorchReference
from la_runtime.bundle import GRAPH_PATH
from la_runtime.errors import CheckError
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
