"""What this machine's processor does, where a test has to know it."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnxruntime as ort

__all__ = ["saturates"]


@cache
def saturates() -> bool:
    """Whether ONNX Runtime's default loses bits of products of u8 and s8: x86 without VNNI."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 23]>
        product (uint8[1, 64] x) => (int32[1, 16] y) { y = MatMulInteger(x, weight) }"""
    )
    weight = onnx.numpy_helper.from_array(np.full((64, 16), 127, np.int8), "weight")
    model.graph.initializer.append(weight)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": np.full((1, 64), 255, np.uint8)})
    return bool((found != 64 * 255 * 127).any())
