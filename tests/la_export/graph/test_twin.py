from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from la_export.graph.twin import float32_twin
from la_export.graph.weights import WEIGHTS_FILE
from la_export.options import Precision
from la_export.pipeline import BuildReport
from la_runtime.bundle import GRAPH_PATH
from la_runtime.contract import CacheForm

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@pytest.fixture(params=[Precision.FP16, Precision.BF16])
def path(request: pytest.FixtureRequest, report_of: Callable[..., BuildReport]) -> Path:
    return report_of(("llama", True), (request.param, CacheForm.SCATTER)).bundle / GRAPH_PATH


def test_twin_has_the_same_nodes_and_numbers_and_computes_nothing_in_half_precision(
    path: Path,
) -> None:
    graph = ir.load(path).graph
    halves = [name for name, value in graph.initializers.items() if value.dtype in HALVES]
    with float32_twin(path) as twin:
        widened = ir.load(twin).graph
        nodes = list(widened)
        casts, others = nodes[: len(halves)], nodes[len(halves) :]
        assert [node.op_type for node in others] == [node.op_type for node in graph]
        assert {node.op_type for node in casts} == {"Cast"}
        assert {node.inputs[0].name for node in casts if node.inputs[0] is not None} == set(halves)
        assert not [
            node.name
            for node in others
            for value in node.inputs
            if value is not None and value.dtype in HALVES
        ]
        assert (
            twin.with_name(WEIGHTS_FILE).read_bytes() == path.with_name(WEIGHTS_FILE).read_bytes()
        )
        edges = [*widened.inputs, *widened.outputs]
        assert not [value.name for value in edges if value.dtype in HALVES]
        targets = [node.attributes["to"].as_int() for node in widened if node.op_type == "Cast"]
        assert set(targets) == {ir.DataType.FLOAT}


def test_twin_on_another_disk_has_a_copy_of_the_weights(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    with float32_twin(path, folder=tmp_path) as twin:
        assert twin.is_relative_to(tmp_path)
        assert (
            twin.with_name(WEIGHTS_FILE).read_bytes() == path.with_name(WEIGHTS_FILE).read_bytes()
        )


def test_twin_is_gone_afterwards_and_the_graph_as_it_was(path: Path) -> None:
    before = {entry: entry.read_bytes() for entry in path.parent.iterdir()}
    with float32_twin(path) as twin:
        assert twin.is_file()
    with pytest.raises(RuntimeError, match="in the middle"), float32_twin(path):
        raise RuntimeError("in the middle")
    assert {entry: entry.read_bytes() for entry in path.parent.iterdir()} == before
