"""Which rows a step has: known tokens, a tree of drafts, and groups of lookahead slots.

Everything here is a value or a pure function of values. Rows come in this order: the known
tokens that are not cached yet (usually one, the root), the drafts, then the groups. Known tokens
and drafts are ordinary rows and are called verified; slots are lookahead rows. Nothing here knows
token scores, caches or devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from la_runtime.group_mask import GroupMask

__all__ = [
    "NO_DRAFTS",
    "DraftTree",
    "Group",
    "GroupMask",
    "Layout",
    "StepRows",
    "make_rows",
]

_CACHED_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """Drafts behind a root. A chain is a tree; a tree without drafts is plain decoding.

    Args:
        token_ids: one token per draft.
        parents: per draft, its parent: 0 is the root, i is the i-th draft (from 1). A parent
            comes before its children.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.parents), "one parent per draft"
        if self._shape.has_siblings:
            edges = set(zip(self.parents, self.token_ids, strict=True))
            assert len(edges) == len(self.parents), "siblings hold different tokens"

    @classmethod
    def chain(cls, token_ids: tuple[int, ...]) -> DraftTree:
        """Each token behind the one before it."""
        return cls(token_ids=token_ids, parents=_chain_parents(len(token_ids)))

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each draft; a child of the root has depth 1."""
        return self._shape.depths

    @property
    def depth(self) -> int:
        """Depth of the deepest draft, 0 without drafts."""
        return self._shape.depth

    @property
    def has_branches(self) -> bool:
        """Whether two drafts stand behind the same node."""
        return self._shape.has_siblings

    @property
    def _shape(self) -> _TreeShape:
        return _find_shape(self.parents)

    def child(self, node: int, token_id: int) -> int | None:
        """The draft behind `node` (0 = root) that holds `token_id`, counted from 1."""
        for draft, (parent, token) in enumerate(zip(self.parents, self.token_ids, strict=True), 1):
            if parent == node and token == token_id:
                return draft
        return None

    def keep(self, drafts: Sequence[int]) -> DraftTree:
        """These drafts alone, from 1, ascending; the parent of each is among them, or the root."""
        renamed = {0: 0} | {old: new for new, old in enumerate(drafts, 1)}
        return DraftTree(
            token_ids=tuple([self.token_ids[draft - 1] for draft in drafts]),
            parents=tuple([renamed[self.parents[draft - 1]] for draft in drafts]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TreeShape:
    """What the parents of a tree say. Trees differ from pass to pass, their shapes hardly do."""

    depths: tuple[int, ...]
    depth: int
    has_siblings: bool


@lru_cache(maxsize=512)
def _find_shape(parents: tuple[int, ...]) -> _TreeShape:
    assert all(0 <= p <= i for i, p in enumerate(parents)), "parents come first"
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return _TreeShape(
        depths=tuple(depths[1:]),
        depth=max(depths),
        has_siblings=len(set(parents)) < len(parents),
    )


@lru_cache(maxsize=512)
def _chain_parents(num_drafts: int) -> tuple[int, ...]:
    return tuple(range(num_drafts))


NO_DRAFTS = DraftTree()


@dataclass(frozen=True, slots=True)
class Group:
    """The slots behind one prefix: `node` 0 is the root, i the i-th draft."""

    node: int
    num_slots: int


class Layout(StrEnum):
    """Named rules for where groups stand: behind the root alone, or behind every prefix."""

    ROOT_ONLY = "root-only"
    FULL = "full"

    def groups(self, num_drafts: int, k: int) -> tuple[Group, ...]:
        """The groups of a step with this many drafts; none when k is 0."""
        if k == 0:
            return ()
        return _make_groups(0 if self is Layout.ROOT_ONLY else num_drafts, k)

    def max_rows(self, k: int) -> int:
        """Rows of the widest step at this k, all drafts given."""
        return 1 + k + k * len(self.groups(k, k))


@lru_cache(maxsize=512)
def _make_groups(last_node: int, k: int) -> tuple[Group, ...]:
    return tuple(Group(node, k) for node in range(last_node + 1))


@dataclass(frozen=True, kw_only=True, eq=False)
class StepRows:
    """The rows of one sequence in one block, without their tokens.

    Args:
        num_known: known rows at the start; the last of them is the root.
        num_drafts: draft rows behind them.
        groups: the groups, in row order.
        offsets: [rows] int64, position of each row relative to the first.
        slot_index: [rows] int64, i for slot i (from 1) of its group, 0 for a verified row.
        visible: [rows, rows] bool, whether the row (axis 0) sees the row (axis 1).
        columns: [rows] int64, where each row's key stands, counted from the first row's.
    """

    num_known: int
    num_drafts: int
    groups: tuple[Group, ...]
    offsets: NDArray[np.int64]
    slot_index: NDArray[np.int64]
    visible: NDArray[np.bool_]
    columns: NDArray[np.int64]

    @cached_property
    def num_verified(self) -> int:
        """Known rows and draft rows."""
        return self.num_known + self.num_drafts

    @cached_property
    def num_rows(self) -> int:
        """All rows, slots included."""
        return len(self.offsets)

    @cached_property
    def is_in_order(self) -> bool:
        """Whether every row's key stands in the column behind that of the row before it."""
        return bool(np.array_equal(self.columns, np.arange(self.num_rows)))

    @cached_property
    def num_columns(self) -> int:
        """Columns from the first row's to the last one's, those where nobody stands included."""
        return int(self.columns.max()) + 1

    def row(self, node: int) -> int:
        """Block row of a node: 0 is the root, i the i-th draft."""
        return self.num_known - 1 + node

    def slot_rows(self, node: int) -> range:
        """Block rows of the group behind a node; empty when the group is absent."""
        first = self.num_verified
        for group in self.groups:
            if group.node == node:
                return range(first, first + group.num_slots)
            first += group.num_slots
        return range(0)


