"""How far logits of the same position differ between a narrow pass and a wide one, or a tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from la_runtime.backends.base import Backend, CacheSizing, Outputs
from la_runtime.block import Part, make_step_inputs
from la_runtime.contract import RowPlaces
from la_runtime.layout import DraftTree, make_rows
from la_runtime.placement import place_drafts, trim_to_runs

__all__ = ["EPSILON_FACTOR", "measure_epsilon", "read_in_trees", "read_logits"]

EPSILON_FACTOR = 4
# Drafts of the deepest path, and wrong ones beside each of its nodes.
_DEEPEST = 5
_MOST_BESIDE = 3
# Now and then a path as long as a copy of the text can be, with a rival for its first token.
_LONG_PATH = 20
_SHARE_OF_LONG_PATHS = 0.1


def read_logits(
    backend: Backend, token_ids: Sequence[int], *, width: int, context: int
) -> Iterator[NDArray[np.float32]]:
    """Logits of a text, read `width` rows a pass, or as many as the backend can.

    Yields:
        [rows, vocab_size] per pass; a view, valid until the next one.
    """
    limits = backend.limits
    width = min(width, limits.block or width, limits.rows or width)
    state = backend.allocate(1, CacheSizing.STEPPED)
    for start in range(0, len(token_ids), width):
        part = tuple(token_ids[start : start + width])
        inputs = make_step_inputs(
            [Part(rows=make_rows(len(part), (), ()), token_ids=part, scored_from=0)],
            state,
            backend.contract,
            context=context,
            widths=backend.widths,
            outputs=Outputs.LOGITS,
        )
        yield backend.forward(state, inputs).logits()[0]
        backend.commit(state, [range(len(part))])
    state.close()


def read_in_trees(
    backend: Backend, token_ids: Sequence[int], *, context: int, seed: int
) -> Iterator[NDArray[np.float32]]:
    """Logits of a text that stands as some path of a random tree in every pass.

    The other drafts are random tokens, some of which come before the right one, so that the path
    turns aside where they stand.

    Yields:
        [rows, vocab_size] per pass, in the order of the text; a view, valid until the next one.
    """
    rng = np.random.default_rng(seed)
    state = backend.allocate(1, CacheSizing.STEPPED)
    limits = backend.limits
    most_rows = min(limit for limit in (limits.block, limits.rows, 64) if limit is not None)
    start = 0
    while start < len(token_ids):
        drafts, path = _draw_tree(rng, token_ids[start + 1 :], backend.contract.vocab_size)
        columns: tuple[int, ...] = ()
        if 1 + len(drafts.parents) > most_rows:
            drafts, path = DraftTree(), []
        elif backend.contract.row_places is RowPlaces.CHOSEN:
            kept = trim_to_runs(drafts, root_column=start)
            path = [kept.index(node) + 1 for node in path if node in kept]
            drafts = drafts.keep(kept)
            columns = place_drafts(drafts.parents)
        part = Part(
            rows=make_rows(1, drafts.parents, (), draft_columns=columns),
            token_ids=(token_ids[start], *drafts.token_ids),
            scored_from=0,
        )
        inputs = make_step_inputs(
            [part],
            state,
            backend.contract,
            context=context,
            widths=backend.widths,
            outputs=Outputs.LOGITS,
        )
        rows = [0, *path]
        yield backend.forward(state, inputs).logits()[0][rows]
        backend.commit(state, [rows])
        start += len(rows)
    state.close()


def _draw_tree(
    rng: np.random.Generator, text: Sequence[int], vocab_size: int
) -> tuple[DraftTree, list[int]]:
    """A tree, and the nodes of the path in it that the text takes."""
    token_ids: list[int] = []
    parents: list[int] = []
    path: list[int] = []
    node = 0
    if rng.random() < _SHARE_OF_LONG_PATHS:
        return _draw_long_path(rng, text[:_LONG_PATH], vocab_size)
    for right in text[: int(rng.integers(_DEEPEST + 1))]:
        beside = rng.integers(vocab_size, size=rng.integers(_MOST_BESIDE + 1)).tolist()
        children = list(dict.fromkeys([*beside, right]))
        rng.shuffle(children)
        first = len(token_ids) + 1
        token_ids += children
        parents += [node] * len(children)
        wrong = first + int(rng.integers(len(children)))
        node = first + children.index(right)
        if wrong != node:  # a branch that goes on
            token_ids.append(int(rng.integers(vocab_size)))
            parents.append(wrong)
        path.append(node)
    return DraftTree(token_ids=tuple(token_ids), parents=tuple(parents)), path


def _draw_long_path(
    rng: np.random.Generator, text: Sequence[int], vocab_size: int
) -> tuple[DraftTree, list[int]]:
    """The text as one path, and somewhere among its drafts another one for its first token."""
    token_ids, parents = list(text), list(range(len(text)))
    path = list(range(1, len(text) + 1))
    rival = int(rng.integers(vocab_size))
    if text and rival != text[0]:
        place = int(rng.integers(1, len(text) + 1))
        token_ids.insert(place, rival)
        parents = [parent + (parent > place) for parent in parents]
        parents.insert(place, 0)
        path = [node + (node > place) for node in path]
    return DraftTree(token_ids=tuple(token_ids), parents=tuple(parents)), path


def measure_epsilon(
    backend: Backend, token_ids: Sequence[int], *, widths: Sequence[int], context: int
) -> float:
    """Margin below which two tokens are a near-tie for this backend.

    `EPSILON_FACTOR` times the largest difference of a logit between one-row passes and passes of
    any of `widths` rows, or over trees of drafts, over all positions of the text.

    Args:
        backend: what runs the graph.
        token_ids: a text, best of 1,000 tokens or more.
        widths: row counts to compare with one row.
        context: number of positions the model has.
    """
    wide = [
        _rows_one_by_one(read_logits(backend, token_ids, width=width, context=context))
        for width in widths
    ]
    wide.append(
        _rows_one_by_one(read_in_trees(backend, token_ids, context=context, seed=len(token_ids)))
    )
    largest = 0.0
    for narrow in read_logits(backend, token_ids, width=1, context=context):
        for rows in wide:
            largest = max(largest, float(np.abs(next(rows) - narrow[0]).max()))
    return EPSILON_FACTOR * largest


def _rows_one_by_one(passes: Iterator[NDArray[np.float32]]) -> Iterator[NDArray[np.float32]]:
    for logits in passes:
        yield from logits
