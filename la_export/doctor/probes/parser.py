"""Asks a TensorRT's ONNX parser which of our graphs' operators it imports.

Needs a driver for full TensorRT, whose builder crashes the process without one.
"""

from __future__ import annotations

import importlib
import json
import sys

from la_export.doctor.operators import PORTABLE_OPERATORS

__all__: list[str] = []

if __name__ == "__main__":
    trt = importlib.import_module(sys.argv[1])
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)  # the parser keeps no reference to it
    parser = trt.OnnxParser(network, logger)
    refused = [name for name in PORTABLE_OPERATORS if not parser.supports_operator(name)]
    sys.stdout.write(json.dumps({"version": trt.__version__, "refused": refused}) + "\n")
