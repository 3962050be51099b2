from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from la_export.graph.passes.constant_reshapes import make_reshapes_constant
from la_export.graph.passes.more_rotary import fuse_more_rotary
from la_export.graph.passes.simplify import simplify
from la_export.graph.passes.tied_head import share_tied_head
from la_export.graph.passes.weight_transposes import store_weights_transposed
from la_export.graph.step_graph import StepGraph, WeightSource

MakeStepGraph = Callable[[str, str, str], StepGraph]
HEAD = "t = Transpose<perm = [1, 0]>(table) y = MatMul(x, t)"
LOOKUP_AND_HEAD = f"x = Gather<axis = 0>(table, logits_rows) {HEAD}"


def _operators(step_graph: StepGraph) -> list[str]:
    return [node.op_type for node in step_graph.graph]


def _run(step_graph: StepGraph, feeds: dict[str, NDArray[np.generic]]) -> NDArray[np.float32]:
    """Run the graph on what it is given; the other inputs get zeros."""
    session = ort.InferenceSession(
        ir.serde.serialize_model(step_graph.model).SerializeToString(),
        providers=["CPUExecutionProvider"],
    )
    filled = {
        entry.name: np.zeros(
            [size if isinstance(size, int) else 1 for size in entry.shape],
            np.int64 if "int64" in entry.type else np.float32,
        )
        for entry in session.get_inputs()
    }
    output: NDArray[np.float32] = session.run(["y"], filled | feeds)[0]
    return output


def test_transposed_weight_is_stored_and_gives_the_same_product(
    make_step_graph: MakeStepGraph,
) -> None:
    step_graph = make_step_graph(
        "float[5, 4] weight",
        "float[1, 5] y",
        "t = Transpose<perm = [1, 0]>(weight) y = MatMul(lookahead_embeddings, t)",
    )
    vector = np.arange(4, dtype=np.float32)[np.newaxis]
    weight = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    before = _run(step_graph, {"lookahead_embeddings": vector, "weight": weight})
    store_weights_transposed(step_graph)
    simplify(step_graph)
    after = _run(
        step_graph,
        {"lookahead_embeddings": vector, "weight.transposed": np.ascontiguousarray(weight.T)},
    )
    assert _operators(step_graph) == ["MatMul"]
    assert step_graph.weights == {
        "weight.transposed": WeightSource(parameters=("weight",), transposed=True)
    }
    np.testing.assert_allclose(after, before, rtol=1e-6)


def test_tied_head_multiplies_by_the_table_it_looks_up(make_step_graph: MakeStepGraph) -> None:
    step_graph = make_step_graph("float[6, 4] table", "float[batch, rows, 6] y", LOOKUP_AND_HEAD)
    feeds = {
        "table": np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32),
        "logits_rows": np.array([[3, 1, 5], [0, 2, 2]]),
    }
    before = _run(step_graph, feeds)
    share_tied_head(step_graph)
    simplify(step_graph)
    assert "Gemm" in _operators(step_graph)
    assert not {"Transpose", "MatMul"} & set(_operators(step_graph))
    assert set(step_graph.weights) == {"table"}
    np.testing.assert_allclose(_run(step_graph, feeds), before, rtol=1e-6)


def test_untied_head_is_left_alone(make_step_graph: MakeStepGraph) -> None:
    step_graph = make_step_graph(
        "float[6, 4] table", "float[1, 6] y", HEAD.replace("(x,", "(lookahead_embeddings,")
    )
    share_tied_head(step_graph)
    assert _operators(step_graph) == ["Transpose", "MatMul"]


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ("float[batch, past, 4] y", [0, 1, 4]),
        ("float[batch, 4, past] y", None),
    ],
    ids=["kept in place", "moved"],
)
def test_only_axes_that_stay_in_place_become_constant(
    make_step_graph: MakeStepGraph, declared: str, expected: list[int] | None
) -> None:
    step_graph = make_step_graph(
        "float[1] unused", declared, "s = Shape(input_ids) y = Reshape(past_key, s)"
    )
    reshape = step_graph.graph.outputs[0].producer()
    assert reshape is not None
    source = reshape.inputs[0]
    assert source is not None
    source.shape = ir.Shape(["batch", 1, 4] if expected is not None else ["batch", "past", 4])
    step_graph.graph.outputs[0].shape = ir.Shape(
        ["batch", 1, 4] if expected is not None else ["batch", 4, "past"]
    )
    make_reshapes_constant(step_graph)
    target = reshape.inputs[1]
    assert target is not None
    if expected is None:
        assert target.const_value is None
    else:
        assert target.const_value is not None
        assert target.const_value.numpy().tolist() == expected


