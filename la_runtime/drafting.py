"""Where drafts come from: the lookahead slots of the last pass."""

from __future__ import annotations

from collections.abc import Sequence

from la_runtime.layout import StepRows

__all__ = ["proposing_rows"]


def proposing_rows(rows: StepRows, path: Sequence[int]) -> range:
    """Block rows of the slots that propose the tokens after the bonus token, nearest first.

    The group behind the last accepted node proposes with all its slots. When the layout has none
    there, the nearest group further up the path does, less the slots whose tokens are now known:
    slot (j, a-j+i) proposes the i-th token after the bonus token.

    Args:
        rows: the rows of the pass.
        path: the accepted drafts from the root down.
    """
    nodes = (0, *path)
    for passed, node in enumerate(reversed(nodes)):
        slots = rows.slot_rows(node)
        if slots:
            return slots[passed:]
    return range(0)
