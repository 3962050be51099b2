"""Runs a graph of one node on an execution provider and prints where it ran.

A session that cannot have its provider takes the CPU and goes on, so only the session itself says
which one it has.
"""

from __future__ import annotations

import json
import sys
from typing import Final

import numpy as np
import onnxruntime as ort

__all__ = ["IDENTITY_MODEL"]

# y = Identity(x) over one float, opset 23: bytes, because the package onnx may not be installed.
IDENTITY_MODEL: Final = (
    b'\x08\n\x12\x00:;\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x05probeZ\x0f\n\x01x\x12\n\n\x08'
    b"\x08\x01\x12\x04\n\x02\x08\x01b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n"
    b"\x00\x10\x17"
)

if __name__ == "__main__":
    session = ort.InferenceSession(IDENTITY_MODEL, providers=[sys.argv[1]])
    session.run(None, {"x": np.ones(1, np.float32)})
    sys.stdout.write(json.dumps({"providers": session.get_providers()}) + "\n")
