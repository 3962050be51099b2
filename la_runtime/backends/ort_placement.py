"""On which provider ONNX Runtime has put each node, and which of them may be on the CPU.

ONNX Runtime keeps the arithmetic on shapes on the CPU, also for graphs that run on a GPU: a handful
of numbers there saves a round trip. Anything else on the CPU is a fall-back, and is refused. What
tells the two apart is the operator together with the size of what it works on, and the profile of
a pass has both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from la_runtime.errors import HostError

__all__ = ["NodePlacement", "TensorShape", "check_placement", "find_fallbacks", "read_placements"]

SHAPE_OPERATORS: Final = frozenset(
    {
        "Add",
        "Cast",
        "Concat",
        "ConstantOfShape",
        "Div",
        "Equal",
        "Expand",
        "Gather",
        "Max",
        "Min",
        "Mul",
        "ReduceProd",
        "Reshape",
        "Shape",
        "Size",
        "Slice",
        "Squeeze",
        "Sub",
        "Unsqueeze",
        "Where",
    }
)
"""Operators that may work on shapes, and so on the CPU."""

_SHAPE_TYPES: Final = frozenset({"bool", "int32", "int64"})
_LARGEST_SHAPE: Final = 8
"""Numbers in a shape: as many as a tensor has axes, and it has few."""

_READ_ONLY_SHAPE: Final = frozenset({"Shape", "Size"})  # of what they are given, not its numbers
_NODE_SUFFIX: Final = "_kernel_time"
_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor of a profiled pass: its element type as ONNX names it, and its shape."""

    element_type: str
    axes: tuple[int, ...]

    @property
    def is_shape(self) -> bool:
        """Whether it can be a shape: a scalar or a short vector of integers."""
        return (
            self.element_type in _SHAPE_TYPES
            and len(self.axes) <= 1
            and math.prod(self.axes) <= _LARGEST_SHAPE
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlacement:
    """Where a node ran, and on what.

    Args:
        name: the node's.
        operator: its ONNX operator.
        provider: ONNX Runtime's name of it.
        inputs: what it read, constants included.
        outputs: what it made.
    """

    name: str
    operator: str
    provider: str
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]

    @property
    def is_shape_arithmetic(self) -> bool:
        """Whether it computes with shapes alone."""
        read = () if self.operator in _READ_ONLY_SHAPE else self.inputs
        return self.operator in SHAPE_OPERATORS and all(
            tensor.is_shape for tensor in (*read, *self.outputs)
        )


def read_placements(profile: Path) -> tuple[NodePlacement, ...]:
    """The nodes of a profile that ONNX Runtime wrote, in the order they ran.

    Args:
        profile: what `end_profiling` returns.
    """
    events: list[dict[str, Any]] = json.loads(profile.read_bytes())
    return tuple(
        _parse_node(event)
        for event in events
        if event.get("cat") == "Node" and "provider" in event.get("args", {})
    )


def _parse_node(event: dict[str, Any]) -> NodePlacement:
    told = event["args"]
    return NodePlacement(
        name=event["name"].removesuffix(_NODE_SUFFIX),
        operator=told["op_name"],
        provider=told["provider"],
        inputs=_parse_shapes(told.get("input_type_shape", [])),
        outputs=_parse_shapes(told.get("output_type_shape", [])),
    )


def _parse_shapes(told: Sequence[dict[str, list[int]]]) -> tuple[TensorShape, ...]:
    return tuple(
        TensorShape(element_type, tuple(axes))
        for tensor in told
        for element_type, axes in tensor.items()
    )


def find_fallbacks(
    placements: Iterable[NodePlacement], *, provider: str
) -> tuple[NodePlacement, ...]:
    """Nodes that ran elsewhere than on a provider, arithmetic on shapes aside.

    Args:
        placements: of a pass.
        provider: the one asked for.
    """
    return tuple(
        node for node in placements if node.provider != provider and not node.is_shape_arithmetic
    )


def check_placement(placements: Sequence[NodePlacement], *, provider: str) -> None:
    """Refuse a graph some of which does not run where it was asked to.

    Args:
        placements: of a pass.
        provider: the one asked for.

    Raises:
        HostError: a node that computes ran on another provider.
    """
    assert placements, "a pass was profiled"
    if fallbacks := find_fallbacks(placements, provider=provider):
        named = ", ".join(f"{node.operator} node {node.name!r}" for node in fallbacks[:_NAMED])
        raise HostError(
            f"{len(fallbacks)} of the graph's {len(placements)} nodes would run on "
            f"{fallbacks[0].provider} instead of {provider}, among them {named}: this "
            "onnxruntime-gpu has no kernel for them; update it, or use another backend"
        )
