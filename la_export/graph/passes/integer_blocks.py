"""Holds weights as int4 in blocks that share a scale; activations and products stay floats.

    y = x * DequantizeLinear(values, scales)

Values are [in, out] and scales [in / block, out], so a block is a part of one output feature.
ONNX Runtime makes both operators one, which never writes the float weight to memory; how exactly
that one multiplies is said when a session is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import onnx_ir as ir

from la_export.graph.passes.integer_weights import IntegerWeights
from la_export.graph.step_graph import StepGraph
from la_export.quantize.integers import BLOCK_SIZE

__all__ = ["hold_in_blocks"]

_IN_FEATURES: Final = 0


def hold_in_blocks(step_graph: StepGraph, products: Sequence[ir.Node]) -> None:
    """Put int4 blocks in the place of the weights that `MatMul`s read.

    Args:
        step_graph: changed in place.
        products: `MatMul`s with weights stored as [in, out].
    """
    graph = step_graph.graph
    weights = IntegerWeights(step_graph)
    for node in products:
        weight = node.inputs[1]
        assert weight is not None, "a product has two factors"
        floats = ir.node(
            "DequantizeLinear",
            [weights.block_values(weight), weights.block_scales(weight)],
            {"axis": _IN_FEATURES, "block_size": BLOCK_SIZE},
            name=f"{weight.name}.floats.node",
        )
        output = floats.outputs[0]
        output.name, output.type, output.shape = f"{weight.name}.floats", weight.type, weight.shape
        graph.insert_before(node, floats)
        node.replace_input_with(1, output)
