"""Figures of proposals' probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from la_export.tune.groups import every_anchor
from la_export.tune.lookaheads import Lookaheads
from la_export.tune.reliability import Proposals, auroc, collect_proposals, reliability
from la_runtime.layout import GroupMask
from tests.la_export.tune.test_passes import NUM_SLOTS, make_lookaheads, make_texts, prepare
from tests.tiny_models import make_tiny_config, make_tiny_model


@pytest.mark.parametrize("seed", range(10))
def test_auroc_is_the_share_of_pairs_in_the_right_order(seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 6, 40) / 5
    right = rng.random(40) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[right] for b in scores[~right]]

    assert auroc(scores, right) == pytest.approx(np.mean(pairs))


def test_auroc_of_one_kind_alone_is_unknown():
    assert auroc(np.array([0.1, 0.2]), np.array([True, True])) is None


def test_every_proposal_is_in_one_range():
    rng = np.random.default_rng(0)
    proposals = Proposals(
        slot=1, probabilities=rng.uniform(1e-6, 1, 500), right=rng.random(500) < 0.3
    )

    bins = list(reliability(proposals))

    assert sum(found.count for found in bins) == 500
    assert all(found.low < found.mean_probability <= found.high for found in bins)
    total = sum(found.count * found.share_right for found in bins)
    assert total == pytest.approx(proposals.right.sum())


def test_proposals_are_those_of_every_prefix():
    model = prepare(make_tiny_model(make_tiny_config()))
    lookaheads = make_lookaheads(model)
    texts = make_texts(model.config.vocab_size)
    copy = Lookaheads.of_weights(lookaheads.vectors.detach().numpy(), lookaheads.adapter())

    found, again = (
        collect_proposals(model, given, texts, num_slots=NUM_SLOTS, group_mask=GroupMask.STRICT)
        for given in (lookaheads, copy)
    )

    num_anchors = sum(len(every_anchor(text, 1)) for text in texts)
    assert [len(of_slot.right) for of_slot in found] == [
        num_anchors - len(texts) * slot for slot in range(NUM_SLOTS)
    ]
    for of_slot, other in zip(found, again, strict=True):
        np.testing.assert_array_equal(of_slot.probabilities, other.probabilities)
        assert (of_slot.probabilities > 0).all()
