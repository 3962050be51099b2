"""Small graphs written as text, for one pass at a time."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx_ir as ir
import pytest

from la_export.graph.step_graph import StepGraph, WeightSource
from la_runtime.contract import Contract

CONTRACT = Contract(
    num_layers=1, num_kv_heads=1, head_dim=4, hidden_size=4, vocab_size=6, k_max=1, top_c=2
)
_EDGE = """
    int64[batch, block] input_ids, int64[batch, block] position_ids,
    float[batch, 1, block, keys] attention_mask, float[1, 4] lookahead_embeddings,
    int64[batch, rows] logits_rows, float[batch, 1, past, 4] past_key,
    float[batch, 1, past, 4] past_value
"""


@pytest.fixture
def make_step_graph() -> Callable[[str, str, str], StepGraph]:
    """From the weights, the outputs and the nodes of a graph as ONNX text."""

    def make(weights: str, outputs: str, nodes: str) -> StepGraph:
        text = (
            '<ir_version: 10, opset_import: ["" : 23]>\n'
            f"step ({_EDGE}, {weights}) => ({outputs}) {{ {nodes} }}"
        )
        model = ir.serde.deserialize_model(onnx.parser.parse_model(text))
        names = [value.name for value in model.graph.inputs[len(CONTRACT.inputs) :]]
        return StepGraph(
            model=model,
            contract=CONTRACT,
            weights={str(name): WeightSource(parameters=(str(name),)) for name in names},
        )

    return make
