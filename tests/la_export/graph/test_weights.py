from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray

from la_export.graph.step_graph import StepGraph, WeightSource
from la_export.graph.weights import WEIGHTS_FILE, write_graph
from la_runtime.contract import Contract
from la_runtime.errors import CheckpointError

SHAPE = (64, 32)


def _make_graph(
    num_weights: int,
    *,
    transposed: bool = False,
    dtypes: tuple[ir.DataType, ...] = (ir.DataType.FLOAT,),
) -> StepGraph:
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
        ir.Value(
            name=name,
            type=ir.TensorType(dtypes[index % len(dtypes)]),
            shape=ir.Shape(shape),
        )
        for index, name in enumerate(names)
    ]
    graph = ir.Graph([*edge, *weights], [], nodes=[], opset_imports={"": 23}, name="step")
    return StepGraph(
        model=ir.Model(graph, ir_version=10),
        contract=contract,
        weights={name: WeightSource(parameters=(name,), transposed=transposed) for name in names},
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


@pytest.mark.parametrize("transposed", [False, True])
def test_each_weight_is_rounded_once_to_the_dtype_of_its_value(
    tmp_path: Path, transposed: bool
) -> None:
    """Against PyTorch's rounding."""
    dtypes = {
        ir.DataType.FLOAT16: torch.float16,
        ir.DataType.BFLOAT16: torch.bfloat16,
        ir.DataType.FLOAT: torch.float32,
    }
    step_graph = _make_graph(6, transposed=transposed, dtypes=tuple(dtypes))
    path = write_graph(step_graph, _CountingReader(), tmp_path)
    for name, value in ir.load(path).graph.initializers.items():
        assert value.dtype is not None
        assert value.const_value is not None
        assert value.const_value.dtype == value.dtype
        rounded = torch.from_numpy(_CountingReader.expected(name)).to(dtypes[value.dtype])
        found = value.const_value.numpy().astype(np.float32)
        np.testing.assert_array_equal(found, (rounded.T if transposed else rounded).float().numpy())


class _ReaderOf(_CountingReader):
    """Gives one number among zeros."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self._number = number

    def read(self, parameter: str) -> NDArray[np.float32]:
        array = np.zeros(SHAPE, np.float32)
        array[3, 4] = self._number
        return array


@pytest.mark.parametrize(
    ("number", "dtype", "message"),
    [
        (-65520.0, ir.DataType.FLOAT16, r"6\.552e\+04, which float16 cannot hold"),
        (1e30, ir.DataType.FLOAT16, r"1e\+30, which float16 .*--precision bf16 or fp32"),
        (3.4e38, ir.DataType.BFLOAT16, r"3\.4e\+38, which bfloat16 cannot hold"),
        (float("nan"), ir.DataType.BFLOAT16, "no finite numbers; the weights are damaged"),
        (float("-inf"), ir.DataType.FLOAT, "no finite numbers; the weights are damaged"),
    ],
)
def test_weight_that_cannot_be_held_is_refused_by_name(
    tmp_path: Path, number: float, dtype: ir.DataType, message: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"tensor weight\.0 .*{message}"):
        write_graph(_make_graph(1, dtypes=(dtype,)), _ReaderOf(number), tmp_path)


@pytest.mark.parametrize(
    ("number", "dtype", "held"),
    [
        (65519.0, ir.DataType.FLOAT16, 65504.0),
        (1e-9, ir.DataType.FLOAT16, 0.0),
        (3.39e38, ir.DataType.BFLOAT16, 3.3895314e38),
    ],
)
def test_weight_at_the_edge_of_the_range_is_held(
    tmp_path: Path, number: float, dtype: ir.DataType, held: float
) -> None:
    path = write_graph(_make_graph(1, dtypes=(dtype,)), _ReaderOf(number), tmp_path)
    value = ir.load(path).graph.initializers["weight.0"].const_value
    assert value is not None
    assert value.numpy()[3, 4].astype(np.float32) == np.float32(held)
