"""Backends that watch or disturb: what they change, and that they change nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from la_export.verify.probes import (
    BorrowedBackend,
    GivenProposals,
    ShiftedPositions,
    SpoiledCache,
)
from la_runtime.backends.base import CacheSizing
from la_runtime.backends.fake import FakeBackend
from la_runtime.layout import Layout
from la_runtime.sampling import SamplingParams
from tests.la_runtime.toy import K_MAX, VOCAB_SIZE, decode, decode_plainly, emitted

PROMPT = (3, 1, 4, 1, 5)
NUM_TOKENS = 24


@pytest.fixture
def backend():
    return FakeBackend(vocab_size=VOCAB_SIZE, k_max=K_MAX)


def text():
    return [*PROMPT, *decode_plainly(PROMPT, NUM_TOKENS)]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("layout", Layout)
def test_given_proposals_are_accepted_and_change_no_token(backend, layout, temperature):
    options = {"max_new_tokens": NUM_TOKENS, "temperature": temperature, "seed": 5}
    plain, _ = decode(backend, [PROMPT], [SamplingParams(k=0, **options)])
    probe = GivenProposals(backend, [[*PROMPT, *emitted(plain[0])]])

    found, (stats,) = decode(probe, [PROMPT], [SamplingParams(k=4, layout=layout, **options)])

    assert emitted(found[0]) == emitted(plain[0])
    assert 0 < sum(stats.accepted) < sum(stats.drafted)


def test_given_proposals_of_another_text_are_harmless(backend):
    other = [7, *PROMPT[1:], *reversed(text())]

    found, (stats,) = decode(
        GivenProposals(backend, [other]),
        [PROMPT],
        [SamplingParams(k=4, max_new_tokens=NUM_TOKENS)],
    )

    assert emitted(found[0]) == decode_plainly(PROMPT, NUM_TOKENS)
    assert sum(stats.accepted) < NUM_TOKENS // 4


def test_each_sequence_of_a_batch_gets_its_own_proposals(backend):
    prompts = [PROMPT, (2, 7, 1, 8)]
    texts = [[*p, *decode_plainly(p, NUM_TOKENS)] for p in prompts]

    _, stats = decode(
        GivenProposals(backend, texts),
        prompts,
        [SamplingParams(k=4, max_new_tokens=NUM_TOKENS)] * 2,
    )

    assert min(sum(entry.accepted) for entry in stats) > NUM_TOKENS // 2


def test_a_spoiled_cache_changes_nothing_that_is_used(backend):
    params = [SamplingParams(k=3, max_new_tokens=NUM_TOKENS)]

    spoiled, _ = decode(SpoiledCache(backend, seed=1), [PROMPT], params)

    assert emitted(spoiled[0]) == decode_plainly(PROMPT, NUM_TOKENS)


def test_a_spoiled_cache_is_spoiled_anew_before_every_pass(backend):
    seeds = []

    class State:
        def spoil_unused(self, seed):
            seeds.append(seed)

    probe = SpoiledCache(backend, seed=7)
    for _ in range(2):
        with pytest.raises(AssertionError):
            probe.forward(State(), None)

    assert seeds == [8, 9]


def test_shifted_positions_are_another_text_to_a_model_of_absolute_positions(backend):
    params = [SamplingParams(k=2, max_new_tokens=NUM_TOKENS)]

    shifted, _ = decode(ShiftedPositions(backend, 50), [PROMPT], params)
    unshifted, _ = decode(ShiftedPositions(backend, 0), [PROMPT], params)

    assert emitted(shifted[0]) != decode_plainly(PROMPT, NUM_TOKENS)
    assert emitted(unshifted[0]) == decode_plainly(PROMPT, NUM_TOKENS)


def test_a_borrowed_backend_stays_open(backend, monkeypatch):
    monkeypatch.setattr(backend, "close", lambda: pytest.fail("closed by a borrower"))
    probe = BorrowedBackend(backend)

    probe.close()

    probe.set_lookahead_embeddings(np.ones((K_MAX, 1)))
    assert probe.widths == backend.widths
    assert probe.allocate(1, CacheSizing.STEPPED).past_len == 0
