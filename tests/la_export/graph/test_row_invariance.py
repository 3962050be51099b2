"""The lean graph gives a row the same bits at any width: with lookaheads or without, the same."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from la_export.options import Precision
from la_export.verify import epsilon
from la_export.verify.epsilon import measure_epsilon, read_logits
from la_runtime.backends.base import CacheSizing, Outputs
from la_runtime.backends.ort import OrtBackend
from la_runtime.block import Part, make_step_inputs
from la_runtime.bundle import open_bundle
from la_runtime.layout import make_rows
from tests.tiny_models import build_tiny_bundle

# Kernels work on 12 rows at a time, softmax on 16 or 64 keys.
WIDTHS = (2, 13, 25, 100)
HEADS = {
    "no groups": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "one key head, 128 channels": {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "hidden_size": 48,
        "head_dim": 128,
    },
}


@pytest.fixture(scope="module", params=[Precision.FP32, Precision.INT8])
def bundles(request, tmp_path_factory):
    """One for each kind of heads."""
    return {
        name: open_bundle(
            build_tiny_bundle(tmp_path_factory.mktemp("tiny"), precision=request.param, **sizes)
        )
        for name, sizes in HEADS.items()
    }


def text_of(backend, length, *, seed):
    return np.random.default_rng(seed).integers(backend.contract.vocab_size, size=length).tolist()


@pytest.mark.parametrize("heads", HEADS)
def test_logits_are_equal_bit_for_bit_at_any_width(bundles, heads):
    context = bundles[heads].manifest.model.context
    for threads in (1, 2):
        with closing(OrtBackend.open(bundles[heads], threads=threads)) as backend:
            text = text_of(backend, min(130, context), seed=8)
            assert measure_epsilon(backend, text, widths=WIDTHS, context=context) == 0


def behind_one_another(parents):
    return tuple(range(1, len(parents) + 1))


def all_of_them(drafts, *, root_column):
    return behind_one_another(drafts.parents)


def test_rows_of_trees_have_these_bits_by_where_their_keys_stand(bundles, monkeypatch):
    """As they are placed; not one behind the other, and not across the end of a run of columns."""
    bundle = bundles["one key head, 128 channels"]
    context = bundle.manifest.model.context
    with closing(OrtBackend.open(bundle, threads=1)) as backend:
        text = text_of(backend, min(256, context), seed=8)

        def measure():
            return measure_epsilon(backend, text, widths=(), context=context)

        assert measure() == 0
        monkeypatch.setattr(epsilon, "trim_to_runs", all_of_them)
        assert measure() > 0, "some branches would leave their run"
        monkeypatch.setattr(epsilon, "place_drafts", behind_one_another)
        assert measure() > 0


@pytest.mark.parametrize("sizing", CacheSizing)
@pytest.mark.parametrize("heads", HEADS)
def test_logits_are_equal_bit_for_bit_beside_other_sequences(bundles, heads, sizing):
    """Texts of other lengths in one batch, read in parts of other sizes."""
    context = bundles[heads].manifest.model.context
    with closing(OrtBackend.open(bundles[heads], threads=1)) as backend:
        texts = [text_of(backend, length, seed=length) for length in (70, 31, 9)]
        state = backend.allocate(len(texts), sizing)
        found = [[] for _ in texts]
        rng = np.random.default_rng(4)
        done = [0] * len(texts)
        while any(place < len(text) for place, text in zip(done, texts, strict=True)):
            counts = [
                min(int(rng.integers(1, 9)), len(text) - place)
                for place, text in zip(done, texts, strict=True)
            ]
            parts = [
                Part(
                    rows=make_rows(count, (), ()),
                    token_ids=tuple(text[place : place + count]),
                    scored_from=0,
                )
                if count
                else None
                for place, text, count in zip(done, texts, counts, strict=True)
            ]
            inputs = make_step_inputs(
                parts,
                state,
                backend.contract,
                context=context,
                widths=backend.widths,
                outputs=Outputs.LOGITS,
            )
            logits = backend.forward(state, inputs).logits()
            for sequence, count in enumerate(counts):
                found[sequence] += list(logits[sequence, :count].copy())
            backend.commit(state, [range(count) for count in counts])
            done = [place + count for place, count in zip(done, counts, strict=True)]
        for text, rows in zip(texts, found, strict=True):
            alone = read_logits(backend, text, width=1, context=context)
            for row, expected in zip(rows, alone, strict=True):
                np.testing.assert_array_equal(row, expected[0])
