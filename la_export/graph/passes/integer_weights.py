"""The integer weights of a graph: values and scales that stand for a float weight."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from la_export.graph.passes.names import SCALES_SUFFIX, VALUES_SUFFIX, joined_name
from la_export.graph.step_graph import StepGraph, WeightPart
from la_export.quantize.integers import BLOCK_SIZE

__all__ = ["IntegerWeights"]


class IntegerWeights:
    """Adds integer weights to a graph, each once.

    Args:
        step_graph: its float weights stay until nothing uses them.
    """

    def __init__(self, step_graph: StepGraph) -> None:
        self._step_graph = step_graph
        self._values = step_graph.weight_values()

    def rows(self, weight: ir.Value) -> int:
        """Size of its first axis as stored."""
        assert weight.shape is not None, f"weight {weight.name} has no shape"
        return int(weight.shape[0])  # type: ignore[arg-type]

    def values(self, weight: ir.Value) -> ir.Value:
        """int8, in the weight's shape."""
        return self._add(
            weight,
            str(weight.name) + VALUES_SUFFIX,
            WeightPart.INT8_VALUES,
            dtype=ir.DataType.INT8,
            shape=list(weight.shape or ()),
        )

    def scales(self, weight: ir.Value) -> ir.Value:
        """[output features] float32."""
        source = self._step_graph.weights[str(weight.name)]
        features = list(weight.shape or ())[1 if source.transposed else 0]
        return self._add(
            weight,
            joined_name(source.parameters) + SCALES_SUFFIX,
            WeightPart.INT8_SCALES,
            dtype=ir.DataType.FLOAT,
            shape=[features],
        )

    def block_values(self, weight: ir.Value) -> ir.Value:
        """int4, in the weight's shape."""
        return self._add(
            weight,
            str(weight.name) + VALUES_SUFFIX,
            WeightPart.INT4_VALUES,
            dtype=ir.DataType.INT4,
            shape=list(weight.shape or ()),
        )

    def block_scales(self, weight: ir.Value) -> ir.Value:
        """float32 in the weight's shape, one in the place of each block of input features."""
        source = self._step_graph.weights[str(weight.name)]
        shape = list(weight.shape or ())
        axis = 0 if source.transposed else 1
        shape[axis] = int(shape[axis]) // BLOCK_SIZE  # type: ignore[arg-type]
        return self._add(
            weight,
            str(weight.name) + SCALES_SUFFIX,
            WeightPart.INT4_SCALES,
            dtype=ir.DataType.FLOAT,
            shape=shape,
        )

    def _add(
        self,
        weight: ir.Value,
        name: str,
        part: WeightPart,
        *,
        dtype: ir.DataType,
        shape: list[int | ir.SymbolicDim],
    ) -> ir.Value:
        if name not in self._values:
            value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
            self._step_graph.graph.inputs.append(value)
            self._step_graph.weights[name] = replace(
                self._step_graph.weights[str(weight.name)], part=part
            )
            self._values[name] = value
        return self._values[name]
