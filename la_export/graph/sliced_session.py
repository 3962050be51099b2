"""Runs a graph whose weights memory does not hold: cut between its layers, a slice at a time.

    slice 0        what depends on no layer's weights: embedding, angles, masks
    slice i + 1    what depends on the weights of layer i, and of none behind it
    last slice     what depends on a weight of the model's end, such as its head

A node belongs to the last of the layers that it depends on, so every value that a slice reads comes
from a slice before it. Each slice is a graph of its own over the same file of weights.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from la_export.graph.passes.names import read_name
from la_export.graph.session import GraphSession
from la_export.graph.weights import WEIGHTS_FILE

__all__ = ["Session", "SlicedSession", "open_session"]

# Weights up to here are held whole: cutting a graph takes time as well.
_WHOLE_BYTES: Final = 2 << 30
_LAYER: Final = re.compile(r"\.layers\.(\d+)\.")
_HEAD: Final = "lm_head"

Arrays = dict[str, NDArray[np.generic]]


class Session(Protocol):
    """A graph, ready to be run."""

    output_names: tuple[str, ...]

    def run(self, feeds: Mapping[str, NDArray[np.generic]]) -> Arrays:
        """Every output, by name."""
        ...

    def run_many(self, asked: Sequence[Mapping[str, NDArray[np.generic]]]) -> list[Arrays]:
        """As `run`, for some inputs."""
        ...


def open_session(path: Path, threads: int, *, widened: int = 1) -> Session:
    """A graph whole, or in slices where its weights are large.

    Args:
        path: the graph, its weights beside it.
        threads: threads for ONNX Runtime.
        widened: how many times as large its weights are in memory: twins make floats of them.
    """
    weights = path.with_name(WEIGHTS_FILE)
    is_small = not weights.exists() or widened * weights.stat().st_size <= _WHOLE_BYTES
    return GraphSession(path, threads) if is_small else SlicedSession(path, threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """Nodes in the order of the graph, and the names at their edge."""

    nodes: tuple[onnx.NodeProto, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[onnx.TensorProto, ...]


class SlicedSession:
    """As `GraphSession`, with the weights of one layer in memory at a time.

    Args:
        path: the graph, its weights beside it.
        threads: threads for ONNX Runtime.
    """

    def __init__(self, path: Path, threads: int) -> None:
        self._path = path
        self._threads = threads
        self._model = onnx.load(str(path), load_external_data=False)
        self._types = {value.name: value for value in self._model.graph.value_info}
        self._types |= {value.name: value for value in self._model.graph.output}
        self._slices = _cut(self._model.graph)
        self.output_names = tuple(value.name for value in self._model.graph.output)

    @property
    def num_slices(self) -> int:
        """Graphs that it runs one behind the other."""
        return len(self._slices)

    def run(self, feeds: Mapping[str, NDArray[np.generic]]) -> Arrays:
        """Every output, by name."""
        (outputs,) = self.run_many([feeds])
        return outputs

    def run_many(self, asked: Sequence[Mapping[str, NDArray[np.generic]]]) -> list[Arrays]:
        """As `run`, for some inputs: each slice is opened once for all of them."""
        known: list[Arrays] = [dict(feeds) for feeds in asked]
        for index, part in enumerate(self._slices):
            wanted = set(self.output_names)
            wanted |= {name for later in self._slices[index + 1 :] for name in later.inputs}
            for arrays, made in zip(known, self._run_slice(part, known), strict=True):
                arrays |= made
                for name in arrays.keys() - wanted:
                    del arrays[name]
        return [{name: arrays[name] for name in self.output_names} for arrays in known]

    def _run_slice(self, part: _Slice, known: Sequence[Arrays]) -> list[Arrays]:
        feeds = [{name: arrays[name] for name in part.inputs} for arrays in known]
        model = self._make_model(part, feeds[0])
        # Beside the graph, so that it finds the weights.
        with tempfile.NamedTemporaryFile(
            prefix=".slice.", suffix=".onnx", dir=self._path.parent
        ) as file:
            file.write(model.SerializeToString())
            file.flush()
            return GraphSession(Path(file.name), self._threads).run_many(feeds)

    def _make_model(self, part: _Slice, feeds: Arrays) -> onnx.ModelProto:
        inputs = [
            onnx.helper.make_tensor_value_info(
                name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim
            )
            for name, array in feeds.items()
        ]
        outputs = [self._types.get(n) or onnx.ValueInfoProto(name=n) for n in part.outputs]
        graph = onnx.helper.make_graph(part.nodes, "slice", inputs, outputs, part.weights)
        model = onnx.helper.make_model(graph, opset_imports=self._model.opset_import)
        model.ir_version = self._model.ir_version
        return model


def _cut(graph: onnx.GraphProto) -> tuple[_Slice, ...]:
    weights = {tensor.name: tensor for tensor in graph.initializer}
    # A head that is tied is the embedding, which everything depends on.
    cast = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Cast"}
    tables = (node.input[0] for node in graph.node if node.op_type == "Gather")
    looked_up = {cast.get(name, name) for name in tables}
    levels = _levels(weights.keys() - looked_up)
    nodes: dict[int, list[onnx.NodeProto]] = {}
    for node in graph.node:
        level = max((levels.get(name, 0) for name in node.input), default=0)
        nodes.setdefault(level, []).append(node)
        levels |= dict.fromkeys(node.output, level)
    wanted = {value.name for value in graph.output}
    slices: list[_Slice] = []
    for level in sorted(nodes, reverse=True):
        part = _make_slice(nodes[level], weights, wanted)
        slices.append(part)
        wanted |= set(part.inputs)
    return tuple(slices[::-1])


def _levels(names: Collection[str]) -> dict[str, int]:
    """Of weights: i + 1 of layer i, one more of the head, 0 of all others."""
    found = {}
    for name in names:
        parameter = read_name(name).parameters[0]
        if (layer := _LAYER.search(parameter)) is not None:
            found[name] = int(layer[1]) + 1
    behind = max(found.values(), default=0) + 1
    found |= {name: behind for name in names if read_name(name).parameters[0].startswith(_HEAD)}
    return found


def _make_slice(
    nodes: list[onnx.NodeProto], weights: Mapping[str, onnx.TensorProto], wanted: set[str]
) -> _Slice:
    """Args:
    nodes: of one level.
    weights: of the whole graph.
    wanted: values that the graph gives out, or that a later slice reads.
    """
    made = {name for node in nodes for name in node.output}
    read = dict.fromkeys(name for node in nodes for name in node.input if name)
    return _Slice(
        nodes=tuple(nodes),
        inputs=tuple(name for name in read if name not in made and name not in weights),
        outputs=tuple(name for node in nodes for name in node.output if name in wanted),
        weights=tuple(weights[name] for name in read if name in weights),
    )
