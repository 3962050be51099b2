"""What every backend must do. A backend's test module inherits `BackendConformance`.

Each test compares incremental work over a cache with one fresh causal pass over the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from la_runtime.backends.base import Backend, CacheSizing, CacheState, Outputs
from la_runtime.block import Part, make_step_inputs
from la_runtime.layout import Group, make_rows

CONTEXT = 1000
ALL = Outputs.TOP | Outputs.LOGSUMEXP | Outputs.LOGITS


def run(
    backend: Backend,
    state: CacheState,
    tokens: Sequence[Sequence[int] | None],
    *,
    parents: tuple[int, ...] = (),
    groups: tuple[Group, ...] = (),
    width: int = 1,
    outputs: Outputs = ALL,
):
    """One block: per sequence its tokens (the last `len(parents)` are drafts), all rows scored."""
    parts = [
        None
        if token_ids is None
        else Part(
            rows=make_rows(len(token_ids) - len(parents), parents, groups),
            token_ids=tuple(token_ids),
            scored_from=0,
        )
        for token_ids in tokens
    ]
    inputs = make_step_inputs(
        parts, state, backend.contract, context=CONTEXT, widths=(width,), outputs=outputs
    )
    return backend.forward(state, inputs)


def read(backend: Backend, state: CacheState, token_ids: Sequence[int], *, chunk: int):
    """[tokens, vocab_size] logits of tokens that are read and committed `chunk` at a time."""
    found = []
    for start in range(0, len(token_ids), chunk):
        part = token_ids[start : start + chunk]
        found.append(run(backend, state, [part]).logits()[0].copy())
        backend.commit(state, [range(len(part))])
    return np.concatenate(found)


def fresh_logits(backend: Backend, token_ids: Sequence[int]) -> np.ndarray:
    """[tokens, vocab_size] logits of one causal pass over an empty cache, or of the fewest."""
    state = backend.allocate(1, CacheSizing.STEPPED)
    logits = read(backend, state, token_ids, chunk=backend.limits.block or len(token_ids))
    state.close()
    return logits


class BackendConformance:
    """Subclasses give a `backend` fixture and their tolerance."""

    tolerance: float

    @pytest.fixture
    def tokens(self, backend: Backend) -> list[int]:
        rng = np.random.default_rng(7)
        return [int(t) for t in rng.integers(0, backend.contract.vocab_size, size=40)]

    def close_to(self, found: np.ndarray, expected: np.ndarray) -> None:
        np.testing.assert_allclose(found, expected, rtol=0, atol=self.tolerance)

    def test_a_new_cache_is_empty(self, backend):
        state = backend.allocate(3, CacheSizing.STEPPED)

        assert state.lengths.tolist() == [0, 0, 0]
        assert state.past_len == (backend.contract.capacity or 0)
        assert state.num_keys(7) >= 7

    @pytest.mark.parametrize("sizing", CacheSizing)
    @pytest.mark.parametrize("split", [(40,), (1, 39), (13, 1, 1, 25), (1,) * 40])
    def test_any_split_into_passes_gives_the_logits_of_one_pass(
        self, backend, tokens, sizing, split
    ):
        expected = fresh_logits(backend, tokens)
        state = backend.allocate(1, sizing)
        start = 0
        for size in split:
            found = run(backend, state, [tokens[start : start + size]]).logits()[0]
            self.close_to(found, expected[start : start + size])
            backend.commit(state, [range(size)])
            start += size
            assert state.lengths.tolist() == [start]
            assert state.past_len >= start
            assert state.num_keys(3) >= start + 3
            if backend.contract.capacity is not None:
                assert state.past_len == state.num_keys(3) == backend.contract.capacity
            elif sizing is CacheSizing.EXACT:
                assert state.num_keys(3) == start + 3

    def test_rows_that_are_not_committed_leave_no_trace(self, backend, tokens):
        expected = fresh_logits(backend, tokens)
        state = backend.allocate(1, CacheSizing.STEPPED)
        for position in range(0, 40, 2):
            wrong = (tokens[position] + 1) % backend.contract.vocab_size
            run(backend, state, [[tokens[position], wrong, wrong]], groups=(Group(0, 1),))
            backend.commit(state, [(0,)])
            found = run(backend, state, [tokens[position + 1 : position + 2]]).logits()[0]
            self.close_to(found, expected[position + 1 : position + 2])
            backend.commit(state, [(0,)])

    def test_a_path_through_a_tree_is_committed_in_order(self, backend, tokens):
        """Root, then 1 and 2 behind it, 3 behind 2, 4 behind 1, 5 behind 3: keep 0, 2, 3, 5."""
        vocab_size = backend.contract.vocab_size
        other = [(t + 1) % vocab_size for t in tokens]
        state = backend.allocate(1, CacheSizing.STEPPED)
        rows = [tokens[0], other[1], tokens[1], tokens[2], other[2], tokens[3]]
        found = run(backend, state, [rows], parents=(0, 0, 2, 1, 3)).logits()[0]
        expected = fresh_logits(backend, tokens)
        self.close_to(found[[0, 2, 3, 5]], expected[:4])
        backend.commit(state, [(0, 2, 3, 5)])

        after = run(backend, state, [tokens[4:6]]).logits()[0]

        self.close_to(after, expected[4:6])

    def test_each_sequence_s_path_is_committed_behind_what_it_has(self, backend, tokens):
        """Rows 0 and 2; 0 and 3; none; behind caches of different lengths."""
        vocab_size = backend.contract.vocab_size
        prompts = [tokens[:5], tokens[5:8], tokens[8:15]]
        state = backend.allocate(3, CacheSizing.STEPPED)
        run(backend, state, prompts)
        backend.commit(state, [range(len(prompt)) for prompt in prompts])
        root, draft = tokens[20], tokens[21]
        wrong, other = (draft + 1) % vocab_size, (draft + 2) % vocab_size
        rows = [
            [root, wrong, draft, other],
            [root, wrong, other, draft],
            [root, wrong, other, draft],
        ]
        run(backend, state, rows, parents=(0, 0, 0))
        backend.commit(state, [(0, 2), (0, 3), ()])

        assert state.lengths.tolist() == [7, 5, 7]
        found = run(backend, state, [tokens[30:32]] * 3).logits()
        for sequence, kept in enumerate(([root, draft], [root, draft], [])):
            whole = [*prompts[sequence], *kept, *tokens[30:32]]
            self.close_to(found[sequence], fresh_logits(backend, whole)[-2:])

    def test_the_largest_pass_runs_over_the_fullest_cache(self, backend):
        """Two ways of filling it; the last block is the same."""
        places = backend.limits.places or 90
        block = backend.limits.block or 40
        rng = np.random.default_rng(9)
        token_ids = rng.integers(0, backend.contract.vocab_size, size=places + block).tolist()
        found = []
        for chunk in (block, 23):
            state = backend.allocate(1, CacheSizing.STEPPED)
            read(backend, state, token_ids[:places], chunk=chunk)
            assert state.lengths.tolist() == [places]
            found.append(run(backend, state, [token_ids[places:]]).logits()[0].copy())

        self.close_to(found[0], found[1])

    def test_sequences_of_a_ragged_batch_do_not_touch_each_other(self, backend, tokens):
        lengths = (3, 17, 1)
        state = backend.allocate(3, CacheSizing.STEPPED)
        prompts = [tokens[:length] for length in lengths]
        found = run(backend, state, prompts, width=20).logits()
        for sequence, prompt in enumerate(prompts):
            self.close_to(found[sequence, : len(prompt)], fresh_logits(backend, prompt))
        backend.commit(state, [range(length) for length in lengths])
        assert state.lengths.tolist() == list(lengths)

        nexts = [tokens[length : length + 2] for length in lengths]
        after = run(backend, state, [nexts[0], None, nexts[2]]).logits()

        for sequence in (0, 2):
            expected = fresh_logits(backend, tokens[: lengths[sequence] + 2])[-2:]
            self.close_to(after[sequence, :2], expected)
        backend.commit(state, [range(2), (), range(1)])
        assert state.lengths.tolist() == [5, 17, 2]

    def test_keep_drops_and_reorders_sequences(self, backend, tokens):
        state = backend.allocate(3, CacheSizing.STEPPED)
        prompts = [tokens[:5], tokens[5:9], tokens[9:16]]
        run(backend, state, prompts)
        backend.commit(state, [range(len(prompt)) for prompt in prompts])

        state.keep([2, 0])

        assert state.lengths.tolist() == [7, 5]
        found = run(backend, state, [tokens[:2], tokens[:2]]).logits()
        for sequence, prompt in enumerate((prompts[2], prompts[0])):
            expected = fresh_logits(backend, prompt + tokens[:2])[-2:]
            self.close_to(found[sequence], expected)

    def test_an_index_kept_twice_forks_a_sequence(self, backend, tokens):
        state = backend.allocate(2, CacheSizing.STEPPED)
        prompts = [tokens[:5], tokens[5:9]]
        run(backend, state, prompts)
        backend.commit(state, [range(len(prompt)) for prompt in prompts])

        state.keep([1, 1, 0])

        assert state.lengths.tolist() == [4, 4, 5]
        whole = [list(prompts[1]), list(prompts[1]), list(prompts[0])]
        for start in (9, 15):  # the forks part, and stay apart
            tails = [tokens[start + i : start + i + 2] for i in (0, 2, 4)]
            found = run(backend, state, tails).logits()
            for sequence, tail in enumerate(tails):
                whole[sequence] += tail
                self.close_to(found[sequence], fresh_logits(backend, whole[sequence])[-2:])
            backend.commit(state, [range(2)] * 3)

    def test_taken_sequences_live_on_their_own(self, backend, tokens):
        state = backend.allocate(3, CacheSizing.STEPPED)
        prompts = [tokens[:5], tokens[5:9], tokens[9:16]]
        run(backend, state, prompts)
        backend.commit(state, [range(len(prompt)) for prompt in prompts])

        taken = state.take([2, 0])
        state.keep([1])
        run(backend, state, [tokens[20:24]])
        backend.commit(state, [range(4)])

        assert taken.lengths.tolist() == [7, 5]
        assert state.lengths.tolist() == [8]
        found = run(backend, taken, [tokens[:2], tokens[:2]]).logits()
        for sequence, prompt in enumerate((prompts[2], prompts[0])):
            self.close_to(found[sequence], fresh_logits(backend, prompt + tokens[:2])[-2:])

    @pytest.mark.parametrize("own", [0, 2])
    def test_absorbed_sequences_go_on_behind_the_others(self, backend, tokens, own):
        prompts = [tokens[:4], tokens[4:6], tokens[6:30]][2 - own :]
        states = [backend.allocate(n, CacheSizing.STEPPED) for n in (own, 1)]
        for state, group in zip(states, (prompts[:own], prompts[own:]), strict=True):
            if group:
                run(backend, state, group)
                backend.commit(state, [range(len(prompt)) for prompt in group])

        states[0].absorb(states[1])

        assert states[0].lengths.tolist() == [len(prompt) for prompt in prompts]
        assert states[1].lengths.tolist() == []
        tail = tokens[30:32]
        found = run(backend, states[0], [tail] * len(prompts)).logits()
        for sequence, prompt in enumerate(prompts):
            self.close_to(found[sequence], fresh_logits(backend, [*prompt, *tail])[-2:])

    def test_a_truncated_cache_goes_on_from_its_shorter_prefix(self, backend, tokens):
        state = backend.allocate(2, CacheSizing.STEPPED)
        run(backend, state, [tokens[:20], tokens[20:30]])
        backend.commit(state, [range(20), range(10)])

        state.truncate([7, 10])

        assert state.lengths.tolist() == [7, 10]
        found = run(backend, state, [tokens[30:33], tokens[33:36]]).logits()
        for sequence, whole in enumerate(
            ([*tokens[:7], *tokens[30:33]], [*tokens[20:30], *tokens[33:36]])
        ):
            self.close_to(found[sequence], fresh_logits(backend, whole)[-3:])

    @pytest.mark.parametrize("sizing", CacheSizing)
    def test_what_unused_places_hold_changes_nothing(self, backend, tokens, sizing):
        """Bit for bit: the same shapes, other values where nothing was committed."""
        found = []
        for seed in (None, 1, 2):
            state = backend.allocate(2, sizing)
            run(backend, state, [tokens[:9], tokens[9:13]])
            backend.commit(state, [range(7), range(4)])  # the others are rejected
            if seed is not None:
                state.spoil_unused(seed)
            found.append(run(backend, state, [tokens[13:16], tokens[16:19]]).logits().copy())

        assert np.array_equal(found[0], found[1])
        assert np.array_equal(found[1], found[2])

    def test_spoiling_changes_what_a_wrong_mask_would_show(self, backend, tokens):
        """Positive control: a place that was committed and given up is read again."""
        found = []
        for seed in (1, 2):
            state = backend.allocate(1, CacheSizing.STEPPED)
            run(backend, state, [tokens[:9]])
            backend.commit(state, [range(9)])
            state.truncate([8])
            state.spoil_unused(seed)
            state.lengths[0] = 9
            found.append(run(backend, state, [tokens[13:16]]).logits().copy())

        assert not np.array_equal(found[0], found[1])

    def test_two_caches_are_independent(self, backend, tokens):
        expected = fresh_logits(backend, tokens)
        one, two = (backend.allocate(1, CacheSizing.STEPPED) for _ in range(2))
        for position in range(6):
            for state in (one, two):
                found = run(backend, state, [tokens[position : position + 1]]).logits()[0]
                self.close_to(found, expected[position : position + 1])
                backend.commit(state, [(0,)])

    def test_lookahead_vectors_change_no_verified_logit(self, backend, tokens):
        """Bit for bit: the same shapes, other vectors."""
        contract = backend.contract
        rng = np.random.default_rng(3)
        groups = (Group(0, contract.k_max), Group(2, 1))
        verified, slots = [], []
        for _ in range(2):
            vectors = rng.normal(size=(contract.k_max, contract.hidden_size))
            backend.set_lookahead_embeddings(vectors)
            state = backend.allocate(1, CacheSizing.STEPPED)
            logits = run(backend, state, [tokens[:12]], parents=(0, 1), groups=groups).logits()[0]
            verified.append(logits[:12].copy())
            slots.append(logits[12:].copy())

        assert np.array_equal(verified[0], verified[1])
        assert not np.array_equal(slots[0], slots[1])

    def test_top_and_logsumexp_describe_the_logits(self, backend, tokens):
        state = backend.allocate(1, CacheSizing.STEPPED)
        scores = run(backend, state, [tokens])
        logits = scores.logits()[0]
        ids, top_logits = (part[0] for part in scores.top())
        order = np.argsort(-logits, axis=1, kind="stable")[:, : backend.contract.top_c]

        assert np.array_equal(ids, order)
        assert np.array_equal(top_logits, np.take_along_axis(logits, order, axis=1))
        expected = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
        np.testing.assert_allclose(scores.logsumexp()[0], expected, rtol=1e-5, atol=1e-5)

    def test_asking_for_less_gives_the_same(self, backend, tokens):
        state = backend.allocate(1, CacheSizing.STEPPED)
        ids = run(backend, state, [tokens]).top()[0].copy()

        assert np.array_equal(run(backend, state, [tokens], outputs=Outputs.TOP).top()[0], ids)

    def test_a_pass_without_scores_still_gives_its_keys_and_values(self, backend, tokens):
        state = backend.allocate(1, CacheSizing.STEPPED)
        run(backend, state, [tokens[:30]], outputs=Outputs.NONE)
        backend.commit(state, [range(30)])

        found = run(backend, state, [tokens[30:]]).logits()[0]

        self.close_to(found, fresh_logits(backend, tokens)[30:])

    def test_what_is_asked_for_may_change_from_pass_to_pass(self, backend, tokens):
        state = backend.allocate(1, CacheSizing.STEPPED)
        for start, outputs in enumerate((ALL, Outputs.NONE, Outputs.TOP, ALL, Outputs.TOP)):
            run(backend, state, [tokens[5 * start : 5 * start + 5]], outputs=outputs)
            backend.commit(state, [range(5)])

        found = run(backend, state, [tokens[25:30]]).logits()[0]

        self.close_to(found, fresh_logits(backend, tokens[:30])[-5:])

    @pytest.mark.parametrize("reserved", [0, 100, 1000])
    def test_the_cache_grows_over_many_steps(self, backend, reserved):
        """Two sequences of different lengths, in memory that suffices, or not, or was not asked."""
        rng = np.random.default_rng(5)
        num_long = min(25, (backend.limits.places or 400) // 16)
        long, short = (
            [int(t) for t in rng.integers(0, backend.contract.vocab_size, size=16 * rows)]
            for rows in (num_long, 10)
        )
        state = backend.allocate(2, CacheSizing.STEPPED)
        state.reserve(min(reserved, backend.limits.places or reserved))
        for step in range(16):
            parts = [
                long[num_long * step : num_long * (step + 1)],
                short[10 * step : 10 * (step + 1)],
            ]
            found = run(backend, state, parts).logits()[[0, 1], [num_long - 1, 9]].copy()
            backend.commit(state, [range(num_long), range(10)])

        self.close_to(found[0], fresh_logits(backend, long)[-1])
        self.close_to(found[1], fresh_logits(backend, short)[-1])
        places = len(long)
        assert state.past_len <= (backend.contract.capacity or places + max(128, 0.12 * places))

    def test_what_is_read_back_is_what_each_sequence_committed(self, backend, tokens):
        """A tree's path, whose rows are not neighbours, reads like its tokens in a row."""
        contract = backend.contract
        path, other = [*tokens[:5], tokens[6]], tokens[20:27]
        state = backend.allocate(2, CacheSizing.STEPPED)
        run(backend, state, [tokens[:7], other], parents=(0, 0))
        backend.commit(state, [(0, 1, 2, 3, 4, 6), range(5)])

        found = [state.read(sequence) for sequence in range(2)]

        for sequence, text in enumerate((path, other[:5])):
            alone = backend.allocate(1, CacheSizing.STEPPED)
            read(backend, alone, text, chunk=2)
            assert found[sequence].dtype == np.float32
            assert found[sequence].shape == (
                2 * contract.num_layers,
                contract.num_kv_heads,
                len(text),
                contract.head_dim,
            )
            self.close_to(found[sequence], alone.read(0))
        state.truncate([4, 5])
        assert np.array_equal(state.read(0), found[0][:, :, :4])
        state.keep([1])
        assert np.array_equal(state.read(0), found[1])

    def test_a_closed_cache_leaves_others_alone(self, backend, tokens):
        closed, kept = (backend.allocate(1, CacheSizing.STEPPED) for _ in range(2))
        run(backend, kept, [tokens[:9]])
        backend.commit(kept, [range(9)])
        closed.close()

        found = run(backend, kept, [tokens[9:]]).logits()[0]

        self.close_to(found, fresh_logits(backend, tokens)[9:])
