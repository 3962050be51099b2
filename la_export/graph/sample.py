"""A small ragged batch whose every row has a known truth, and the inputs that pose it to a graph.

Two sequences with a past, drafts, lookahead slots, padding and hidden cache places; the truth
for every row is a plain causal pass over just what that row may see. Knows no graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from la_export.reference import ReferencePass, TorchReference
from la_runtime.contract import CacheForm, Contract, KvOrder, Name, RowPlaces
from la_runtime.masks import make_sliding_mask, place_keys
from la_runtime.storage import from_stored, stored_masked_value, to_stored

__all__ = ["Sample", "Truth", "from_kv_order", "make_sample", "to_kv_order"]

_SEED: Final = 20231
_FIRST_POSITION: Final = 0
_LONGEST_WINDOW: Final = 4
# Places behind the block, in a cache without a fixed capacity.
_SPARE_PLACES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One row of the block: what it is and which rows of its block it sees besides itself."""

    token_id: int
    position: int
    sees: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """One sequence: its past and its rows, from which inputs and truth are both made."""

    past_ids: tuple[int, ...]
    first_position: int
    rows: tuple[_Row, ...]

    @property
    def past_positions(self) -> range:
        return range(self.first_position, self.first_position + len(self.past_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What PyTorch gives for a sequence.

    Args:
        past_logits: [past, vocab_size].
        past_key_values: [2 * layers, kv_heads, past, head_dim].
        logits: [rows, vocab_size].
        key_values: [rows, 2 * layers, kv_heads, head_dim].
    """

    past_logits: NDArray[np.float32]
    past_key_values: NDArray[np.float32]
    logits: NDArray[np.float32]
    key_values: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The batch, and what PyTorch says of it.

    Args:
        contract: whose inputs the feeds are.
        sequences: of the batch.
        truths: one for each sequence.
        vectors: [k_max, hidden] lookahead vectors, as the compute dtype holds them.
    """

    contract: Contract
    sequences: tuple[_Sequence, ...]
    truths: tuple[Truth, ...]
    vectors: NDArray[np.float32]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[batch] cache places of each sequence's past."""
        return np.array([len(sequence.past_ids) for sequence in self.sequences], np.int64)

    def make_feeds(self) -> dict[str, NDArray[np.generic]]:
        """The contract's inputs: short sequences padded, wanted rows in reverse order."""
        pasts = [truth.past_key_values for truth in self.truths]
        return _make_feeds(self.contract, self.sequences, pasts, self.vectors)

    def make_prompt_feeds(self) -> dict[str, NDArray[np.generic]]:
        """The first sequence's past as a prompt with an empty cache, every row asked for."""
        rows = tuple(
            _Row(token_id=token_id, position=_FIRST_POSITION + place, sees=tuple(range(place)))
            for place, token_id in enumerate(self.sequences[0].past_ids)
        )
        prompt = _Sequence(past_ids=(), first_position=_FIRST_POSITION, rows=rows)
        no_past = self.truths[0].past_key_values[:, :, :0]
        return _make_feeds(self.contract, (prompt,), [no_past], self.vectors)


def make_sample(contract: Contract, reference: TorchReference, *, context: int) -> Sample:
    """Draw the batch and ask PyTorch about it; the same every time.

    The second sequence stands at the end of the context, where angles are largest.

    Args:
        contract: of the graph.
        reference: transformers' own model with the same weights.
        context: positions the bundle serves; the sequences stay within.
    """
    rng = np.random.default_rng(_SEED)
    vectors = _random_vectors(rng, contract, reference)
    long_past = min(11, max(2, context // 3), context)
    short_past = long_past // 2
    most_drafts = max(0, context - 2)
    sequences = (
        _make_sequence(
            rng,
            contract,
            past_len=long_past,
            first_position=_FIRST_POSITION,
            num_drafts=min(2, most_drafts),
        ),
        _make_sequence(
            rng,
            contract,
            past_len=short_past,
            first_position=max(3, context - short_past - 2 - contract.k_max),
            num_drafts=min(1, most_drafts),
        ),
    )
    return Sample(
        contract=contract,
        sequences=sequences,
        truths=_run_reference(reference, sequences, vectors, _window(contract)),
        vectors=vectors,
    )


def _window(contract: Contract) -> int | None:
    """Short enough to hide something of sequences as short as these: a graph has any window."""
    return None if contract.window is None else min(contract.window, _LONGEST_WINDOW)


def _random_vectors(
    rng: np.random.Generator, contract: Contract, reference: TorchReference
) -> NDArray[np.float32]:
    spread = float(reference.embedding_rows(min(contract.vocab_size, 256)).std())
    vectors = rng.normal(0.0, spread, (contract.k_max, contract.hidden_size))
    return from_stored(to_stored(vectors, contract.compute_dtype), contract.compute_dtype)


def _make_sequence(
    rng: np.random.Generator,
    contract: Contract,
    *,
    past_len: int,
    first_position: int,
    num_drafts: int,
) -> _Sequence:
    """Root, drafts, and behind each of them a group of its first and its last slot."""
    root_position = first_position + past_len
    ids = rng.integers(0, contract.vocab_size, past_len + 1 + num_drafts).tolist()
    rows = [
        _Row(token_id=token_id, position=root_position + place, sees=tuple(range(place)))
        for place, token_id in enumerate(ids[past_len:])
    ]
    for prefix in range(1 + num_drafts):
        for slot in sorted({1, contract.k_max}):
            rows.append(
                _Row(
                    token_id=contract.vocab_size + slot - 1,
                    position=root_position + prefix + slot,
                    sees=tuple(range(prefix + 1)),
                )
            )
    return _Sequence(
        past_ids=tuple(ids[:past_len]), first_position=first_position, rows=tuple(rows)
    )


def _run_reference(
    reference: TorchReference,
    sequences: tuple[_Sequence, ...],
    vectors: NDArray[np.float32],
    window: int | None,
) -> tuple[Truth, ...]:
    """Tokens from one causal pass over them all; each slot from a pass of its own behind it."""
    passes = [
        _show(sequence, visible)
        for sequence in sequences
        for visible in _visible_rows(reference, sequence)
    ]
    found = iter(reference.run_many(passes, vectors, window=window))
    return tuple(
        _join(sequence, [next(found) for _ in _visible_rows(reference, sequence)])
        for sequence in sequences
    )


def _visible_rows(reference: TorchReference, sequence: _Sequence) -> list[list[int]]:
    """Places of the block's tokens; then for every slot those of what it sees, itself the last."""
    tokens = [place for place, row in enumerate(sequence.rows) if not _is_slot(row, reference)]
    slots = range(len(tokens), len(sequence.rows))
    return [tokens, *([*sequence.rows[place].sees, place] for place in slots)]


def _join(sequence: _Sequence, passes: list[ReferencePass]) -> Truth:
    """Args:
    sequence: that was passed over.
    passes: over what `_visible_rows` names.
    """
    past_len = len(sequence.past_ids)
    causal, *slots = passes
    return Truth(
        past_logits=causal.logits[:past_len],
        past_key_values=causal.key_values[:, :, :past_len],
        logits=np.stack([*causal.logits[past_len:], *(alone.logits[-1] for alone in slots)]),
        key_values=np.stack(
            [
                *np.moveaxis(causal.key_values[:, :, past_len:], 2, 0),
                *(alone.key_values[:, :, -1] for alone in slots),
            ]
        ),
    )


def _is_slot(row: _Row, reference: TorchReference) -> bool:
    return row.token_id >= reference.vocab_size


def _show(sequence: _Sequence, places: list[int]) -> tuple[list[int], list[int]]:
    """Token ids and position ids of the past and the rows at these places of the block."""
    rows = [sequence.rows[place] for place in places]
    return (
        [*sequence.past_ids, *(row.token_id for row in rows)],
        [*sequence.past_positions, *(row.position for row in rows)],
    )


def _make_feeds(
    contract: Contract,
    sequences: tuple[_Sequence, ...],
    pasts: list[NDArray[np.float32]],
    vectors: NDArray[np.float32],
) -> dict[str, NDArray[np.generic]]:
    """The contract's inputs, the block's columns where its cache form has them."""
    batch = len(sequences)
    block = max(len(sequence.rows) for sequence in sequences)
    lengths = np.array([len(sequence.past_ids) for sequence in sequences], np.int64)
    longest = int(lengths.max())
    if contract.cache_form is CacheForm.CONCAT:
        places, num_keys = longest, longest + block
        block_columns = np.full(batch, places)
    else:
        places = num_keys = contract.capacity or longest + block + _SPARE_PLACES
        block_columns = lengths
    ids = np.zeros((batch, block), np.int64)
    positions = np.zeros((batch, block), np.int64)
    wanted = np.zeros((batch, block), np.int64)
    mask = np.full((batch, 1, block, num_keys), stored_masked_value(contract.compute_dtype))
    cache = np.zeros(
        (2 * contract.num_layers, batch, contract.num_kv_heads, places, contract.head_dim),
        np.float32,
    )
    for index, (sequence, key_values) in enumerate(zip(sequences, pasts, strict=True)):
        count, column = len(sequence.rows), int(block_columns[index])
        positions[index] = sequence.rows[0].position
        wanted[index, :count] = np.arange(count)[::-1]
        cache[:, index, :, : lengths[index]] = key_values
        mask[index, 0, np.arange(block), column + np.arange(block)] = 0
        for place, row in enumerate(sequence.rows):
            ids[index, place] = row.token_id
            positions[index, place] = row.position
            mask[index, 0, place, : lengths[index]] = 0
            mask[index, 0, place, [column + seen for seen in row.sees]] = 0
    feeds: dict[str, NDArray[np.generic]] = {
        Name.INPUT_IDS: ids,
        Name.POSITION_IDS: positions,
        Name.ATTENTION_MASK: mask,
        Name.LOOKAHEAD_EMBEDDINGS: to_stored(vectors, contract.compute_dtype),
        Name.LOGITS_ROWS: wanted,
    }
    if contract.window is not None:
        keys = place_keys(
            positions,
            np.tile(np.arange(block), (batch, 1)),
            block_columns=block_columns,
            num_keys=num_keys,
        )
        for index, sequence in enumerate(sequences):
            keys[index, : lengths[index]] = sequence.past_positions
        feeds[Name.SLIDING_ATTENTION_MASK] = make_sliding_mask(
            mask,
            positions,
            keys,
            window=_window(contract) or 0,
            masked=stored_masked_value(contract.compute_dtype),
        )
    if contract.cache_form is CacheForm.SCATTER:
        is_chosen = contract.row_places is RowPlaces.CHOSEN
        feeds[Name.WRITE_INDEX] = lengths[:, None] + np.arange(block) if is_chosen else lengths
    stored = to_stored(to_kv_order(cache, contract), contract.kv_dtype)
    feeds.update(zip(contract.past_names, stored, strict=True))
    return {str(name): array for name, array in feeds.items()}


def to_kv_order(cache: NDArray[np.float32], contract: Contract) -> NDArray[np.float32]:
    """K/V [..., batch, kv_heads, places, head_dim] in the contract's order of axes."""
    if contract.kv_order is KvOrder.HEAD_MAJOR:
        return cache
    by_place = np.swapaxes(cache, -3, -2)  # [..., batch, places, kv_heads, head_dim]
    return np.ascontiguousarray(by_place).reshape(*by_place.shape[:-2], -1)


def from_kv_order(stored: NDArray[np.float32], contract: Contract) -> NDArray[np.float32]:
    """The other way round."""
    if contract.kv_order is KvOrder.HEAD_MAJOR:
        return stored
    by_place = stored.reshape(*stored.shape[:-1], contract.num_kv_heads, contract.head_dim)
    return np.swapaxes(by_place, -3, -2)
