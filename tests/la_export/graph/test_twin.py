from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from la_export.graph.twin import float32_twin
from la_export.options import Precision
from la_export.pipeline import BuildReport
from la_runtime.bundle import GRAPH_PATH
from la_runtime.contract import CacheForm

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@pytest.fixture(params=[Precision.FP16, Precision.BF16])
def path(request: pytest.FixtureRequest, report_of: Callable[..., BuildReport]) -> Path:
    return report_of(("llama", True), (request.param, CacheForm.SCATTER)).bundle / GRAPH_PATH


def test_twin_has_the_same_nodes_and_numbers_and_nothing_in_half_precision(path: Path) -> None:
    graph = ir.load(path).graph
    with float32_twin(path) as twin:
        widened = ir.load(twin).graph
        assert [node.op_type for node in widened] == [node.op_type for node in graph]
        assert list(widened.initializers) == list(graph.initializers)
        for name, value in widened.initializers.items():
            source = graph.initializers[name].const_value
            assert value.const_value is not None
            assert source is not None
            assert value.dtype not in HALVES
            np.testing.assert_array_equal(
                value.const_value.numpy(), source.numpy().astype(value.const_value.numpy().dtype)
            )
        edges = [*widened.inputs, *widened.outputs]
        assert not [value.name for value in edges if value.dtype in HALVES]
        casts = [node.attributes["to"].as_int() for node in widened if node.op_type == "Cast"]
        assert set(casts) == {ir.DataType.FLOAT}


def test_twin_is_gone_afterwards_and_the_graph_as_it_was(path: Path) -> None:
    before = {entry: entry.read_bytes() for entry in path.parent.iterdir()}
    with float32_twin(path) as twin:
        assert twin.is_file()
    with pytest.raises(RuntimeError, match="in the middle"), float32_twin(path):
        raise RuntimeError("in the middle")
    assert {entry: entry.read_bytes() for entry in path.parent.iterdir()} == before
