"""What may be on the CPU in a graph that runs on a GPU, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from la_runtime.backends.ort_placement import (
    NodePlacement,
    TensorShape,
    check_placement,
    find_fallbacks,
    read_placements,
)
from la_runtime.errors import ExitCode, HostError

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"


def make_node(operator: str, inputs: list[tuple], outputs: list[tuple], provider: str = CPU):
    return NodePlacement(
        name=f"node_{operator.lower()}",
        operator=operator,
        provider=provider,
        inputs=tuple(TensorShape(kind, axes) for kind, axes in inputs),
        outputs=tuple(TensorShape(kind, axes) for kind, axes in outputs),
    )


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> Path:
    """ONNX Runtime's own profile of a graph that computes with a shape and with numbers."""
    graph = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 23]>
        flatten (float[a, b, 4] x, float[4, 4] w) => (float[m, 4] y)
        <int64[1] minus_one = {-1}, int64[1] last = {2}>
        {
            shape = Shape(x)
            width = Gather<axis = 0>(shape, last)
            wanted = Concat<axis = 0>(minus_one, width)
            flat = Reshape(x, wanted)
            y = MatMul(flat, w)
        }
    """)
    for node in graph.graph.node:
        node.name = f"the_{node.op_type}"
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path_factory.mktemp("profile") / "pass")
    session = ort.InferenceSession(graph.SerializeToString(), options, providers=[CPU])
    session.run(None, {"x": np.ones((2, 3, 4), np.float32), "w": np.eye(4, dtype=np.float32)})
    return Path(session.end_profiling())


def test_a_profile_says_where_each_node_ran_and_on_what(profile):
    placements = read_placements(profile)

    assert [(node.name, node.operator, node.provider) for node in placements] == [
        (f"the_{operator}", operator, CPU)
        for operator in ("Shape", "Gather", "Concat", "Reshape", "MatMul")
    ]
    assert placements[0].inputs == (TensorShape("float", (2, 3, 4)),)
    assert placements[0].outputs == (TensorShape("int64", (3,)),)
    assert placements[2].outputs == (TensorShape("int64", (2,)),)
    assert placements[4].outputs == (TensorShape("float", (6, 4)),)


def test_shape_arithmetic_may_be_on_the_cpu_and_what_moves_or_computes_numbers_may_not(profile):
    fallbacks = find_fallbacks(read_placements(profile), provider=CUDA)

    assert [node.name for node in fallbacks] == ["the_Reshape", "the_MatMul"]


def test_what_computes_on_the_cpu_is_refused_by_name(profile):
    with pytest.raises(HostError) as found:
        check_placement(read_placements(profile), provider=CUDA)

    assert str(found.value).startswith(
        f"2 of the graph's 5 nodes would run on {CPU} instead of {CUDA}, among them "
        "Reshape node 'the_Reshape', MatMul node 'the_MatMul'"
    )
    assert found.value.exit_code == ExitCode.ENVIRONMENT


def test_a_graph_on_the_provider_asked_for_is_accepted(profile):
    check_placement(read_placements(profile), provider=CPU)
    check_placement(
        [
            make_node("MatMul", [("float", (1, 8)), ("float", (8, 8))], [("float", (1, 8))], CUDA),
            make_node("Shape", [("float16", (1, 8, 64))], [("int64", (3,))]),
        ],
        provider=CUDA,
    )


@pytest.mark.parametrize(
    ("node", "is_allowed"),
    [
        (make_node("Concat", [("int64", (2,)), ("int64", (1,))], [("int64", (3,))]), True),
        (make_node("Mul", [("int64", ()), ("int64", ())], [("int64", ())]), True),
        (make_node("Cast", [("int64", (1,))], [("int32", (1,))]), True),
        (make_node("Equal", [("int64", (3,)), ("int64", (3,))], [("bool", (3,))]), True),
        (make_node("Concat", [("int64", (8,)), ("int64", (1,))], [("int64", (9,))]), False),
        (make_node("Cast", [("int64", (1, 1))], [("int32", (1, 1))]), False),
        (make_node("Mul", [("float", ()), ("float", ())], [("float", ())]), False),
        (make_node("Cast", [("int64", (1,))], [("float", (1,))]), False),
        (make_node("Gather", [("float", (8, 64)), ("int64", (1,))], [("float", (1, 64))]), False),
        (make_node("Expand", [("int64", (1, 1)), ("int64", (2,))], [("int64", (1, 9))]), False),
        (make_node("ReduceProd", [("int64", (1, 512))], [("int64", (1,))]), False),
        (make_node("TopK", [("int64", (8,)), ("int64", (1,))], [("int64", (4,))]), False),
        (make_node("Shape", [("float16", (1, 9, 64))], [("int64", (3,))]), True),
    ],
    ids=lambda value: f"{value.operator}-{value.outputs[0]}" if not isinstance(value, bool) else "",
)
def test_operator_and_size_tell_shapes_from_numbers(node, is_allowed):
    assert (find_fallbacks([node], provider=CUDA) == ()) is is_allowed


def test_other_events_of_a_profile_are_no_nodes(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(
        json.dumps(
            [
                {"cat": "Session", "name": "model_run", "args": {}},
                {"cat": "Kernel", "name": "gemm", "args": {"op_name": "MatMul"}},
                {
                    "cat": "Node",
                    "name": "copy_kernel_time",
                    "args": {"op_name": "MemcpyFromHost", "provider": CUDA},
                },
            ]
        )
    )

    (node,) = read_placements(path)

    assert (node.name, node.operator, node.provider) == ("copy", "MemcpyFromHost", CUDA)
