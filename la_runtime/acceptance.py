"""Which proposals become output. Pure functions; neither rule knows where a proposal came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from la_runtime.layout import DraftTree

__all__ = ["accept_exact", "accept_threshold"]


def accept_exact(drafts: DraftTree, choose: Callable[[int], int | None]) -> tuple[int, ...]:
    """The longest path of drafts equal to what the model itself chooses.

    Args:
        drafts: the verified tree.
        choose: the model's token after a node (0 = root, i = i-th draft). It is asked for the
            root and then for each accepted draft, in order, and for no other node. None where it
            cannot be told: nothing behind that node is accepted.

    Returns:
        The accepted drafts, from the root down; the model's choice after the last of them (or
        after the root) is the bonus token.
    """
    path: list[int] = []
    node = 0
    while (token_id := choose(node)) is not None:
        child = drafts.child(node, token_id)
        if child is None:
            break
        path.append(child)
        node = child
    return tuple(path)


def accept_threshold(probabilities: Sequence[float], tau: float) -> int:
    """Length of the longest prefix of proposals with probability at least `tau`.

    Source: Lookahead Attention, section 2.4.
    """
    count = 0
    for probability in probabilities:
        if not probability >= tau:  # NaN is no probability
            break
        count += 1
    return count
