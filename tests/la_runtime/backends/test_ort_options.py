"""What every session on the CPU is asked for, seen in what ONNX Runtime then runs."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from la_runtime.backends.ort_options import make_session_options

CPU = "CPUExecutionProvider"
FEATURES, OUTPUTS, BLOCK = 64, 8, 32
# Sums of 64 products of floats, in whatever order.
FLOAT_TOLERANCE = 1e-5


@pytest.fixture
def values(rng):
    return rng.integers(-8, 8, (FEATURES, OUTPUTS), np.int8)


@pytest.fixture
def scales(rng):
    return rng.uniform(0.01, 0.1, (FEATURES // BLOCK, OUTPUTS)).astype(np.float32)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def graph(values, scales) -> bytes:
    """A product with an int4 weight, as a graph of that precision holds it."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 23]>
        product (float[rows, {FEATURES}] x) => (float[rows, {OUTPUTS}] y) {{
            floats = DequantizeLinear<axis = 0, block_size = {BLOCK}>(values, scales)
            y = MatMul(x, floats)
        }}"""
    )
    packed = onnx.helper.make_tensor(
        "values", onnx.TensorProto.INT4, values.shape, values.flatten().tolist()
    )
    model.graph.initializer.extend([packed, onnx.numpy_helper.from_array(scales, "scales")])
    onnx.checker.check_model(model)
    return model.SerializeToString()


@pytest.mark.parametrize("rows", [1, 2, 25])
def test_products_with_int4_weights_are_computed_in_float32(graph, values, scales, rng, rows):
    """ONNX Runtime's default rounds the activations to int8."""
    x = rng.normal(size=(rows, FEATURES)).astype(np.float32)
    exact = x @ (values.astype(np.float32) * np.repeat(scales, BLOCK, axis=0))
    found = _run(graph, make_session_options(1), x)
    np.testing.assert_allclose(found, exact, atol=FLOAT_TOLERANCE)
    rounded = _run(graph, ort.SessionOptions(), x)
    assert np.abs(rounded - exact).max() > 100 * FLOAT_TOLERANCE


def test_int4_weights_are_never_widened_in_memory(graph, tmp_path):
    options = make_session_options(1)
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(graph, options, providers=[CPU])
    (node,) = onnx.load(options.optimized_model_filepath).graph.node
    assert node.op_type == "MatMulNBits"
    levels = [entry.i for entry in node.attribute if entry.name == "accuracy_level"]
    assert levels == [1]


def test_operators_get_the_threads_that_were_asked_for_and_run_one_by_one():
    options = make_session_options(3)
    assert options.intra_op_num_threads == 3
    assert options.inter_op_num_threads == 1
    assert options.execution_mode == ort.ExecutionMode.ORT_SEQUENTIAL


@pytest.mark.parametrize("fused", [False, True], ids=["MatMulInteger", "MatMulIntegerToFloat"])
@pytest.mark.parametrize("rows", [1, 2, 25])
def test_products_of_integers_never_saturate(rng, fused, rows):
    """Numbers as large as they get: two products of a pair need 17 bits."""
    weight = rng.choice(np.array([-127, 127], np.int8), (FEATURES, OUTPUTS))
    x = rng.choice(np.array([0, 255], np.uint8), (rows, FEATURES))
    exact = (x.astype(np.int32) - 128) @ weight.astype(np.int32)
    found = _run(_integer_product(weight, fused=fused), make_session_options(1), x)
    np.testing.assert_array_equal(found, exact)


def _integer_product(weight: np.ndarray, *, fused: bool) -> bytes:
    """u8 x s8 with a zero point of 128, as the portable and the lean graphs have it."""
    initializers = {"weight": weight, "zero_point": np.uint8(128)}
    if fused:
        initializers |= {"one": np.float32(1), "ones": np.ones(OUTPUTS, np.float32)}
    node = onnx.helper.make_node(
        "MatMulIntegerToFloat" if fused else "MatMulInteger",
        ["x", "weight", *(["one", "ones"] if fused else []), "zero_point"],
        ["y"],
        domain="com.microsoft" if fused else "",
    )
    graph = onnx.helper.make_graph(
        [node],
        "product",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, ["rows", FEATURES])],
        [
            onnx.helper.make_tensor_value_info(
                "y",
                onnx.TensorProto.FLOAT if fused else onnx.TensorProto.INT32,
                ["rows", OUTPUTS],
            )
        ],
        [onnx.numpy_helper.from_array(np.asarray(v), n) for n, v in initializers.items()],
    )
    domains = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=domains, ir_version=10).SerializeToString()


def _run(graph: bytes, options: ort.SessionOptions, x: np.ndarray) -> np.ndarray:
    return ort.InferenceSession(graph, options, providers=[CPU]).run(["y"], {"x": x})[0]
