"""The comparison itself: it passes what is lossless and catches what is not."""

from __future__ import annotations

import numpy as np
import pytest

from la_export.verify.lossless import (
    compare_fixed_width,
    compare_lookahead,
    compare_reference,
    run_plainly,
)
from la_runtime.generation import Engine
from la_runtime.layout import Layout
from tests.tiny_models import build_tiny_bundle

NUM_TOKENS = 10


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return build_tiny_bundle(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(bundle):
    with Engine.open(bundle, threads=1, max_batch=2) as engine:
        yield engine


@pytest.fixture
def runs(engine):
    prompts = {"cat": "The cat sat", "rain": "rain"}
    return [
        run_plainly(engine, name, engine.encode(text), num_tokens=NUM_TOKENS)
        for name, text in prompts.items()
    ]


class _LeakyMasks:
    """Wraps a backend: from the block's second row on, rows also see the slots."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def forward(self, state, inputs):
        block = inputs.input_ids.shape[1]
        slots = inputs.input_ids >= self._backend.contract.vocab_size
        own = inputs.attention_mask[:, 0, :, -block:]
        own[np.broadcast_to(slots[:, None, :], own.shape)] = 0
        return self._backend.forward(state, inputs)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("layout", Layout)
def test_lossless_decoding_is_found_equal(engine, runs, layout, batch):
    said = []

    tally = compare_lookahead(
        engine,
        runs,
        batch,
        k=3,
        layout=layout,
        num_tokens=NUM_TOKENS,
        epsilon=1e-3,
        report=said.append,
    )

    assert (tally.prompts, tally.different, tally.tokens) == (2, 0, 2 * NUM_TOKENS)
    assert len(said) == tally.excused


def test_a_mask_that_leaks_is_caught(engine, runs):
    engine._decoder.backend = _LeakyMasks(engine.backend)
    said = []

    tally = compare_lookahead(
        engine,
        runs,
        1,
        k=4,
        layout=Layout.FULL,
        num_tokens=NUM_TOKENS,
        epsilon=1e-3,
        report=said.append,
    )

    assert tally.different == 2
    assert said[0].startswith("different: plain k=4 full batch 1, prompt cat, new token 0, margin")


def test_at_one_width_a_leak_is_caught_bit_for_bit(engine, runs):
    prompts = [(run.name, run.prompt) for run in runs]
    options = {
        "what": "plain",
        "k": 2,
        "layout": Layout.FULL,
        "width": 16,
        "num_tokens": NUM_TOKENS,
        "report": print,
    }
    assert compare_fixed_width(engine, prompts, **options).equal == 2
    engine.backend = _LeakyMasks(engine.backend)

    assert compare_fixed_width(engine, prompts, **options).different == 2


def test_another_text_than_the_references_is_caught(runs):
    same = compare_reference(
        runs, lambda prompt: next(r.token_ids for r in runs if r.prompt == prompt), epsilon=1e-3,
        report=print,
    )  # fmt: skip
    other = compare_reference(runs, lambda prompt: [0] * NUM_TOKENS, epsilon=1e-9, report=print)

    assert (same.equal, same.different) == (2, 0)
    assert other.different == 2
