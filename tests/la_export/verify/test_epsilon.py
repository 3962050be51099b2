"""How far a narrow pass and a wide one differ."""

from __future__ import annotations

import numpy as np
import pytest

from la_export.verify.epsilon import EPSILON_FACTOR, measure_epsilon, read_logits
from la_runtime.backends.fake import FakeBackend

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


class _WidthDependentBackend(FakeBackend):
    """Logits of passes of exactly three rows are off by an eighth, at one position by a half."""

    def forward(self, state, inputs):
        scores = super().forward(state, inputs)
        if inputs.input_ids.shape[1] == 3:
            scores.logits()[:] += 0.125
            scores.logits()[inputs.position_ids == 7, 4] += 0.375
        return scores


def test_an_exact_backend_has_no_near_ties():
    backend = FakeBackend(vocab_size=11, k_max=1)

    assert measure_epsilon(backend, TOKENS, widths=(2, 3, 11), context=100) == 0.0


@pytest.mark.parametrize(("widths", "difference"), [((2, 5), 0.0), ((2, 3), 0.5)])
def test_the_largest_difference_of_any_width_and_position_counts(widths, difference):
    backend = _WidthDependentBackend(vocab_size=11, k_max=1)

    epsilon = measure_epsilon(backend, TOKENS, widths=widths, context=100)

    assert epsilon == pytest.approx(EPSILON_FACTOR * difference, abs=1e-5)


@pytest.mark.parametrize("width", [1, 2, 5, 11, 20])
def test_reading_a_text_in_passes_gives_every_position_once(width):
    backend = FakeBackend(vocab_size=11, k_max=1)

    passes = [p.copy() for p in read_logits(backend, TOKENS, width=width, context=100)]

    whole = next(read_logits(backend, TOKENS, width=len(TOKENS), context=100))
    assert np.array_equal(np.concatenate(passes), whole)
