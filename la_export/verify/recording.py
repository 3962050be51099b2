"""A backend that remembers the logits of every row that was committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from la_export.verify.probes import BorrowedBackend
from la_runtime.backends.base import Backend, CacheSizing, CacheState, Outputs, Scores, StepInputs

__all__ = ["RecordingBackend"]


class RecordingBackend(BorrowedBackend):
    """Passes everything on; asks for full logits and keeps those of committed rows.

    For batch 1. `logits_at` maps a position to the logits of the row there, which is the row
    that chose the token at the next position.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._rows: dict[int, NDArray[np.float32]] = {}
        self.logits_at: dict[int, NDArray[np.float32]] = {}

    def allocate(self, batch: int, sizing: CacheSizing) -> CacheState:
        """See `Backend.allocate`; forgets what was recorded."""
        assert batch == 1, "recording is for batch 1"
        self.logits_at = {}
        return super().allocate(batch, sizing)

    def forward(self, state: CacheState, inputs: StepInputs) -> Scores:
        """See `Backend.forward`."""
        outputs = inputs.outputs | Outputs.LOGITS if inputs.outputs else inputs.outputs
        scores = super().forward(state, replace(inputs, outputs=outputs))
        self._rows = {}
        if inputs.outputs:
            logits = scores.logits()[0]
            self._rows = {
                int(row): logits[index].copy() for index, row in enumerate(inputs.logits_rows[0])
            }
        return scores

    def commit(self, state: CacheState, rows: Sequence[Sequence[int]]) -> None:
        """See `Backend.commit`."""
        start = int(state.lengths[0])
        for offset, row in enumerate(rows[0]):
            if row in self._rows:
                self.logits_at[start + offset] = self._rows[row]
        super().commit(state, rows)
