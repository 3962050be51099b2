"""Reads a graph into a network of TensorRT and holds it against the contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from la_export.plan.api import (
    Builder,
    IAttentionOutputLayer,
    INetworkDefinition,
    ITensor,
    OnnxParser,
)
from la_export.plan.log import BuildLog
from la_export.plan.namespace import Installation, TensorRT
from la_export.plan.problems import describe_parser_errors
from la_runtime.contract import Contract, Dtype, TensorSpec
from la_runtime.errors import PlanError

__all__ = ["ParsedGraph", "check_network", "let_attention_decompose", "read_graph"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedGraph:
    """A network, and the parser that owns its weights and does not hold on to it.

    Args:
        network: what was parsed.
        parser: to be kept as long as the network is used.
    """

    network: INetworkDefinition
    parser: OnnxParser


def read_graph(
    installation: Installation, builder: Builder, graph: Path, *, log: BuildLog
) -> ParsedGraph:
    """Parse a graph, its weights beside it, into a strongly typed network.

    Raises:
        PlanError: TensorRT cannot import it, with every node it stumbles over.
    """
    trt = installation.trt
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(graph)):
        raise PlanError(
            f"the graph {graph.name} cannot be imported by {installation.title}: "
            f"{describe_parser_errors(parser)}; build the bundle again with this version, or use "
            "--target onnx"
        )
    return ParsedGraph(network=network, parser=parser)


def let_attention_decompose(trt: TensorRT, network: INetworkDefinition) -> int:
    """Allow attentions that no single kernel computes, such as those in float32.

    Where there is such a kernel it is taken all the same.

    Returns:
        How many attentions the network has.
    """
    found = 0
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_OUTPUT:
            # The binding gives out the base class.
            layer.__class__ = trt.IAttentionOutputLayer  # type: ignore[assignment]
            assert isinstance(layer, trt.IAttentionOutputLayer), "it is what it was made"
            _let_decompose(layer)
            found += 1
    return found


def _let_decompose(layer: IAttentionOutputLayer) -> None:
    layer.attention.decomposable = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """Inputs or outputs of a network, beside those of the contract."""

    what: str
    tensors: Sequence[ITensor]
    specs: Sequence[TensorSpec]


def check_network(trt: TensorRT, network: INetworkDefinition, contract: Contract) -> None:
    """Hold inputs and outputs against the contract: names, dtypes, dimensions and their names.

    Outputs have no dimension names in TensorRT.

    Raises:
        PlanError: the first difference.
    """
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    for side in (
        _Side(what="input", tensors=inputs, specs=contract.inputs),
        _Side(what="output", tensors=outputs, specs=contract.outputs),
    ):
        for problem in _side_problems(trt, side):
            raise PlanError(f"the graph is not the manifest's: {problem}; build the bundle again")


def _side_problems(trt: TensorRT, side: _Side) -> Iterator[str]:
    tensors = {tensor.name: tensor for tensor in side.tensors}
    specs = {str(spec.name): spec for spec in side.specs}
    if tensors.keys() != specs.keys():
        odd = sorted(tensors.keys() ^ specs.keys())
        yield f"{side.what} {odd[0]} is in one of them only"
        return
    dtypes = _dtypes(trt)
    for name, spec in specs.items():
        tensor = tensors[name]
        if tensor.dtype != dtypes[spec.dtype]:
            yield f"{side.what} {name} is {tensor.dtype}, expected {spec.dtype}"
        found = _dimensions(tensor)
        expected = [
            axis if isinstance(axis, int) else str(axis) if side.what == "input" else -1
            for axis in spec.axes
        ]
        if found != expected:
            yield f"{side.what} {name} has dimensions {found}, expected {expected}"


def _dimensions(tensor: ITensor) -> list[int | str]:
    """Sizes of fixed dimensions, names of dynamic ones, -1 where those have none."""
    return [
        (tensor.get_dimension_name(place) or size) if size < 0 else size
        for place, size in enumerate(tensor.shape)
    ]


def _dtypes(trt: TensorRT) -> dict[Dtype, object]:
    return {
        Dtype.INT64: trt.DataType.INT64,
        Dtype.FLOAT32: trt.DataType.FLOAT,
        Dtype.FLOAT16: trt.DataType.HALF,
        Dtype.BFLOAT16: trt.DataType.BF16,
    }
