"""Drives a bundle of this project, plain or with lookaheads, where `la_runtime` is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from la_export.verify.epsilon import read_logits
from la_runtime.generation import Engine

__all__ = ["open_peer"]


class _Peer:
    def __init__(self, job: dict[str, Any]) -> None:
        self._engine = Engine.open(job["model"], threads=job["threads"], **job["options"])
        manifest = self._engine.bundle.manifest
        self.version = version("lookahead-attention")
        self.build = f"onnxruntime {version('onnxruntime')}, precision {manifest.precision}"

    def generate(
        self, token_ids: list[int], new_tokens: int, emit: Callable[[Sequence[int]], None]
    ) -> None:
        with self._engine.stream(token_ids, max_new_tokens=new_tokens) as chunks:
            for chunk in chunks:
                emit(chunk.token_ids)

    def logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        context = self._engine.bundle.manifest.model.context
        passes = read_logits(self._engine.backend, token_ids, width=len(token_ids), context=context)
        return np.concatenate([rows.copy() for rows in passes])


def open_peer(job: dict[str, Any]) -> _Peer:
    """Open a bundle."""
    return _Peer(job)
