"""The additive attention mask of a block. Pure functions; rows are queries, columns are keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from la_runtime.layout import StepRows

__all__ = ["make_attention_mask"]


def make_attention_mask(
    rows: Sequence[StepRows | None],
    lengths: NDArray[np.int64],
    *,
    past_len: int,
    block_len: int,
    masked: float,
    dtype: np.dtype[np.floating],
) -> NDArray[np.floating]:
    """Mask for cache form `concat`: `past_len` cache columns, then the block's own columns.

    Each row sees its sequence's committed places and the block rows that `StepRows.visible`
    names. Padding rows, and every row of a sequence without rows, see themselves alone, so that
    no softmax is empty, and are seen by none.

    Args:
        rows: per sequence its rows, None for a sequence that rides as padding.
        lengths: [batch] committed cache places per sequence.
        past_len: cache columns this pass presents, at least max(lengths).
        block_len: rows of the block, at least those of any sequence.
        masked: the additive value for "not seen".
        dtype: dtype of the mask.

    Returns:
        [batch, 1, block, past + block] `dtype`: 0 where seen, `masked` elsewhere.
    """
    mask = np.full((len(rows), 1, block_len, past_len + block_len), masked, dtype=dtype)
    for sequence, step_rows in enumerate(rows):
        seen = mask[sequence, 0]  # [block, past + block]
        num_rows = 0
        if step_rows is not None:
            num_rows = step_rows.num_rows
            seen[:num_rows, : lengths[sequence]] = 0
            own = seen[:num_rows, past_len : past_len + num_rows]  # [rows, rows]
            own[step_rows.visible] = 0
        padding = np.arange(num_rows, block_len)
        seen[padding, past_len + padding] = 0
    return mask