def test_equal_nodes_are_merged_and_unused_weights_dropped(make_step_graph: MakeStepGraph) -> None:
    step_graph = make_step_graph(
        "float[4] unused",
        "float[1, 4] y",
        "a = Cos(lookahead_embeddings) b = Cos(lookahead_embeddings) y = Add(a, b)",
    )
    simplify(step_graph)
    assert _operators(step_graph) == ["Cos", "Add"]
    assert step_graph.weights == {}
    assert len(step_graph.graph.inputs) == len(step_graph.contract.inputs)


def test_multiplication_by_one_is_dropped(make_step_graph: MakeStepGraph) -> None:
    step_graph = make_step_graph(
        "float[4] unused",
        "float[1, 4] y",
        "one = Constant<value_float = 1.0>() "
        "a = Cos(lookahead_embeddings) m = Mul(a, one) y = Neg(m)",
    )
    simplify(step_graph)
    assert _operators(step_graph) == ["Cos", "Neg"]


ROTATION = (
    "pos = Unsqueeze(position_ids, last) f = Cast<to = 1>(pos) freqs = Mul(f, frequencies) "
    "angles = Concat<axis = -1>(freqs, freqs) "
    "c = Cos(angles) s = Sin(angles) ch = Cast<to = 10>(c) sh = Cast<to = 10>(s) "
    "cu = Unsqueeze(ch, one) su = Unsqueeze(sh, one) "
    "x1 = Slice(x, zero, {half}, axis, one) x2 = Slice(x, {half}, end, axis, one) "
    "minus = Neg(x2) turned = Concat<axis = -1>(minus, x1) "
    "a = Mul(x, cu) b = Mul(turned, su) y = Add(a, b)"
)
ROTATION_CONSTANTS = (
    "zero = Constant<value_ints = [0]>() one = Constant<value_ints = [1]>() "
    "last = Constant<value_ints = [-1]>() two = Constant<value_ints = [2]>() "
    "axis = Constant<value_ints = [3]>() end = Constant<value_ints = [9223372036854775807]>() "
    "x = Cast<to = 10>(past_key) "
)


def _make_rotation(make_step_graph: MakeStepGraph, half: str) -> StepGraph:
    step_graph = make_step_graph(
        "float[2] frequencies",
        "float16[batch, 1, past, 4] y",
        ROTATION_CONSTANTS + ROTATION.format(half=half),
    )
    x = next(node.outputs[0] for node in step_graph.graph if node.outputs[0].name == "x")
    x.shape = ir.Shape(["batch", 1, "past", 4])
    x.type = ir.TensorType(ir.DataType.FLOAT16)
    return step_graph


def test_rotation_with_rounded_tables_becomes_one_operator_over_them(
    make_step_graph: MakeStepGraph,
) -> None:
    step_graph = _make_rotation(make_step_graph, "two")
    feeds = {
        "position_ids": np.array([[3, 200, 70]]),
        "frequencies": np.array([1.0, 0.01], np.float32),
        "past_key": np.random.default_rng(0).normal(size=(1, 1, 3, 4)).astype(np.float32),
    }
    before = _run(step_graph, feeds)
    fuse_more_rotary(step_graph)
    simplify(step_graph)
    operators = _operators(step_graph)
    assert operators.count("RotaryEmbedding") == operators.count("Cos") == 1
    assert not {"Neg", "Slice", "Concat"} & set(operators)
    (rotary,) = (node for node in step_graph.graph if node.op_type == "RotaryEmbedding")
    assert [value and value.producer().op_type for value in rotary.inputs] == ["Cast"] * 3
    # Two products and a sum in half precision, which the operator may sum in more.
    np.testing.assert_allclose(_run(step_graph, feeds), before, atol=2e-3)


def test_rotation_that_is_not_of_halves_is_left_alone(make_step_graph: MakeStepGraph) -> None:
    step_graph = _make_rotation(make_step_graph, "one")
    fuse_more_rotary(step_graph)
    assert "RotaryEmbedding" not in _operators(step_graph)
