"""One forward pass's inputs, assembled from the rows of each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_runtime.backends.base import CacheState, Outputs, StepInputs
from la_runtime.contract import CacheForm, Contract
from la_runtime.layout import StepRows
from la_runtime.masks import (
    advance_attention_mask,
    count_columns,
    make_attention_mask,
    make_sliding_mask,
    place_keys,
)
from la_runtime.storage import stored_masked_value

__all__ = ["BlockWriter", "Part", "block_width", "make_step_inputs"]

# Blocks are remembered while their masks are small: making a mask costs little beside a pass that
# reads many keys in many rows, and takes memory.
_MOST_KEPT_BLOCKS: Final = 8
_MOST_KEPT_SCORES: Final = 2**18


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


class BlockWriter:
    """Puts the parts of sequences into blocks, pass after pass.

    Padding rows come last: id 0, the position of the sequence's first row. Slots past the end of
    the context keep their row and take the last position; padded entries of `logits_rows` repeat
    row 0.

    A pass whose sequences have the rows of an earlier one gets the arrays of that one, and only
    what differs is written: tokens, positions, columns of the mask. So they hold a pass's inputs
    until the next one is written, and a backend that has bound them need not bind them again.

    Args:
        contract: the graph's contract.
        context: number of positions the model has.
        widths: block widths to choose from, see `block_width`.
        least_scored: entries of `logits_rows` per sequence, at least; for kernels that sum in
            another order for another number of them.
    """

    def __init__(
        self, contract: Contract, *, context: int, widths: tuple[int, ...], least_scored: int = 1
    ) -> None:
        self._contract = contract
        self._context = context
        self._widths = widths
        self._least_scored = least_scored
        self._masked = stored_masked_value(contract.compute_dtype)
        self._blocks: dict[tuple[StepRows | None, ...], _Block] = {}

    def write(
        self, parts: Sequence[Part | None], state: CacheState, outputs: Outputs
    ) -> StepInputs:
        """Put the parts of all sequences into one block.

        Args:
            parts: per sequence its part, None for one that rides as padding.
            state: the cache the block will run over.
            outputs: which scores will be read.
        """
        lengths: list[int] = state.lengths.tolist()
        rows = tuple([None if part is None else part.rows for part in parts])
        block = self._blocks.get(rows)
        if block is None or not block.leads_to(lengths, state):
            block = self._make_block(rows, state)
            self._remember(rows, block)
        block.write(parts, lengths)
        return block.ask(parts, outputs, least_scored=self._least_scored)

    def _make_block(self, rows: tuple[StepRows | None, ...], state: CacheState) -> _Block:
        contract, lengths = self._contract, state.lengths
        is_scatter = contract.cache_form is CacheForm.SCATTER
        block_len = block_width(max(r.num_rows for r in rows if r is not None), self._widths)
        num_columns = max(count_columns(sequence_rows, block_len) for sequence_rows in rows)
        mask = make_attention_mask(
            rows,
            lengths,
            block_columns=lengths if is_scatter else np.full(len(rows), state.past_len),
            num_keys=state.num_keys(num_columns),
            block_len=block_len,
            masked=self._masked,
        )
        input_ids = np.zeros((len(rows), block_len), dtype=np.int64)
        position_ids = np.empty((len(rows), block_len), dtype=np.int64)
        lanes = [
            _Lane(
                sequence_rows,
                input_ids=input_ids[sequence],
                position_ids=position_ids[sequence],
                seen=mask[sequence, 0],
                masked=self._masked,
                length=int(lengths[sequence]),
                fixed_column=None if is_scatter else state.past_len,
                first_slot_id=contract.vocab_size,
                last_position=self._context - 1,
            )
            for sequence, sequence_rows in enumerate(rows)
        ]
        return _Block(
            lanes,
            input_ids=input_ids,
            position_ids=position_ids,
            mask=mask,
            columns=np.stack([_columns(sequence_rows, block_len) for sequence_rows in rows]),
            sliding=None
            if contract.window is None
            else _SlidingMask(contract.window, self._masked, np.empty_like(mask)),
        )

    def _remember(self, rows: tuple[StepRows | None, ...], block: _Block) -> None:
        self._blocks.pop(rows, None)
        if block.mask.size > _MOST_KEPT_SCORES:
            return
        if len(self._blocks) == _MOST_KEPT_BLOCKS:
            self._blocks.pop(next(iter(self._blocks)))  # the one made longest ago
        self._blocks[rows] = block


class _Block:
    """The arrays of passes whose sequences have the same rows."""

    def __init__(
        self,
        lanes: Sequence[_Lane],
        *,
        input_ids: NDArray[np.int64],
        position_ids: NDArray[np.int64],
        mask: NDArray[np.generic],
        columns: NDArray[np.int64],
        sliding: _SlidingMask | None,
    ) -> None:
        self.mask = mask
        self._sliding = sliding
        self._columns = columns
        self._num_columns = int(columns.max()) + 1
        self._lanes = lanes
        self._input_ids = input_ids
        self._position_ids = position_ids
        self._no_rows = np.zeros((len(lanes), 1), dtype=np.int64)
        self._asked: tuple[object, ...] = ()
        self._inputs: StepInputs | None = None

    def leads_to(self, lengths: Sequence[int], state: CacheState) -> bool:
        """Whether a pass over caches of these lengths can have the arrays of those before."""
        return self.mask.shape[3] == state.num_keys(self._num_columns) and all(
            length >= lane.length for length, lane in zip(lengths, self._lanes, strict=True)
        )

    def write(self, parts: Sequence[Part | None], lengths: Sequence[int]) -> None:
        """Write what differs from the last pass."""
        for lane, part, length in zip(self._lanes, parts, lengths, strict=True):
            lane.write(() if part is None else part.token_ids, length)
        if self._sliding is not None:
            self._sliding.write(
                self.mask,
                self._position_ids,
                self._columns,
                np.array([lane.first_column for lane in self._lanes]),
            )

    def ask(
        self, parts: Sequence[Part | None], outputs: Outputs, *, least_scored: int
    ) -> StepInputs:
        """The inputs, with the rows whose scores are wanted."""
        asked = (outputs, *[None if part is None else part.scored_from for part in parts])
        if self._inputs is None or asked != self._asked:
            self._asked = asked
            self._inputs = StepInputs(
                input_ids=self._input_ids,
                position_ids=self._position_ids,
                attention_mask=self.mask,
                logits_rows=_scored_rows(parts, least_scored) if outputs else self._no_rows,
                outputs=outputs,
                columns=self._columns,
                sliding_attention_mask=None if self._sliding is None else self._sliding.mask,
            )
        return self._inputs


@dataclass(frozen=True, slots=True)
class _SlidingMask:
    """What layers with a window see of the same passes; made anew for each.

    Args:
        window: positions that a row sees.
        masked: see `make_attention_mask`.
        mask: [batch, 1, block, keys].
    """

    window: int
    masked: np.generic
    mask: NDArray[np.generic]

    def write(
        self,
        mask: NDArray[np.generic],
        position_ids: NDArray[np.int64],
        columns: NDArray[np.int64],
        block_columns: NDArray[np.int64],
    ) -> None:
        """See `make_sliding_mask` and `place_keys`."""
        keys = place_keys(
            position_ids, columns, block_columns=block_columns, num_keys=mask.shape[3]
        )
        make_sliding_mask(
            mask, position_ids, keys, window=self.window, masked=self.masked, out=self.mask
        )


class _Lane:
    """One sequence's rows of a block.

    Args:
        rows: the rows, None where the sequence rides as padding.
        input_ids: [block] of the sequence; so the others. Zero.
        position_ids: [block].
        seen: [block, keys], for `length` committed cache places.
        masked: see `make_attention_mask`.
        length: committed cache places.
        fixed_column: column of the first row; None where it is the one behind the committed places.
        first_slot_id: id of the first lookahead token.
        last_position: of the context.
    """

    def __init__(
        self,
        rows: StepRows | None,
        *,
        input_ids: NDArray[np.int64],
        position_ids: NDArray[np.int64],
        seen: NDArray[np.generic],
        masked: np.generic,
        length: int,
        fixed_column: int | None,
        first_slot_id: int,
        last_position: int,
    ) -> None:
        self.length = length
        num_rows = num_verified = 0
        if rows is not None:
            num_rows, num_verified = rows.num_rows, rows.num_verified
            slots = rows.slot_index[num_verified:]
            input_ids[num_verified:num_rows] = slots + (first_slot_id - 1)
        self._rows = rows
        self._offsets: list[int] = [] if rows is None else rows.offsets.tolist()
        self._offsets += [0] * (len(position_ids) - num_rows)  # of the padding
        self._reach = max(self._offsets)
        # Of so few numbers, an element written here takes a fraction of an operation on arrays.
        self._ids = input_ids.data
        self._positions = position_ids.data
        self._seen = seen
        self._masked = masked
        self._fixed_column = fixed_column
        self._last_position = last_position

    @property
    def first_column(self) -> int:
        """Column of the first row."""
        return self.length if self._fixed_column is None else self._fixed_column

    def write(self, token_ids: Sequence[int], length: int) -> None:
        """Write the tokens of the verified rows, and what depends on the committed places."""
        self._advance(length)
        for row, token_id in enumerate(token_ids):
            self._ids[row] = token_id
        for row, offset in enumerate(self._offsets):
            self._positions[row] = length + offset
        if length + self._reach > self._last_position:
            positions = np.asarray(self._positions)
            np.minimum(positions, self._last_position, out=positions)

    def _advance(self, length: int) -> None:
        if length == self.length:
            return
        before, fixed = self.length, self._fixed_column
        advance_attention_mask(
            self._seen,
            self._rows,
            committed=(before, length),
            columns=(before, length) if fixed is None else (fixed, fixed),
            masked=self._masked,
        )
        self.length = length


def _columns(rows: StepRows | None, block_len: int) -> NDArray[np.int64]:
    """[block] where the keys of a sequence's rows stand, its padding behind the others."""
    if rows is None:
        return np.arange(block_len)
    behind = rows.num_columns
    padding = np.arange(behind, behind + block_len - rows.num_rows)
    return np.concatenate([rows.columns, padding])


def _scored_rows(parts: Sequence[Part | None], least: int) -> NDArray[np.int64]:
    """[batch, rows] the rows whose scores are wanted, row 0 behind them."""
    num_scored = max(least, *(part.num_scored for part in parts if part is not None))
    scored = np.zeros((len(parts), num_scored), dtype=np.int64)
    for sequence, part in enumerate(parts):
        if part is not None:
            scored[sequence, : part.num_scored] = np.arange(part.scored_from, part.rows.num_rows)
    return scored


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
    """The inputs of a pass by itself, in arrays of their own; see `BlockWriter`."""
    writer = BlockWriter(contract, context=context, widths=widths, least_scored=least_scored)
    return writer.write(parts, state, outputs)
