from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from la_export.perplexity.scoring import (
    BackendScorer,
    ReferenceScorer,
    perplexity_of,
    token_log_probs,
)
from la_export.perplexity.windows import Window
from la_export.pipeline import BuildReport
from la_export.reference import TorchReference
from la_runtime.backends.ort import OrtBackend
from la_runtime.bundle import open_bundle
from la_runtime.errors import NonFiniteScoreError

VARIANT = ("llama", True)
VOCAB_SIZE = 320
# Float32 logits of two implementations, in nats.
CLOSE = 2e-5


def _draw_windows() -> list[Window]:
    """Of ragged lengths, scored from various places; one ends before the second pass begins."""
    rng = np.random.default_rng(7)
    shapes = [(37, 1), (2, 1), (64, 20), (9, 8), (33, 32), (50, 3), (17, 16)]
    return [
        Window(token_ids=tuple(rng.integers(0, VOCAB_SIZE, size).tolist()), scored_from=first)
        for size, first in shapes
    ]


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.longdouble]:
    wide = logits.astype(np.longdouble)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def bundle(report_of: Callable[..., BuildReport]) -> Path:
    return report_of(VARIANT).bundle


@pytest.fixture(scope="module")
def backend(bundle: Path) -> Iterator[OrtBackend]:
    backend = OrtBackend.open(open_bundle(bundle), threads=1)
    yield backend
    backend.close()


def test_log_probabilities_are_those_of_longer_arithmetic() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0.0, 30.0, (37, 1000)).astype(np.float32)
    token_ids = rng.integers(0, 1000, 37).tolist()

    found = token_log_probs(logits, token_ids)

    expected = _log_softmax(logits)[np.arange(37), token_ids]
    np.testing.assert_allclose(found, expected.astype(np.float64), rtol=1e-13)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary() -> None:
    class Uniform:
        def scores(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
            return np.full((len(token_ids), VOCAB_SIZE), 3.5, np.float32)

    found = perplexity_of(ReferenceScorer(Uniform()), _draw_windows())

    assert found.value == pytest.approx(VOCAB_SIZE, rel=1e-12)
    assert found.num_tokens == sum(window.num_scored for window in _draw_windows())


def test_perplexity_weighs_every_token_the_same() -> None:
    windows = [
        Window(token_ids=(1, 2), scored_from=1),
        Window(token_ids=(1, 2, 3, 4), scored_from=1),
    ]

    def score(windows: Sequence[Window]) -> Iterator[NDArray[np.float64]]:
        yield np.log([0.5])
        yield np.log([0.25, 0.25, 0.125])

    found = perplexity_of(score, windows)

    assert (found.num_tokens, found.mean_nll) == (4, pytest.approx(2 * math.log(2)))
    assert found.value == pytest.approx(4.0)


def test_the_reference_scores_each_token_by_the_row_before_it(
    checkpoint_of: Callable[[tuple[str, bool]], Path],
) -> None:
    reference = TorchReference.load(str(checkpoint_of(VARIANT)))
    windows = _draw_windows()

    found = list(ReferenceScorer(reference)(windows))

    for window, log_probs in zip(windows, found, strict=True):
        expected = [
            _log_softmax(reference.scores(window.token_ids[:place]))[-1, window.token_ids[place]]
            for place in range(window.scored_from, len(window.token_ids))
        ]
        np.testing.assert_allclose(log_probs, np.array(expected, np.float64), atol=CLOSE)


@pytest.mark.parametrize(("batch", "rows"), [(1, 7), (3, 16), (4, 64), (100, 1)])
def test_a_bundle_scores_what_its_source_scores_whatever_the_passes(
    backend: OrtBackend,
    checkpoint_of: Callable[[tuple[str, bool]], Path],
    batch: int,
    rows: int,
) -> None:
    windows = _draw_windows()
    reference = TorchReference.load(str(checkpoint_of(VARIANT)))
    scorer = BackendScorer(backend, context=256, batch=batch, rows=rows)

    found = list(scorer(windows))

    for log_probs, expected in zip(found, ReferenceScorer(reference)(windows), strict=True):
        np.testing.assert_allclose(log_probs, expected, atol=CLOSE)


def test_a_score_that_is_no_number_is_an_error_that_names_its_place() -> None:
    windows = [Window(token_ids=(1, 2, 3, 4), scored_from=2)] * 2

    def score(windows: Sequence[Window]) -> Iterator[NDArray[np.float64]]:
        yield np.array([-1.0, -2.0])
        yield np.array([-1.0, -np.inf])

    with pytest.raises(NonFiniteScoreError, match="token 3 of window 1 has log-probability -inf"):
        perplexity_of(score, windows)
