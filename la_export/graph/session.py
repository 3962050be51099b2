"""Runs a graph on ONNX Runtime's CPU provider, by tensor name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

__all__ = ["GraphSession"]


class GraphSession:
    """A graph, ready to be run.

    Args:
        path: the graph.
        threads: threads for ONNX Runtime.
    """

    def __init__(self, path: Path, threads: int) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.output_names = tuple(output.name for output in self._session.get_outputs())

    def run(self, feeds: Mapping[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
        """Every output, by name."""
        outputs = self._session.run(None, dict(feeds))
        return dict(zip(self.output_names, outputs, strict=True))
