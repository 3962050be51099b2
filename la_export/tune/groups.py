"""Which lookahead groups stand behind which prefixes of some texts, packed as rows of one pass.

A group behind column p of a text has slots i = 1, 2, ...; slot i stands at position p + i and is to
propose the token of position p + i + 1. Groups of a text see none of each other, so they may stand
behind every prefix at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from la_export.tune.texts import OwnText
from la_runtime.layout import GroupMask

__all__ = ["NO_TARGET", "GroupBlock", "draw_anchors", "every_anchor", "pack_groups"]

NO_TARGET = -1
# A group reaches one slot further than this share of the groups that reach the slot before it.
_REACH = 0.7

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBlock:
    """Rows of one pass; texts that need fewer are padded with slots that propose nothing.

    Args:
        slots: [texts, rows] from 0; a group's rows follow each other.
        anchors: [texts, rows] the column that the row's group stands behind.
        targets: [texts, rows] token to propose; `NO_TARGET` behind the text's end.
    """

    slots: Integers
    anchors: Integers
    targets: Integers

    @property
    def positions(self) -> Integers:
        """[texts, rows] positions."""
        return self.anchors + self.slots + 1

    def hidden(self, num_columns: int, group_mask: GroupMask) -> NDArray[np.bool_]:
        """[texts, rows, num_columns + rows] what each row does not see.

        Args:
            num_columns: of the texts; the columns of the rows stand behind them.
            group_mask: what a slot sees of its own group.
        """
        of_text = np.arange(num_columns) > self.anchors[..., np.newaxis]
        rows = np.arange(self.slots.shape[1])
        if group_mask is GroupMask.STRICT:
            among = np.broadcast_to(rows != rows[:, np.newaxis], (*of_text.shape[:2], len(rows)))
        else:
            first = (rows - self.slots)[..., np.newaxis]  # of the row's group
            among = (rows < first) | (rows > rows[:, np.newaxis])
        return np.concatenate([of_text, among], axis=-1)


def draw_anchors(
    texts: Sequence[OwnText], *, num_slots: int, num_rows: int, rng: np.random.Generator
) -> list[list[tuple[int, int]]]:
    """Anchors of each text with the length of their group, so that rows are nearly used up.

    Every group has its first slot; later ones are rarer, since a draft is of no use where one
    before it failed.

    Args:
        texts: to draw from.
        num_slots: of the longest group.
        num_rows: for each text.
        rng: where chance comes from.
    """
    return [_draw(text, num_slots, num_rows, rng) for text in texts]


def _draw(
    text: OwnText, num_slots: int, num_rows: int, rng: np.random.Generator
) -> list[tuple[int, int]]:
    anchors = rng.permutation(_anchors(text))
    drawn = []
    left = num_rows
    for anchor in anchors:
        length = min(int(rng.geometric(1 - _REACH)), num_slots, left)
        if not length:
            break
        drawn.append((int(anchor), length))
        left -= length
    return drawn


def every_anchor(text: OwnText, num_slots: int) -> list[tuple[int, int]]:
    """Whole groups behind every prefix of a text that has a token to propose."""
    return [(anchor, num_slots) for anchor in _anchors(text)]


def _anchors(text: OwnText) -> range:
    """From the prompt's last token on; the token behind an anchor is the model's own next."""
    return range(text.answered_from - 1, len(text.token_ids) - 2)


def pack_groups(
    texts: Sequence[OwnText], anchors: Sequence[Sequence[tuple[int, int]]]
) -> GroupBlock:
    """Rows of these groups.

    Args:
        texts: that they stand behind.
        anchors: of each text, with lengths.
    """
    num_rows = max(1, *(sum(length for _, length in groups) for groups in anchors))
    block = GroupBlock(
        slots=np.zeros((len(texts), num_rows), np.int64),
        anchors=np.zeros((len(texts), num_rows), np.int64),
        targets=np.full((len(texts), num_rows), NO_TARGET, np.int64),
    )
    for row, (text, groups) in enumerate(zip(texts, anchors, strict=True)):
        tokens = np.array(text.token_ids)
        end = 0
        for anchor, length in groups:
            place = slice(end, end := end + length)
            block.slots[row, place] = slots = np.arange(length)
            block.anchors[row, place] = anchor
            wanted = anchor + slots + 2
            known = wanted < len(tokens)
            block.targets[row, place][known] = tokens[wanted[known]]
    return block
