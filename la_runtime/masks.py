"""The additive attention mask of a block. Pure functions; rows are queries, columns are keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from la_runtime.layout import StepRows

__all__ = [
    "advance_attention_mask",
    "count_columns",
    "make_attention_mask",
    "make_sliding_mask",
    "place_keys",
]


def make_attention_mask(
    rows: Sequence[StepRows | None],
    lengths: NDArray[np.int64],
    *,
    block_columns: NDArray[np.int64],
    num_keys: int,
    block_len: int,
    masked: np.generic,
) -> NDArray[np.generic]:
    """The mask of a block; its rows' keys stand where `StepRows.columns` says.

    In cache form `concat` the block's columns come behind all cache places, in `scatter` behind
    those the sequence has committed. Each row sees its sequence's committed places and the block
    rows that `StepRows.visible` names. Padding rows, and every row of a sequence without rows, see
    themselves alone, so that no softmax is empty, and are seen by none.

    Args:
        rows: per sequence its rows, None for a sequence that rides as padding.
        lengths: [batch] committed cache places per sequence.
        block_columns: [batch] column of each sequence's first row, at least `lengths`. Columns of
            padding rows come behind those of its other rows.
        num_keys: columns; each sequence's block fits in.
        block_len: rows of the block, at least those of any sequence.
        masked: the additive value for "not seen", see `storage.stored_masked_value`.

    Returns:
        [batch, 1, block, keys] in the dtype of `masked`: 0 where seen, `masked` elsewhere.
    """
    mask = np.full((len(rows), 1, block_len, num_keys), masked)
    for sequence, step_rows in enumerate(rows):
        seen = mask[sequence, 0]  # [block, keys]
        _show_committed(seen, step_rows, 0, int(lengths[sequence]))
        _show_block(seen, step_rows, int(block_columns[sequence]))
    return mask


def place_keys(
    position_ids: NDArray[np.int64],
    columns: NDArray[np.int64],
    *,
    block_columns: NDArray[np.int64],
    num_keys: int,
) -> NDArray[np.int64]:
    """[batch, keys] positions of the keys that any row may see.

    A committed place holds the token of its own number; in the block's columns stand its rows.

    Args:
        position_ids: [batch, block] positions of the rows.
        columns: [batch, block] their columns, counted from the sequence's first.
        block_columns: [batch] column of each sequence's first row.
        num_keys: columns of the mask.
    """
    positions = np.tile(np.arange(num_keys), (len(position_ids), 1))
    np.put_along_axis(positions, columns + block_columns[:, np.newaxis], position_ids, axis=1)
    return positions


def make_sliding_mask(
    mask: NDArray[np.generic],
    position_ids: NDArray[np.int64],
    key_positions: NDArray[np.int64],
    *,
    window: int,
    masked: np.generic,
    out: NDArray[np.generic] | None = None,
) -> NDArray[np.generic]:
    """The mask of layers with a sliding window: what `mask` shows, less what is too far behind.

    The window counts positions, not columns: a slot that stands i positions behind the root sees
    i fewer of the first tokens than the root does.

    Args:
        mask: [batch, 1, block, keys] of layers without a window.
        position_ids: [batch, block] positions of the rows.
        key_positions: [batch, keys], see `place_keys`.
        window: positions that a row sees, its own among them.
        masked: see `make_attention_mask`.
        out: where to write it; new memory when not given.
    """
    rows, keys = (array.astype(np.int32) for array in (position_ids, key_positions))
    is_behind = rows[:, :, np.newaxis] - keys[:, np.newaxis] >= window
    found = np.empty_like(mask) if out is None else out
    np.copyto(found, mask)
    found[:, 0][is_behind] = masked
    return found


def advance_attention_mask(
    seen: NDArray[np.generic],
    rows: StepRows | None,
    *,
    committed: tuple[int, int],
    columns: tuple[int, int],
    masked: np.generic,
) -> None:
    """Turn one sequence's part of an earlier mask into that of a pass with the same rows.

    Args:
        seen: [block, keys] of that sequence; changed in place.
        rows: its rows, the same as then.
        committed: committed cache places then and now; no fewer now.
        columns: column of its first row then and now.
        masked: see `make_attention_mask`.
    """
    before, now = columns
    if before != now:
        width = count_columns(rows, len(seen))
        seen[:, now : now + width] = seen[:, before : before + width]
        seen[:, before:now] = masked
    _show_committed(seen, rows, *committed)


def _show_committed(seen: NDArray[np.generic], rows: StepRows | None, start: int, end: int) -> None:
    """Let the rows of a sequence see these of its cache places."""
    if rows is not None:
        seen[: rows.num_rows, start:end] = 0


def _show_block(seen: NDArray[np.generic], rows: StepRows | None, first: int) -> None:
    """Let the rows of a block see each other, where their columns start at `first`."""
    num_rows = num_columns = 0
    if rows is not None:
        num_rows, num_columns = rows.num_rows, rows.num_columns
        if rows.is_in_order:
            seen[:num_rows, first : first + num_rows][rows.visible] = 0
        else:
            row, seen_row = np.nonzero(rows.visible)
            seen[row, first + rows.columns[seen_row]] = 0
    if num_rows < len(seen):
        padding = np.arange(len(seen) - num_rows)
        seen[num_rows + padding, first + num_columns + padding] = 0


def count_columns(rows: StepRows | None, block_len: int) -> int:
    """Columns of a sequence's block, those of its padding rows included.

    Args:
        rows: its rows.
        block_len: rows of the block.
    """
    return block_len if rows is None else block_len - rows.num_rows + rows.num_columns
