"""Where the keys of drafts stand among the columns of attention. Pure functions of values.

A row's attention sums over columns, and floating-point sums depend on their order. A chain of
drafts stands where plain decoding would have put it, one column behind the other. Of a tree only
one path can; the keys of a side branch stand further right, behind columns that the branch does
not see and that count as exact zeros. Two things in ONNX Runtime's kernels then still tell the
two apart: the sum of a softmax is made in as many lanes as a vector register has, column c in lane
c modulo 16, and the product with the values is summed in runs of 128 columns or a multiple of
that. So a branch that stands a multiple of 16 columns further right, and leaves no run by that,
has the bits of a chain.

Source: onnxruntime, `onnxruntime/core/mlas/lib` (compute.cpp, sgemm.cpp); held by
`tests/la_export/graph/test_row_invariance.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from la_runtime.layout import DraftTree

__all__ = ["COLUMN_STRIDE", "place_drafts", "trim_to_runs"]

COLUMN_STRIDE: Final = 16
_RUN: Final = 128


def place_drafts(parents: Sequence[int]) -> tuple[int, ...]:
    """Per draft, its column, counted from the root's.

    The first child of a node continues its path. Another stands a multiple of `COLUMN_STRIDE`
    columns further right, where nobody stands yet.

    Args:
        parents: of a tree, see `DraftTree`.
    """
    columns = [0]
    taken = {0}
    for parent in parents:
        column = _next_column(columns[parent], taken)
        taken.add(column)
        columns.append(column)
    return tuple(columns[1:])


def trim_to_runs(drafts: DraftTree, *, root_column: int) -> tuple[int, ...]:
    """The drafts that have the bits of a chain, from 1, where the root stands in this column.

    What stands behind one that has not is left out as well. The others stand as if it were not
    there.

    Args:
        drafts: the tree.
        root_column: the number of cached tokens, where the root is the only other known one.
    """
    columns: dict[int, int] = {0: 0}  # of the root and the drafts that are kept
    taken = {0}
    kept: list[int] = []
    for draft, (parent, depth) in enumerate(zip(drafts.parents, drafts.depths, strict=True), 1):
        if parent not in columns:
            continue
        column = _next_column(columns[parent], taken)
        if (root_column + depth) // _RUN == (root_column + column) // _RUN:
            columns[draft] = column
            taken.add(column)
            kept.append(draft)
    return tuple(kept)


def _next_column(before: int, taken: Collection[int]) -> int:
    """Where the next draft of a path may stand, behind one in column `before`."""
    column = before + 1
    while column in taken:
        column += COLUMN_STRIDE
    return column
