"""One forward pass's inputs, assembled from the rows of each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from la_runtime.backends.base import CacheState, Outputs, StepInputs
from la_runtime.contract import CacheForm, Contract
from la_runtime.layout import StepRows
from la_runtime.masks import make_attention_mask
from la_runtime.storage import stored_masked_value

__all__ = ["Part", "block_width", "make_step_inputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One sequence's part of a block.

    Args:
        rows: its rows.
        token_ids: tokens of the verified rows.
        scored_from: first verified row whose scores are wanted; slots are always scored.
    """

    rows: StepRows
    token_ids: tuple[int, ...]
    scored_from: int

    @property
    def num_scored(self) -> int:
        """Rows whose scores are wanted; they are the last ones of the part."""
        return self.rows.num_rows - self.scored_from


def block_width(num_rows: int, widths: tuple[int, ...]) -> int:
    """The narrowest of `widths` that holds `num_rows`; `num_rows` itself when none does."""
    return min((width for width in widths if width >= num_rows), default=num_rows)


def make_step_inputs(
    parts: Sequence[Part | None],
    state: CacheState,
    contract: Contract,
    *,
    context: int,
    widths: tuple[int, ...],
    outputs: Outputs,
    least_scored: int = 1,
) -> StepInputs:
    """Put the parts of all sequences into one block.

    Padding rows come last: id 0, the position of the sequence's first row. Slots past the end of
    the context keep their row and take the last position; padded entries of `logits_rows`
    repeat row 0.

    Args:
        parts: per sequence its part, None for one that rides as padding.
        state: the cache the block will run over.
        contract: the graph's contract.
        context: number of positions the model has.
        widths: block widths to choose from, see `block_width`.
        outputs: which scores will be read.
        least_scored: entries of `logits_rows` per sequence, at least; for kernels that sum in
            another order for another number of them.
    """
    batch = len(parts)
    present = [part for part in parts if part is not None]
    block_len = block_width(max(part.rows.num_rows for part in present), widths)
    num_scored = max(least_scored, *(part.num_scored for part in present)) if outputs else 1
    input_ids = np.zeros((batch, block_len), dtype=np.int64)
    position_ids = np.empty((batch, block_len), dtype=np.int64)
    logits_rows = np.zeros((batch, num_scored), dtype=np.int64)
    position_ids[:] = np.minimum(state.lengths, context - 1)[:, None]
    for sequence, part in enumerate(parts):
        if part is None:
            continue
        rows = part.rows
        num_rows, num_verified = rows.num_rows, rows.num_verified
        input_ids[sequence, :num_verified] = part.token_ids
        input_ids[sequence, num_verified:num_rows] = rows.slot_index[num_verified:] + (
            contract.vocab_size - 1
        )
        np.minimum(
            rows.offsets + state.lengths[sequence],
            context - 1,
            out=position_ids[sequence, :num_rows],
        )
        if outputs:
            logits_rows[sequence, : part.num_scored] = np.arange(part.scored_from, num_rows)
    is_scatter = contract.cache_form is CacheForm.SCATTER
    return StepInputs(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=make_attention_mask(
            [None if part is None else part.rows for part in parts],
            state.lengths,
            block_columns=state.lengths if is_scatter else np.full(batch, state.past_len),
            num_keys=state.past_len + (0 if is_scatter else block_len),
            block_len=block_len,
            masked=stored_masked_value(contract.compute_dtype),
        ),
        logits_rows=logits_rows,
        outputs=outputs,
    )
