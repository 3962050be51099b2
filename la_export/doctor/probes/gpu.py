"""Prints what the driver says of the GPU, or why there is none."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from la_runtime.backends.gpu import read_gpu
from la_runtime.errors import HostError

__all__: list[str] = []

if __name__ == "__main__":
    record: dict[str, Any]
    try:
        record = {"gpu": asdict(read_gpu())}
    except HostError as error:
        record = {"gpu": None, "reason": str(error)}
    sys.stdout.write(json.dumps(record) + "\n")
