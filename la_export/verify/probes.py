"""Backends that watch or disturb what passes through them, for proofs about everything above.

Each borrows a backend and leaves it open. Decoding cannot tell them from a plain one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from la_runtime.backends.base import (
    Backend,
    CacheSizing,
    CacheState,
    Outputs,
    PassLimits,
    Scores,
    StepInputs,
)
from la_runtime.contract import Contract

__all__ = ["BorrowedBackend", "GivenProposals", "ShiftedPositions", "SpoiledCache"]

# Positions whose proposals are wrong. There are two in a period: blocks of one length can leave one
# of them to the bonus token for ever, which nobody proposes, and not both.
_PERIOD = 7
_WRONG_PLACES = (0, 3)
_SURE_LOGIT = 1e4


class BorrowedBackend:
    """Passes everything on; closing it leaves the borrowed backend open."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def contract(self) -> Contract:
        """See `Backend.contract`."""
        return self._backend.contract

    @property
    def widths(self) -> tuple[int, ...]:
        """See `Backend.widths`."""
        return self._backend.widths

    @property
    def limits(self) -> PassLimits:
        """See `Backend.limits`."""
        return self._backend.limits

    def allocate(self, batch: int, sizing: CacheSizing) -> CacheState:
        """See `Backend.allocate`."""
        return self._backend.allocate(batch, sizing)

    def forward(self, state: CacheState, inputs: StepInputs) -> Scores:
        """See `Backend.forward`."""
        return self._backend.forward(state, inputs)

    def commit(self, state: CacheState, rows: Sequence[Sequence[int]]) -> None:
        """See `Backend.commit`."""
        self._backend.commit(state, rows)

    def set_lookahead_embeddings(self, embeddings: NDArray[np.floating]) -> None:
        """See `Backend.set_lookahead_embeddings`."""
        self._backend.set_lookahead_embeddings(embeddings)

    def close(self) -> None:
        """Nothing: whoever lent the backend closes it."""


class SpoiledCache(BorrowedBackend):
    """Fills the unused cache places with large random K/V before every pass.

    Args:
        backend: what runs the graph.
        seed: of the random K/V; every pass gets others.
    """

    def __init__(self, backend: Backend, *, seed: int) -> None:
        super().__init__(backend)
        self._seed = seed

    def forward(self, state: CacheState, inputs: StepInputs) -> Scores:
        """See `Backend.forward`."""
        self._seed += 1
        state.spoil_unused(self._seed)
        return super().forward(state, inputs)


class ShiftedPositions(BorrowedBackend):
    """Every row stands further back in the context than whoever decodes knows.

    Args:
        backend: what runs the graph.
        shift: added to every position.
    """

    def __init__(self, backend: Backend, shift: int) -> None:
        super().__init__(backend)
        self._shift = shift

    def forward(self, state: CacheState, inputs: StepInputs) -> Scores:
        """See `Backend.forward`."""
        shifted = inputs.position_ids + self._shift
        return super().forward(state, replace(inputs, position_ids=shifted))


class GivenProposals(BorrowedBackend):
    """Slots propose a given future instead of the model's, so that drafts are accepted.

    What a model proposes decides only how fast it decodes. With untuned vectors hardly any draft
    stands, and whatever happens to accepted drafts would go unseen. Two proposals in seven are
    wrong, so that drafts are rejected, too; the right ones then come second, so that a tree of
    drafts is accepted along its side branches.

    Args:
        backend: what runs the graph.
        texts: token ids by position, prompt included, of each sequence that may be decoded.
    """

    def __init__(self, backend: Backend, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(backend)
        self._texts = [np.asarray(text, dtype=np.int64) for text in texts]

    def forward(self, state: CacheState, inputs: StepInputs) -> Scores:
        """See `Backend.forward`."""
        scores = super().forward(state, inputs)
        return _GivenScores(scores, self._proposals(inputs), inputs.outputs)

    def _proposals(self, inputs: StepInputs) -> dict[tuple[int, int], tuple[int, int]]:
        """Per sequence and scored row that is a slot, what it shall propose first and second."""
        vocab_size = self.contract.vocab_size
        given = {}
        for sequence, wanted in enumerate(inputs.logits_rows):
            ids, positions = inputs.input_ids[sequence], inputs.position_ids[sequence]
            text = self._find_text(int(ids[0]), int(positions[0]))
            for index, row in enumerate(wanted):
                position = int(positions[row]) + 1
                if ids[row] < vocab_size or position >= len(text):
                    continue
                right = int(text[position])
                other = (right + 1) % vocab_size
                is_wrong = position % _PERIOD in _WRONG_PLACES
                given[sequence, index] = (other, right) if is_wrong else (right, other)
        return given

    def _find_text(self, token_id: int, position: int) -> NDArray[np.int64]:
        """A text with this token there; another text's proposals would be wrong, and harmless."""
        fitting = (t for t in self._texts if len(t) > position and t[position] == token_id)
        return next(fitting, np.empty(0, dtype=np.int64))


class _GivenScores:
    """Scores in which the slots' two best are replaced; the model's rows are as they were."""

    def __init__(
        self,
        scores: Scores,
        proposals: dict[tuple[int, int], tuple[int, int]],
        outputs: Outputs,
    ) -> None:
        self._scores = scores
        self._proposals = proposals
        self._logits: NDArray[np.float32] | None = None
        if proposals and Outputs.LOGITS in outputs:
            self._logits = scores.logits().copy()
            for (sequence, row), (token_id, _) in proposals.items():
                self._logits[sequence, row, token_id] = _SURE_LOGIT

    def top(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        best_ids, best_logits = self._scores.top()
        ids = best_ids.copy()
        for (sequence, row), two in self._proposals.items():
            ids[sequence, row, :2] = two[: ids.shape[2]]
        return ids, best_logits

    def logsumexp(self) -> NDArray[np.float32]:
        return self._scores.logsumexp()

    def logits(self) -> NDArray[np.float32]:
        return self._scores.logits() if self._logits is None else self._logits
