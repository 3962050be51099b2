"""Runs a graph of one node on an execution provider and prints where it ran.

A session that cannot have its provider takes the CPU and goes on, so only the session itself says
which one it has. Of CUDA the backend's own check is asked, which loads the libraries that pip has
installed.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Final

import numpy as np
import onnxruntime as ort

from la_runtime.backends.ort_cuda_session import CUDA_PROVIDER, check_cuda_provider
from la_runtime.errors import HostError

__all__ = ["IDENTITY_MODEL"]

# y = Identity(x) over one float, opset 23: bytes, because the package onnx may not be installed.
IDENTITY_MODEL: Final = (
    b'\x08\n\x12\x00:;\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x05probeZ\x0f\n\x01x\x12\n\n\x08'
    b"\x08\x01\x12\x04\n\x02\x08\x01b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n"
    b"\x00\x10\x17"
)


def _ask(name: str) -> list[str]:
    """The providers of a session that was to have this one; none when it does not start."""
    if name == CUDA_PROVIDER:
        try:
            check_cuda_provider(ort)
        except HostError as error:
            sys.stderr.write(f"{error}\n")
            return []
    session = ort.InferenceSession(IDENTITY_MODEL, providers=[name])
    session.run(None, {"x": np.ones(1, np.float32)})
    return list(session.get_providers())


if __name__ == "__main__":
    # Libraries print to stdout as well, which is the answer's alone.
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    answer.write(json.dumps({"providers": _ask(sys.argv[1])}) + "\n")
    answer.close()
