"""Gives graph inputs and outputs the contract's names, dtypes and axes, and nothing else."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from la_export.graph.step_graph import StepGraph
from la_runtime.contract import Dtype, TensorSpec

__all__ = ["IR_DTYPES", "name_by_contract", "state_value"]

IR_DTYPES: Final = {
    Dtype.INT64: ir.DataType.INT64,
    Dtype.FLOAT32: ir.DataType.FLOAT,
    Dtype.FLOAT16: ir.DataType.FLOAT16,
    Dtype.BFLOAT16: ir.DataType.BFLOAT16,
}


def name_by_contract(step_graph: StepGraph) -> None:
    """State the contract on the graph's edge and drop the trace's private symbols inside."""
    graph, contract = step_graph.graph, step_graph.contract
    for node in graph:
        for value in node.outputs:
            value.shape = None
    for value, spec in zip(graph.inputs, contract.inputs, strict=False):
        state_value(value, spec)
    for value, spec in zip(graph.outputs, contract.outputs, strict=True):
        state_value(value, spec)


def state_value(value: ir.Value, spec: TensorSpec) -> None:
    """Give an input or output the name, dtype and axes of its specification."""
    value.name = str(spec.name)
    value.type = ir.TensorType(IR_DTYPES[spec.dtype])
    value.shape = ir.Shape([axis if isinstance(axis, int) else str(axis) for axis in spec.axes])
