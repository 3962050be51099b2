"""A graph in ONNX Runtime: whether it is the contract's, and the largest pass it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from la_runtime.backends.base import PassLimits
from la_runtime.contract import Contract, Dtype, TensorSpec
from la_runtime.errors import BundleError

__all__ = ["GraphTensor", "Signature", "check_signature", "graph_limits"]

_ONNX_TYPES = {
    Dtype.INT64: "tensor(int64)",
    Dtype.FLOAT32: "tensor(float)",
    Dtype.FLOAT16: "tensor(float16)",
    Dtype.BFLOAT16: "tensor(bfloat16)",
}


def graph_limits(contract: Contract, *, context: int) -> PassLimits:
    """The largest pass: only a fixed capacity limits it, to the context and a block behind that.

    Args:
        contract: the graph's contract.
        context: number of positions the model has.
    """
    if contract.capacity is None:
        return PassLimits()
    return PassLimits(block=contract.capacity - context, places=context)


class GraphTensor(Protocol):
    """An input or output as ONNX Runtime describes it."""

    name: str
    type: str
    shape: list[int | str]


class Signature(Protocol):
    """What is asked of a session here."""

    def get_inputs(self) -> list[GraphTensor]:
        """The graph's inputs."""
        ...

    def get_outputs(self) -> list[GraphTensor]:
        """The graph's outputs."""
        ...


def check_signature(session: Signature, contract: Contract, omits: Sequence[str]) -> None:
    """Compare the graph's inputs and outputs with the contract's.

    Args:
        session: the session over the graph.
        contract: what the manifest says.
        omits: outputs of the contract that this graph does not have.

    Raises:
        BundleError: a name, type or shape differs.
    """
    outputs = [spec for spec in contract.outputs if spec.name not in omits]
    for what, found, specs in (
        ("input", session.get_inputs(), list(contract.inputs)),
        ("output", session.get_outputs(), outputs),
    ):
        names = [tensor.name for tensor in found]
        if names != [spec.name for spec in specs]:
            raise BundleError(
                f"the graph is not the manifest's: it has {len(names)} {what}s, the contract "
                f"{len(specs)}, or their names differ; rebuild the bundle"
            )
        for tensor, spec in zip(found, specs, strict=True):
            if not _fits(tensor, spec):
                raise BundleError(
                    f"the graph is not the manifest's: {what} {spec.name} is {tensor.type} "
                    f"{tensor.shape}, the contract says {_ONNX_TYPES[spec.dtype]} "
                    f"{[str(axis) for axis in spec.axes]}; rebuild the bundle"
                )


def _fits(tensor: GraphTensor, spec: TensorSpec) -> bool:
    expected = [axis if isinstance(axis, int) else str(axis) for axis in spec.axes]
    return tensor.type == _ONNX_TYPES[spec.dtype] and tensor.shape == expected
