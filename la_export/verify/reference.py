"""What a bundle is compared with: a plain causal pass over a whole text.

`torch` is transformers' own model; it is opened by `source_model` and by nobody here. `self` is
the bundle's graph, read without cache, drafts, slots or padding: it vouches for everything
that decoding adds, and not for the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from la_runtime.backends.base import Backend, CacheSizing, CacheState, Outputs, StepInputs
from la_runtime.bundle import Bundle
from la_runtime.contract import CacheForm, masked_value
from la_runtime.masks import make_sliding_mask
from la_runtime.storage import stored_masked_value, to_stored

__all__ = ["OwnReference", "Reference", "SourceModel"]


class Reference(Protocol):
    """Reads a text in one causal pass."""

    def scores(
        self,
        token_ids: Sequence[int],
        lookahead_embeddings: NDArray[np.float32] | None = None,
        *,
        position_ids: Sequence[int] | None = None,
    ) -> NDArray[np.float32]:
        """Logits [tokens, vocab_size] after every token.

        Args:
            token_ids: [tokens]; ids >= vocab_size are lookahead tokens.
            lookahead_embeddings: [k_max, hidden], needed for such ids alone.
            position_ids: [tokens]; 0, 1, 2, ... when not given.
        """
        ...

    def nudged_scores(self, token_ids: Sequence[int], *, seed: int) -> NDArray[np.float32]:
        """The same of a model whose input is off by about as much as rounding, at random."""
        ...


class SourceModel(Protocol):
    """The checkpoint a bundle was made from, read by transformers' own code."""

    @property
    def reference(self) -> Reference:
        """Its model in PyTorch."""
        ...

    def end_token_ids(self) -> Mapping[str, tuple[int, ...]]:
        """Tokens that end a text, by where the checkpoint says so."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids without special tokens."""
        ...

    def vocabulary(self) -> Mapping[str, int]:
        """Every token, added ones included, and its id."""
        ...

    def template_text(self) -> str | None:
        """The chat template as text; None when there is none, or more than one."""
        ...

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> str | None:
        """Text of a conversation; None without a chat template."""
        ...

    def check_graphs(self, bundle: Bundle) -> str:
        """Compare the graph files with the contract; what was found, in a line.

        Raises:
            CheckError: one breaks it.
        """
        ...

    def compare_weights(self, graphs: Sequence[Path]) -> tuple[int, list[str]]:
        """Compare every weight of some graphs with the checkpoint's, number by number.

        Returns:
            How many are equal, and a line for each that is not, or that the graph lacks.
        """
        ...

    def find_nonfinite_weight(self, graph: Path) -> str | None:
        """Name of a weight of a graph that holds NaN or infinity."""
        ...


class OwnReference:
    """The bundle's own graph, one causal pass a text and nothing else in it.

    Builds its inputs by itself, so that it shares neither masks, layouts nor cache with decoding.

    Args:
        backend: what runs the graph; the lookahead vectors are those bound to it.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def scores(
        self,
        token_ids: Sequence[int],
        lookahead_embeddings: NDArray[np.float32] | None = None,
        *,
        position_ids: Sequence[int] | None = None,
    ) -> NDArray[np.float32]:
        """See `Reference.scores`."""
        del lookahead_embeddings  # bound to the backend
        count = len(token_ids)
        positions = range(count) if position_ids is None else position_ids
        state = self._backend.allocate(1, CacheSizing.EXACT)
        limits = self._backend.limits
        step = min(limits.block or count, limits.rows or count)
        logits = [
            self._run(state, token_ids[start : start + step], positions[start : start + step])
            for start in range(0, count, step)
        ]
        state.close()
        return np.concatenate(logits)

    def nudged_scores(self, token_ids: Sequence[int], *, seed: int) -> NDArray[np.float32]:
        """See `Reference.nudged_scores`; a graph has one input, and it is exact."""
        del seed
        return self.scores(token_ids)

    def _run(
        self, state: CacheState, token_ids: Sequence[int], positions: Sequence[int]
    ) -> NDArray[np.float32]:
        """[tokens, vocab_size] of one causal pass behind what is cached; its rows are committed."""
        contract = self._backend.contract
        start, count = int(state.lengths[0]), len(token_ids)
        # A plan may present a column more than an empty cache has.
        first = state.past_len if contract.cache_form is CacheForm.CONCAT else start
        seen = np.zeros((count, state.num_keys(count)), np.bool_)
        seen[:, :start] = True
        seen[:, first : first + count] = np.tri(count, dtype=np.bool_)
        mask = np.where(seen, 0.0, masked_value(contract.compute_dtype))
        stored = to_stored(mask[None, None], contract.compute_dtype)
        row_positions = np.asarray([positions], dtype=np.int64)
        sliding = None
        if contract.window is not None:
            # What is cached is what came before in one text.
            keys = np.arange(seen.shape[1]) + (int(row_positions[0, 0]) - start)
            keys[first : first + count] = row_positions[0]
            sliding = make_sliding_mask(
                stored,
                row_positions,
                keys[None],
                window=contract.window,
                masked=stored_masked_value(contract.compute_dtype),
            )
        scores = self._backend.forward(
            state,
            StepInputs(
                input_ids=np.asarray([token_ids], dtype=np.int64),
                position_ids=row_positions,
                attention_mask=stored,
                logits_rows=np.arange(count)[None],
                outputs=Outputs.LOGITS,
                columns=np.arange(count)[None],
                sliding_attention_mask=sliding,
            ),
        )
        logits: NDArray[np.float32] = scores.logits()[0].copy()
        self._backend.commit(state, [range(count)])
        return logits
