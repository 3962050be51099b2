"""Removes what the exporter notes about the machine it ran on: stack traces, paths, docs."""

from __future__ import annotations

from typing import Final

import onnx_ir.passes.common as common_passes

from la_export.graph.step_graph import StepGraph

__all__ = ["strip_metadata"]

_PRODUCER: Final = "lookahead-attention"
_GRAPH_NAME: Final = "step"


def strip_metadata(step_graph: StepGraph) -> None:
    """Leave names and structure only, so that equal models give equal bytes everywhere."""
    model, graph = step_graph.model, step_graph.graph
    common_passes.ClearMetadataAndDocStringPass()(model)
    model.functions.clear()
    model.metadata_props.clear()
    model.doc_string = None
    model.producer_name = _PRODUCER
    model.producer_version = None
    graph.name = _GRAPH_NAME
    graph.doc_string = None
    graph.metadata_props.clear()
    values = [*graph.inputs, *graph.initializers.values()]
    values.extend(value for node in graph for value in node.outputs)
    for value in values:
        value.metadata_props.clear()
        value.doc_string = None
