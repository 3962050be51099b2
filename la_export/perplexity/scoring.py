"""Log-probabilities of tokens in windows, and the perplexity they make.

A scorer is any function from windows to log-probabilities: of a bundle, of the source in PyTorch,
or of another program. It does not know where windows come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from la_export.perplexity.windows import Window
from la_runtime.backends.base import Backend, CacheSizing, Outputs
from la_runtime.block import Part, make_step_inputs
from la_runtime.errors import NonFiniteScoreError
from la_runtime.layout import make_rows

__all__ = [
    "BackendScorer",
    "CausalModel",
    "Perplexity",
    "ReferenceScorer",
    "ScoreWindows",
    "perplexity_of",
    "token_log_probs",
]

ScoreWindows: TypeAlias = Callable[[Sequence[Window]], Iterable[NDArray[np.float64]]]
"""Natural log-probabilities [window.num_scored] of each window's tokens from `scored_from` on, in
the order of the windows; every window is read from an empty cache, its first token at position 0.
They may be given window by window, so that memory and progress follow the work."""

# A pass's logits are 4 x 64 rows: 50 MB where the vocabulary has 49,152 tokens.
_BATCH: Final = 4
_ROWS: Final = 64
# Rows whose exponentials are in memory in float64 at one time.
_EXACT_ROWS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """Of some tokens.

    Args:
        num_tokens: that were scored.
        mean_nll: mean of their negative log-probabilities, in nats.
    """

    num_tokens: int
    mean_nll: float

    @property
    def value(self) -> float:
        """The perplexity: exp of the mean."""
        return math.exp(self.mean_nll)


def perplexity_of(score_windows: ScoreWindows, windows: Sequence[Window]) -> Perplexity:
    """Perplexity of whatever scores, over the tokens that count.

    Args:
        score_windows: see `ScoreWindows`.
        windows: one or more.

    Raises:
        NonFiniteScoreError: a log-probability is NaN or infinite.
    """
    total = 0.0
    count = 0
    for index, (window, log_probs) in enumerate(zip(windows, score_windows(windows), strict=True)):
        assert log_probs.shape == (window.num_scored,), "one for each token that counts"
        if not np.isfinite(log_probs).all():
            place = int(np.argmin(np.isfinite(log_probs)))
            raise NonFiniteScoreError(
                f"token {window.scored_from + place} of window {index} has log-probability "
                f"{log_probs[place]}, expected a finite one; verify the bundle, or build it again"
            )
        total -= math.fsum(log_probs)
        count += window.num_scored
    return Perplexity(num_tokens=count, mean_nll=total / count)


def token_log_probs(logits: NDArray[np.float32], token_ids: Sequence[int]) -> NDArray[np.float64]:
    """Natural log-probability of a token in each row, summed up in float64.

    Args:
        logits: [rows, vocab_size].
        token_ids: [rows].
    """
    found = np.empty(len(logits))
    for start in range(0, len(logits), _EXACT_ROWS):
        rows = logits[start : start + _EXACT_ROWS].astype(np.float64)
        chosen = rows[np.arange(len(rows)), list(token_ids[start : start + _EXACT_ROWS])]
        peak = rows.max(axis=1, keepdims=True)
        rows -= peak
        np.exp(rows, out=rows)
        found[start : start + len(rows)] = chosen - peak[:, 0] - np.log(rows.sum(axis=1))
    return found


class CausalModel(Protocol):
    """What reads a text in one causal pass, as `TorchReference` does."""

    def scores(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits [tokens, vocab_size] after every token."""
        ...


class ReferenceScorer:
    """Scores with a model that reads a whole window in one pass.

    Args:
        model: reads it.
    """

    def __init__(self, model: CausalModel) -> None:
        self._model = model

    def __call__(self, windows: Sequence[Window]) -> Iterator[NDArray[np.float64]]:
        """See `ScoreWindows`."""
        for window in windows:
            logits = self._model.scores(window.token_ids)
            yield token_log_probs(
                logits[window.scored_from - 1 : -1], window.token_ids[window.scored_from :]
            )


class BackendScorer:
    """Scores with a bundle's graph, by the passes that read prompts.

    Windows are read side by side, a few rows of each in a pass.

    Args:
        backend: what runs the graph.
        context: number of positions the model has.
        batch: windows that are read together, as many as the backend can.
        rows: rows of each in a pass, likewise.
    """

    def __init__(
        self, backend: Backend, *, context: int, batch: int = _BATCH, rows: int = _ROWS
    ) -> None:
        limits = backend.limits
        self._backend = backend
        self._context = context
        self._batch = min(batch, limits.batch or batch)
        self._rows = min(rows, limits.block or rows, limits.rows or rows)

    def __call__(self, windows: Sequence[Window]) -> Iterator[NDArray[np.float64]]:
        """See `ScoreWindows`."""
        for start in range(0, len(windows), self._batch):
            yield from self._score(windows[start : start + self._batch])

    def _score(self, windows: Sequence[Window]) -> list[NDArray[np.float64]]:
        """Windows that are read together."""
        state = self._backend.allocate(len(windows), CacheSizing.STEPPED)
        found: list[list[NDArray[np.float64]]] = [[] for _ in windows]
        longest = max(len(window.token_ids) for window in windows)
        state.reserve(longest)
        for start in range(0, longest - 1, self._rows):  # behind the last token nothing counts
            parts = [self._part(window, start) for window in windows]
            outputs = Outputs.LOGITS if any(p and p.num_scored for p in parts) else Outputs.NONE
            inputs = make_step_inputs(
                parts,
                state,
                self._backend.contract,
                context=self._context,
                widths=self._backend.widths,
                outputs=outputs,
            )
            scores = self._backend.forward(state, inputs)
            if outputs:
                logits = scores.logits()
                for index, (window, part) in enumerate(zip(windows, parts, strict=True)):
                    if part is not None and part.num_scored:
                        first = start + part.scored_from + 1
                        targets = window.token_ids[first : first + part.num_scored]
                        found[index].append(token_log_probs(logits[index, : len(targets)], targets))
            self._backend.commit(
                state, [() if p is None else range(p.rows.num_rows) for p in parts]
            )
        state.close()
        return [np.concatenate(scored) for scored in found]

    def _part(self, window: Window, start: int) -> Part | None:
        """A window's rows from `start` on: all but the last token, behind which nothing counts."""
        token_ids = window.token_ids[start : min(start + self._rows, len(window.token_ids) - 1)]
        if not token_ids:
            return None
        # The row before a token scores it.
        scored_from = min(max(window.scored_from - 1 - start, 0), len(token_ids))
        return Part(
            rows=make_rows(len(token_ids), (), ()),
            token_ids=token_ids,
            scored_from=scored_from,
        )
