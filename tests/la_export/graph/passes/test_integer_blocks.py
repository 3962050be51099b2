from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from la_export.graph.passes.integer_blocks import hold_in_blocks
from la_export.graph.passes.simplify import simplify
from la_export.graph.passes.stored_products import head_products, layer_products
from la_export.graph.passes.weight_transposes import store_weights_transposed
from la_export.graph.session import GraphSession
from la_export.graph.step_graph import StepGraph
from la_export.graph.weights import write_graph
from la_export.quantize.integers import quantize_blocks

MakeStepGraph = Callable[[str, str, str], StepGraph]
FEATURES, OUTPUTS = 96, 5
PRODUCT = "t = Transpose<perm = [1, 0]>(weight) y = MatMul(attention_mask, t)"
# Sums of 96 products of floats, in whatever order.
FLOAT_TOLERANCE = 1e-5


class _Reader:
    """One weight, whatever it is called."""

    def __init__(self, weight: NDArray[np.float32]) -> None:
        self._weight = weight

    def read(self, parameter: str) -> NDArray[np.float32]:
        return self._weight


def _make_graph(make_step_graph: MakeStepGraph) -> StepGraph:
    step_graph = make_step_graph(
        f"float[{OUTPUTS}, {FEATURES}] weight", f"float[batch, 1, block, {OUTPUTS}] y", PRODUCT
    )
    store_weights_transposed(step_graph)
    return step_graph


def test_product_is_that_of_the_float_activation_with_the_quantized_weight(
    make_step_graph: MakeStepGraph, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(OUTPUTS, FEATURES)).astype(np.float32)
    rows = rng.normal(size=(1, 1, 7, FEATURES)).astype(np.float32)
    step_graph = _make_graph(make_step_graph)
    hold_in_blocks(step_graph, layer_products(step_graph))
    simplify(step_graph)
    session = GraphSession(write_graph(step_graph, _Reader(weight), tmp_path), threads=1)
    found = session.run(_feeds(step_graph, rows))["y"]
    expected = rows @ quantize_blocks(weight).to_float().T
    np.testing.assert_allclose(found, expected, atol=FLOAT_TOLERANCE)
    assert np.abs(expected - rows @ weight.T).max() > 1000 * FLOAT_TOLERANCE


def test_graph_holds_the_integers_and_their_scales_and_no_float_weight(
    make_step_graph: MakeStepGraph,
) -> None:
    step_graph = _make_graph(make_step_graph)
    hold_in_blocks(step_graph, layer_products(step_graph))
    simplify(step_graph)
    held = {
        name: (value.dtype, list(value.shape or ()))
        for name, value in step_graph.weight_values().items()
    }
    assert held == {
        "weight.transposed.values": (ir.DataType.INT4, [FEATURES, OUTPUTS]),
        "weight.transposed.scales": (ir.DataType.FLOAT, [FEATURES // 32, OUTPUTS]),
    }


def test_products_of_wanted_rows_are_the_heads_and_all_others_the_layers(
    make_step_graph: MakeStepGraph,
) -> None:
    step_graph = make_step_graph(
        "float[6, 4] table, float[4, 4] square",
        "float[batch, rows, 6] y",
        "x = Gather<axis = 0>(table, input_ids) h = MatMul(x, square) "
        "g = GatherElements<axis = 1>(h, logits_rows) "
        "t = Transpose<perm = [1, 0]>(table) y = MatMul(g, t)",
    )
    for node in step_graph.graph:
        shape = {"x": ["batch", "block", 4], "g": ["batch", "rows", 4]}.get(
            str(node.outputs[0].name)
        )
        if shape is not None:
            node.outputs[0].shape = ir.Shape(shape)
    store_weights_transposed(step_graph)
    (layer,) = layer_products(step_graph)
    (head,) = head_products(step_graph)
    assert str(layer.inputs[1] and layer.inputs[1].name) == "square"
    assert str(head.inputs[1] and head.inputs[1].name) == "table.transposed"


def _feeds(step_graph: StepGraph, rows: NDArray[np.float32]) -> dict[str, NDArray[np.generic]]:
    """The activation in the place of the mask; zeros for all other inputs."""
    feeds: dict[str, NDArray[np.generic]] = {}
    for value in step_graph.graph.inputs:
        assert value.dtype is not None
        sizes = [size if isinstance(size, int) else 1 for size in value.shape or ()]
        feeds[str(value.name)] = np.zeros(sizes, value.dtype.numpy())
    return feeds | {"attention_mask": rows}
