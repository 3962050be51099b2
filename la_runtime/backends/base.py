"""The seam between decoding and whatever runs the graph. Batch first; K/V never crosses it.

`la_runtime` above this line is NumPy on values: it prepares a block, reads scores and says which
rows to commit. A backend owns the cache and nothing else that changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Flag, StrEnum, auto
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from la_runtime.contract import Contract

__all__ = ["Backend", "CacheSizing", "CacheState", "Outputs", "PassLimits", "Scores", "StepInputs"]


class Outputs(Flag):
    """What a pass has to compute besides K/V. What is not asked for is not computed."""

    NONE = 0
    TOP = auto()
    LOGSUMEXP = auto()
    LOGITS = auto()


class CacheSizing(StrEnum):
    """How many cache columns a pass presents.

    ``stepped``: the buffer's capacity, which grows in steps; unused columns are masked.
    ``exact``: exactly the longest sequence's length, and in cache form `scatter` without a fixed
    capacity the block's rows behind it, so that at batch 1 every key's column is its position.
    It exists to prove bit-equality, and may cost a copy of the cache per pass.
    """

    STEPPED = "stepped"
    EXACT = "exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLimits:
    """The largest pass a backend can run; None where any size will do.

    Args:
        batch: sequences.
        block: rows per sequence, padding included.
        rows: rows per sequence whose scores it can compute.
        places: cache places a sequence may have committed before a pass.
        k: lookahead length of the steps it was made for; None for any the graph has vectors for.
    """

    batch: int | None = None
    block: int | None = None
    rows: int | None = None
    places: int | None = None
    k: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One block, ready to run. The arrays hold it until the next one is written into them.

    Args:
        input_ids: [batch, block] int64; ids >= vocab_size are lookahead tokens.
        position_ids: [batch, block] int64.
        attention_mask: [batch, 1, block, keys] additive, in the compute dtype as `storage` holds
            it; as many keys as `CacheState.num_keys` says.
        logits_rows: [batch, rows] int64, the block rows whose scores are wanted.
        outputs: which scores will be read.
        columns: [batch, block] int64, where each row's key stands in the mask, counted from the
            column of the sequence's first row.
        sliding_attention_mask: likewise, of layers with a sliding window; None where the contract
            has none.
    """

    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    attention_mask: NDArray[np.generic]
    logits_rows: NDArray[np.int64]
    outputs: Outputs
    columns: NDArray[np.int64]
    sliding_attention_mask: NDArray[np.generic] | None = None


class Scores(Protocol):
    """Scores of the rows in `logits_rows`: views, valid until the state's next forward."""

    def top(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Best tokens and logits, [batch, rows, top_c], descending, ties to the lowest id.

        On a GPU, which of several tokens tied for the last place is there is open.
        """
        ...

    def logsumexp(self) -> NDArray[np.float32]:
        """[batch, rows] log of the summed exponentials of the logits."""
        ...

    def logits(self) -> NDArray[np.float32]:
        """[batch, rows, vocab_size]."""
        ...


class CacheState(Protocol):
    """The cache of `batch` sequences, each with its own length."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[batch] committed places per sequence. Read only."""
        ...

    @property
    def past_len(self) -> int:
        """Cache places that are laid out per sequence.

        In cache form `concat` the next forward presents as many, and the block's columns follow.
        """
        ...

    def num_keys(self, num_columns: int) -> int:
        """Columns of the next forward's mask.

        Args:
            num_columns: from the first to the last of a sequence's block; as many as it has rows,
                unless places of rows can be chosen, see `Contract.row_places`.
        """
        ...

    def reserve(self, places: int) -> None:
        """A hint: each sequence may come to hold this many places."""
        ...

    def keep(self, indices: Sequence[int]) -> None:
        """Keep these sequences, in this order, and drop the others; an index twice forks one."""
        ...

    def take(self, indices: Sequence[int]) -> CacheState:
        """A copy of these sequences, in this order, as a cache of its own."""
        ...

    def absorb(self, other: CacheState) -> None:
        """Take over another cache's sequences, behind its own; the other is closed."""
        ...

    def truncate(self, lengths: Sequence[int]) -> None:
        """Drop what is behind these lengths, one per sequence and none above its own."""
        ...

    def spoil_unused(self, seed: int) -> None:
        """For audits: fill every place that holds nothing with random finite K/V.

        They are drawn with 10 times the root mean square of the used places, so that a mask that
        shows one of them, or a row that reads one, changes what the model says.
        """
        ...

    def read(self, sequence: int) -> NDArray[np.float32]:
        """For audits: a copy of what a sequence has committed.

        Returns:
            [2 * layers, kv_heads, length, head_dim], in the order of `Contract.past_names`.
        """
        ...

    def close(self) -> None:
        """Release the cache."""
        ...


class Backend(Protocol):
    """Runs blocks and owns caches."""

    @property
    def contract(self) -> Contract:
        """The graph's contract."""
        ...

    @property
    def widths(self) -> tuple[int, ...]:
        """Block widths it runs at full speed; empty when every width is as good."""
        ...

    @property
    def limits(self) -> PassLimits:
        """The largest pass it can run."""
        ...

    def allocate(self, batch: int, sizing: CacheSizing) -> CacheState:
        """A cache of `batch` empty sequences, zeroed."""
        ...

    def forward(self, state: CacheState, inputs: StepInputs) -> Scores:
        """Run one block. The cache is unchanged until `commit`."""
        ...

    def commit(self, state: CacheState, rows: Sequence[Sequence[int]]) -> None:
        """Append the K/V of these block rows of the last forward, per sequence and in order.

        Everything else of that block is discarded.
        """
        ...

    def set_lookahead_embeddings(self, embeddings: NDArray[np.floating]) -> None:
        """Bind other lookahead vectors, [k_max, hidden_size]; rounded to the compute dtype."""
        ...

    def close(self) -> None:
        """Release the graph."""
        ...
