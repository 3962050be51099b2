from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from la_export.graph.step_graph import StepGraph, WeightSource
from la_export.graph.weights import WEIGHTS_FILE, write_graph
from la_runtime.contract import Contract
from la_runtime.errors import CheckpointError

SHAPE = (64, 32)


def _make_graph(num_weights: int, *, transposed: bool = False) -> StepGraph:
    """A graph that is nothing but weights behind the contract's inputs."""
    contract = Contract(
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        hidden_size=32,
        vocab_size=64,
        k_max=1,
        top_c=8,
    )
    edge = [ir.Value(name=str(spec.name)) for spec in contract.inputs]
    names = [f"weight.{index}" for index in range(num_weights)]
    shape = SHAPE[::-1] if transposed else SHAPE
    weights = [
        ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        for name in names
    ]
    graph = ir.Graph([*edge, *weights], [], nodes=[], opset_imports={"": 23}, name="step")
    return StepGraph(
        model=ir.Model(graph, ir_version=10),
        contract=contract,
        weights={name: WeightSource(parameter=name, transposed=transposed) for name in names},
    )


class _CountingReader:
    """Gives random tensors and watches how many of them are alive."""

    def __init__(self) -> None:
        self._alive: list[weakref.ref[NDArray[np.float32]]] = []
        self.most_alive = 0
        self.reads: list[str] = []

    def read(self, parameter: str) -> NDArray[np.float32]:
        array = self.expected(parameter)
        self._alive = [entry for entry in self._alive if entry() is not None]
        self._alive.append(weakref.ref(array))
        self.most_alive = max(self.most_alive, len(self._alive))
        self.reads.append(parameter)
        return array

    @staticmethod
    def expected(parameter: str) -> NDArray[np.float32]:
        index = int(parameter.rsplit(".", 1)[1])
        return np.random.default_rng(index).normal(size=SHAPE).astype(np.float32)


@pytest.mark.parametrize("transposed", [False, True])
def test_at_most_two_tensors_are_alive_however_many_are_written(
    tmp_path: Path, transposed: bool
) -> None:
    reader = _CountingReader()
    write_graph(_make_graph(50, transposed=transposed), reader, tmp_path)
    assert len(set(reader.reads)) == 50
    assert reader.most_alive <= 2


@pytest.mark.parametrize("transposed", [False, True])
def test_file_holds_every_tensor_as_the_graph_wants_it(tmp_path: Path, transposed: bool) -> None:
    path = write_graph(_make_graph(3, transposed=transposed), _CountingReader(), tmp_path)
    for name, value in ir.load(path).graph.initializers.items():
        expected = _CountingReader.expected(name)
        assert isinstance(value.const_value, ir.ExternalTensor)
        assert value.const_value.location == WEIGHTS_FILE
        np.testing.assert_array_equal(
            value.const_value.numpy(), expected.T if transposed else expected
        )


def test_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    class Narrow(_CountingReader):
        def read(self, parameter: str) -> NDArray[np.float32]:
            return np.zeros((64, 31), np.float32)

    with pytest.raises(CheckpointError, match=r"shape \[64, 31\].*expects \[64, 32\]"):
        write_graph(_make_graph(1), Narrow(), tmp_path)
