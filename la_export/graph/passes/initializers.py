"""Turns a traced model's initializers into graph inputs, so that no optimizer sees a weight."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import onnx_ir as ir

from la_export.graph.step_graph import StepGraph, WeightSource
from la_runtime.contract import Contract

__all__ = ["initializers_to_inputs"]

_WRAPPER_PREFIX: Final = "model."


def initializers_to_inputs(
    model: ir.Model, contract: Contract, parameters: Collection[str]
) -> StepGraph:
    """Make every initializer a trailing graph input named after its model parameter.

    Args:
        model: as traced from a `DecoderStep`.
        contract: of the traced step.
        parameters: names of the wrapped model's parameters and buffers.

    Returns:
        The step graph, with one weight per initializer.
    """
    graph = model.graph
    assert len(graph.inputs) == len(contract.inputs), "the trace lost or added inputs"
    values = list(graph.initializers.values())
    graph.initializers.clear()
    weights: dict[str, WeightSource] = {}
    for value in values:
        assert value.name is not None
        parameter = value.name.removeprefix(_WRAPPER_PREFIX)
        assert parameter in parameters, f"initializer {value.name} is no model parameter"
        value.const_value = None
        value.name = parameter
        weights[parameter] = WeightSource(parameters=(parameter,))
        graph.inputs.append(value)
    return StepGraph(model=model, contract=contract, weights=weights)