def make_rows(
    num_known: int,
    parents: tuple[int, ...],
    groups: tuple[Group, ...],
    *,
    group_mask: GroupMask = GroupMask.STRICT,
    draft_columns: tuple[int, ...] = (),
) -> StepRows:
    """Lay out the rows of one sequence.

    Verified rows see the known rows before them and their own ancestors. A slot sees what the
    row it stands behind sees, and itself (with `GroupMask.CAUSAL` also the slots before it).
    No verified row ever sees a slot.

    Args:
        num_known: known tokens that are not cached, at least 1.
        parents: the draft tree's parents.
        groups: where slots stand, in row order.
        group_mask: what slots see of their own group.
        draft_columns: per draft, where its key stands, counted from the root's; slots stand behind
            all of them. Empty puts every row behind the one before it.
    """
    if num_known + len(parents) <= _CACHED_ROWS:
        return _make_cached_rows(num_known, parents, groups, group_mask, draft_columns)
    return _make_rows(num_known, parents, groups, group_mask, draft_columns)


def _make_rows(
    num_known: int,
    parents: tuple[int, ...],
    groups: tuple[Group, ...],
    group_mask: GroupMask,
    draft_columns: tuple[int, ...],
) -> StepRows:
    assert num_known >= 1, "a step has a root"
    num_verified = num_known + len(parents)
    num_rows = num_verified + sum(group.num_slots for group in groups)
    offsets = np.zeros(num_rows, dtype=np.int64)
    slot_index = np.zeros(num_rows, dtype=np.int64)
    visible = np.zeros((num_rows, num_rows), dtype=np.bool_)  # [rows, rows]
    offsets[:num_known] = np.arange(num_known)
    visible[:num_known, :num_known] = np.tri(num_known, dtype=np.bool_)
    for draft, parent in enumerate(parents, 1):
        row, parent_row = num_known - 1 + draft, num_known - 1 + parent
        offsets[row] = offsets[parent_row] + 1
        visible[row] = visible[parent_row]
        visible[row, row] = True
    first = num_verified
    for group in groups:
        prefix_row = num_known - 1 + group.node
        for slot in range(1, group.num_slots + 1):
            row = first + slot - 1
            offsets[row] = offsets[prefix_row] + slot
            slot_index[row] = slot
            visible[row] = visible[prefix_row]
            seen_from = row if group_mask is GroupMask.STRICT else first
            visible[row, seen_from : row + 1] = True
        first += group.num_slots
    columns = np.arange(num_rows)
    if draft_columns:
        root = num_known - 1
        columns[num_known:num_verified] = np.asarray(draft_columns) + root
        behind = root + max(draft_columns) + 1
        columns[num_verified:] = np.arange(behind, behind + num_rows - num_verified)
    for array in (offsets, slot_index, visible, columns):
        array.setflags(write=False)
    return StepRows(
        num_known=num_known,
        num_drafts=len(parents),
        groups=groups,
        offsets=offsets,
        slot_index=slot_index,
        visible=visible,
        columns=columns,
    )


_make_cached_rows = lru_cache(maxsize=512)(_make_rows)
