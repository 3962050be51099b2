"""Prints the execution providers that this ONNX Runtime was built with."""

from __future__ import annotations

import json
import sys

import onnxruntime as ort

__all__: list[str] = []

if __name__ == "__main__":
    sys.stdout.write(json.dumps({"providers": ort.get_available_providers()}) + "\n")
