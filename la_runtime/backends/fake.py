"""A toy model in NumPy whose every token depends on its whole prefix.

Integer arithmetic modulo 2^64 replaces attention, so results are exact and a leaked slot, a stale
cache place or a position off by one changes every token after it. The cache is real: K/V of a row
depend on what the row saw when it was computed, and unused places hold random values rather than
zeros, so that a mask that shows one is noticed. In cache form `scatter` a pass writes its rows into
the cache, and what was not committed stays there until it is overwritten. Without a fixed capacity
such a cache has as many places as the mask has columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from la_runtime.backends.base import CacheSizing, CacheState, Outputs, PassLimits, StepInputs
from la_runtime.contract import CacheForm, Contract, RowPlaces
from la_runtime.hashing import mix

__all__ = ["FakeBackend"]

_NUM_LAYERS = 2
_SLIDING_LAYER = 1
_ORACLE_LOGIT = 100.0
_LOGIT_RANGE = 16.0
_CAPACITY_STEP = 16


class _FakeCache:
    def __init__(
        self, batch: int, sizing: CacheSizing, form: CacheForm, capacity: int | None
    ) -> None:
        self.sizing = sizing
        self.form = form
        self.capacity = capacity
        self.lengths = np.zeros(batch, dtype=np.int64)
        self.origins = list(range(batch))
        self.places = _unused_places(batch, capacity or 0)  # [layers, batch, places]
        self.block = np.zeros((_NUM_LAYERS, batch, 0), dtype=np.uint64)
        self.columns = np.zeros((batch, 0), dtype=np.int64)  # of the block's rows

    @property
    def past_len(self) -> int:
        return int(self.places.shape[2])

    def num_keys(self, num_columns: int) -> int:
        if self.form is CacheForm.CONCAT:
            return self.past_len + num_columns
        if self.capacity is not None:
            return self.capacity
        return self._stepped(int(self.lengths.max(initial=0)) + num_columns)

    def _stepped(self, places: int) -> int:
        step = 1 if self.sizing is CacheSizing.EXACT else _CAPACITY_STEP
        return -(-places // step) * step

    def resize(self, num_places: int) -> None:
        resized = _unused_places(len(self.lengths), num_places)
        kept = min(num_places, self.past_len)
        resized[:, :, :kept] = self.places[:, :, :kept]
        self.places = resized

    def keys(self, layer: int, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """[batch, keys] what the rows of a block may see; writes them in cache form `scatter`."""
        self.block[layer] = values
        if self.form is CacheForm.CONCAT:
            return np.concatenate([self.places[layer], values], axis=1)
        for sequence, start in enumerate(self.lengths):
            places = int(start) + self.columns[sequence]
            assert places.max() < self.past_len, "a block is written where the cache has places"
            self.places[layer, sequence, places] = values[sequence]
        keys: NDArray[np.uint64] = self.places[layer]
        return keys

    def append(self, sequence: int, rows: Sequence[int]) -> None:
        start = int(self.lengths[sequence])
        needed = start + len(rows)
        if needed > self.past_len:
            self.resize(self._stepped(needed))
        self.places[:, sequence, start:needed] = self.block[:, sequence, list(rows)]
        self.lengths[sequence] = needed

    def reserve(self, places: int) -> None:
        pass  # tokens are few and small

    def keep(self, indices: Sequence[int]) -> None:
        kept = list(indices)
        self.lengths = self.lengths[kept]
        self.origins = [self.origins[i] for i in kept]
        self.places = self.places[:, kept]
        self.block = self.block[:, kept]

    def take(self, indices: Sequence[int]) -> _FakeCache:
        taken = _FakeCache(0, self.sizing, self.form, self.capacity)
        taken.lengths, taken.origins = self.lengths, self.origins
        taken.places, taken.block = self.places, self.block
        taken.keep(indices)
        return taken

    def absorb(self, other: CacheState) -> None:
        assert isinstance(other, _FakeCache), "caches of one backend"
        batch, added = len(self.lengths), len(other.lengths)
        joined = _unused_places(batch + added, max(self.past_len, other.past_len))
        joined[:, :batch, : self.past_len] = self.places
        joined[:, batch:, : other.past_len] = other.places
        self.places = joined
        self.block = np.zeros((_NUM_LAYERS, batch + added, 0), dtype=np.uint64)
        self.lengths = np.concatenate([self.lengths, other.lengths])
        self.origins = [*self.origins, *other.origins]
        other.close()

    def truncate(self, lengths: Sequence[int]) -> None:
        for sequence, length in enumerate(lengths):
            assert 0 <= length <= self.lengths[sequence], "truncation never grows a cache"
            self.lengths[sequence] = length

    def spoil_unused(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for sequence, length in enumerate(self.lengths):
            unused = self.places[:, sequence, length:]
            unused[:] = rng.integers(0, 2**63, size=unused.shape, dtype=np.uint64)

    def read(self, sequence: int) -> NDArray[np.float32]:
        # The toy's keys are its values; of each, as much as a float32 tells apart.
        used = self.places[:, sequence, None, : self.lengths[sequence], None]
        return np.repeat(used.astype(np.float32), 2, axis=0)

    def close(self) -> None:
        self.places = _unused_places(0, 0)
        self.lengths = np.zeros(0, dtype=np.int64)
        self.origins = []


def _unused_places(batch: int, capacity: int) -> NDArray[np.uint64]:
    rng = np.random.default_rng(capacity)
    return rng.integers(0, 2**63, size=(_NUM_LAYERS, batch, capacity), dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class _FakeScores:
    _logits: NDArray[np.float32]
    _top_c: int

    def top(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        # NaN comes first, as in ONNX Runtime's TopK, so that it cannot hide behind a finite best.
        ranked = np.where(np.isnan(self._logits), np.inf, self._logits)
        ids = np.argsort(-ranked, axis=-1, kind="stable")[..., : self._top_c]
        return ids, np.take_along_axis(self._logits, ids, axis=-1)

    def logsumexp(self) -> NDArray[np.float32]:
        peak = self._logits.max(axis=-1)
        summed = np.exp(self._logits - peak[..., None]).sum(axis=-1)
        return np.asarray(np.log(summed) + peak, dtype=np.float32)

    def logits(self) -> NDArray[np.float32]:
        return self._logits


class FakeBackend:
    """The toy backend.

    Args:
        vocab_size: size of the vocabulary.
        k_max: number of lookahead vectors.
        seed: chooses the toy model.
        slot_oracle: per sequence, in the order of `allocate`, its token ids by position. A slot
            at position q then proposes the token at q + 1 wherever the oracle reaches.
        widths: block widths to report.
        cache_form: how K/V of a block reach the cache.
        capacity: fixed places of a cache in form `scatter`; None for any number.
        max_block: rows that a pass may have; None for any number.
        row_places: where the rows of a block are written.
        window: positions that a row sees in the last layer; None for all.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        k_max: int,
        seed: int = 0,
        slot_oracle: Sequence[Sequence[int]] = (),
        widths: tuple[int, ...] = (),
        cache_form: CacheForm = CacheForm.CONCAT,
        capacity: int | None = None,
        max_block: int | None = None,
        row_places: RowPlaces = RowPlaces.BEHIND,
        window: int | None = None,
    ) -> None:
        self.contract = Contract(
            cache_form=cache_form,
            row_places=row_places,
            capacity=capacity,
            num_layers=_NUM_LAYERS,
            num_kv_heads=1,
            head_dim=1,
            hidden_size=1,
            vocab_size=vocab_size,
            k_max=k_max,
            top_c=min(8, vocab_size),
            window=window,
        )
        self.widths = widths
        self.limits = PassLimits(block=max_block)
        self._slot_oracle = slot_oracle
        self._seed = np.uint64(seed)
        self._lookahead = np.arange(1, k_max + 1, dtype=np.uint64)

    def allocate(self, batch: int, sizing: CacheSizing) -> CacheState:
        """See `Backend.allocate`."""
        return _FakeCache(batch, sizing, self.contract.cache_form, self.contract.capacity)

    def forward(self, state: CacheState, inputs: StepInputs) -> _FakeScores:
        """See `Backend.forward`."""
        assert isinstance(state, _FakeCache)
        seen = inputs.attention_mask[:, 0] == 0  # [batch, block, keys]
        assert self.limits.block is None or seen.shape[1] <= self.limits.block, "within limits"
        if state.form is CacheForm.SCATTER and seen.shape[2] != state.past_len:
            assert state.capacity is None, "the mask has a column for every place"
            state.resize(seen.shape[2])
        state.columns = inputs.columns
        values = self._embed(inputs.input_ids) ^ mix(inputs.position_ids.astype(np.uint64))
        state.block = np.empty((_NUM_LAYERS, *values.shape), dtype=np.uint64)
        for layer in range(_NUM_LAYERS):
            if layer == _SLIDING_LAYER and inputs.sliding_attention_mask is not None:
                seen = inputs.sliding_attention_mask[:, 0] == 0
            values = mix(values + np.uint64(layer))  # [batch, block]
            keys = state.keys(layer, values)  # [batch, keys]
            attended = np.where(seen, keys[:, None, :], np.uint64(0)).sum(axis=2, dtype=np.uint64)
            values = mix(values ^ mix(attended))
        hidden = np.take_along_axis(values, inputs.logits_rows, axis=1)  # [batch, rows]
        logits = self._score(hidden)
        self._ask_oracle(state, inputs, logits)
        assert inputs.outputs is not Outputs.NONE or inputs.logits_rows.size > 0
        return _FakeScores(logits, self.contract.top_c)

    def commit(self, state: CacheState, rows: Sequence[Sequence[int]]) -> None:
        """See `Backend.commit`."""
        assert isinstance(state, _FakeCache)
        for sequence, accepted in enumerate(rows):
            if accepted:
                state.append(sequence, accepted)

    def set_lookahead_embeddings(self, embeddings: NDArray[np.floating]) -> None:
        """See `Backend.set_lookahead_embeddings`; only the first component counts."""
        self._lookahead = np.ascontiguousarray(embeddings[:, 0], dtype=np.float64).view(np.uint64)

    def close(self) -> None:
        """See `Backend.close`."""

    def _embed(self, input_ids: NDArray[np.int64]) -> NDArray[np.uint64]:
        slots = input_ids >= self.contract.vocab_size
        lookahead = self._lookahead[np.where(slots, input_ids - self.contract.vocab_size, 0)]
        tokens = np.where(slots, mix(lookahead), input_ids.astype(np.uint64))
        return mix(tokens + mix(np.full_like(tokens, self._seed)))

    def _score(self, hidden: NDArray[np.uint64]) -> NDArray[np.float32]:
        vocabulary = np.arange(self.contract.vocab_size, dtype=np.uint64)
        scattered = mix(hidden[..., None] ^ mix(vocabulary))  # [batch, rows, vocab_size]
        unit = (scattered >> np.uint64(40)).astype(np.float32) / np.float32(2**24)
        return np.asarray(unit * np.float32(_LOGIT_RANGE), dtype=np.float32)

    def _ask_oracle(
        self, state: _FakeCache, inputs: StepInputs, logits: NDArray[np.float32]
    ) -> None:
        if not self._slot_oracle:
            return
        for sequence, origin in enumerate(state.origins):
            future = self._slot_oracle[origin]
            for index, row in enumerate(inputs.logits_rows[sequence]):
                is_slot = inputs.input_ids[sequence, row] >= self.contract.vocab_size
                position = int(inputs.position_ids[sequence, row])
                if is_slot and position + 1 < len(future):
                    logits[sequence, index, future[position + 1]] = _ORACLE_LOGIT
