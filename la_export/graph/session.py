"""Runs a graph on ONNX Runtime's CPU provider, by tensor name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from la_runtime.backends.ort_options import make_session_options

__all__ = ["GraphSession"]


class GraphSession:
    """A graph, ready to be run.

    Args:
        path: the graph.
        threads: threads for ONNX Runtime.
    """

    def __init__(self, path: Path, threads: int) -> None:
        self._session = ort.InferenceSession(
            str(path), make_session_options(threads), providers=["CPUExecutionProvider"]
        )
        self.output_names = tuple(output.name for output in self._session.get_outputs())

    def run_many(
        self, asked: Sequence[Mapping[str, NDArray[np.generic]]]
    ) -> list[dict[str, NDArray[np.generic]]]:
        """As `run`, for some inputs one behind the other."""
        return [self.run(feeds) for feeds in asked]

    def run(self, feeds: Mapping[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
        """Every output, by name."""
        outputs = self._session.run(None, dict(feeds))
        return dict(zip(self.output_names, outputs, strict=True))
