"""A cache that a graph writes in place, of no fixed capacity: no copies, and few bindings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from la_export.verify.recording import RecordingBackend
from la_runtime.backends.base import CacheSizing
from la_runtime.backends.ort import OrtBackend
from la_runtime.backends.ort_cache import GrowingScatterCache
from la_runtime.batch import BlockPolicy
from la_runtime.bundle import open_bundle
from la_runtime.contract import CacheForm, KvOrder
from la_runtime.decoder import Decoder
from la_runtime.layout import Layout
from la_runtime.sampling import SamplingParams
from tests.la_runtime.backends.conformance import read, run

PROMPT = list(range(20, 45))
NUM_TOKENS = 24


@pytest.fixture
def backend(tiny_bundle) -> Iterator[OrtBackend]:
    backend = OrtBackend.open(open_bundle(tiny_bundle), threads=1)
    yield backend
    backend.close()


class CountedBinding:
    """Counts what is bound."""

    def __init__(self, io_binding: Any, counts: Counter[str]) -> None:
        self._io_binding = io_binding
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._io_binding, name)

    def bind_cpu_input(self, name: str, array: np.ndarray) -> None:
        self._counts[name] += 1
        self._io_binding.bind_cpu_input(name, array)

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self._counts[name] += 1
        self._io_binding.bind_ortvalue_input(name, value)

    def bind_output(self, name: str, *arguments: Any) -> None:
        self._counts[name] += 1
        self._io_binding.bind_output(name, *arguments)


def test_a_backend_s_contract_is_that_of_the_graph_it_runs(backend):
    assert backend.contract.kv_order is KvOrder.SEQUENCE_MAJOR
    assert backend.contract.cache_form is CacheForm.SCATTER
    assert backend.contract.capacity is None


def test_committing_the_first_rows_of_a_block_writes_nothing(backend):
    state = backend.allocate(2, CacheSizing.STEPPED)
    run(backend, state, [PROMPT[:6], PROMPT[6:10]])
    before = state.places.copy()

    backend.commit(state, [range(4), range(1)])

    assert np.array_equal(state.places, before)
    assert state.lengths.tolist() == [4, 1]


def test_a_path_moves_only_the_rows_that_are_not_in_place(backend):
    state = backend.allocate(1, CacheSizing.STEPPED)
    run(backend, state, [PROMPT[:6]], parents=(0, 0, 2, 1, 3))
    before = state.places.copy()

    backend.commit(state, [(0, 2, 3, 5)])

    assert np.array_equal(state.places[:, 0, :, :4], before[:, 0][:, :, [0, 2, 3, 5]])
    assert np.array_equal(state.places[:, 0, :, 4:], before[:, 0, :, 4:])


def test_a_sequence_alone_grows_in_place_and_is_bound_anew_only_then(backend):
    """100 passes over 4 sizes; its places stay where they are."""
    state = backend.allocate(1, CacheSizing.STEPPED)
    state.reserve(120)
    bound: Counter[str] = Counter()
    state.binding.io_binding = CountedBinding(state.binding.io_binding, bound)
    sizes, addresses = set(), set()
    for position in range(100):
        run(backend, state, [[position]])
        backend.commit(state, [(0,)])
        sizes.add(state.past_len)
        addresses.add(state.places.ctypes.data)

    assert sizes == {32, 64, 96, 128}
    assert len(addresses) == 1
    contract = backend.contract
    for name in (*contract.past_names, *contract.present_names):
        assert bound[name] == 4
    assert bound["write_index"] == bound["logits_rows"] // 100 == 1


def test_exact_places_are_a_view_of_the_reserved_memory(backend):
    """At batch 1: every pass presents its sequence and its block, and nothing is copied."""
    state = backend.allocate(1, CacheSizing.EXACT)
    state.reserve(60)
    memory = state.memory
    for start, width in ((0, 20), (20, 1), (21, 9), (30, 3)):
        assert state.num_keys(width) == start + width
        run(backend, state, [PROMPT[:width]])
        assert state.places.shape[3] == start + width
        backend.commit(state, [range(width)])

    assert state.memory is memory


def test_memory_that_is_reserved_has_room_for_the_last_block(backend):
    """As many places as were announced, and a wide step behind the last: nothing moves."""
    state = backend.allocate(1, CacheSizing.STEPPED)
    state.reserve(70)
    memory = state.memory
    read(backend, state, [*PROMPT, *PROMPT, *PROMPT][:70], chunk=35)

    run(backend, state, [PROMPT])

    assert state.memory is memory


def test_a_cache_that_was_cut_short_presents_few_places_again(backend):
    state = backend.allocate(1, CacheSizing.STEPPED)
    read(backend, state, PROMPT * 8, chunk=50)
    assert state.past_len >= 200

    state.truncate([40])

    assert state.num_keys(5) == 64


def test_places_of_several_sequences_grow_by_larger_steps(backend):
    """They move apart for it."""
    state = backend.allocate(2, CacheSizing.STEPPED)

    assert [state.num_keys(width) for width in (1, 128, 129)] == [128, 128, 256]


def test_a_cache_of_this_form_is_a_growing_one(backend):
    assert isinstance(backend.allocate(1, CacheSizing.STEPPED), GrowingScatterCache)


@pytest.mark.parametrize("layout", Layout)
def test_at_a_fixed_width_logits_are_equal_bit_for_bit(engine, layout):
    """Every pass at one width, plain decoding included: no excuse for any difference."""
    policy = BlockPolicy.fixed_width(25, k_max=engine.backend.contract.k_max)
    recorded = []
    for k in (0, 4):
        recorder = RecordingBackend(engine.backend)
        decoder = Decoder(recorder, context=200, eos_token_ids=())
        params = SamplingParams(k=k, layout=layout, max_new_tokens=NUM_TOKENS)
        with decoder.start([PROMPT], [params], policy) as decoding:
            decoding.prefill()
            while not decoding.is_done:
                decoding.step()
            recorded.append((decoding.token_ids(0), recorder.logits_at))
    (plain_tokens, plain_logits), (tokens, logits) = recorded

    assert tokens == plain_tokens
    shared = plain_logits.keys() & logits.keys()
    assert len(shared) >= NUM_TOKENS - 1
    assert all(np.array_equal(plain_logits[p], logits[p]) for p in shared)
