"""Tied tokens of a device come in the order that every other part counts on."""

from __future__ import annotations

import numpy as np
import pytest

from la_runtime.backends.array_scores import ArrayScores, DeviceScores
from la_runtime.contract import Name

NAN = float("nan")


def _scores(kind: type[ArrayScores], ids: list[int], logits: list[float]) -> ArrayScores:
    return kind(
        {
            Name.TOP_IDS: np.array([[ids]], dtype=np.int64),
            Name.TOP_LOGITS: np.array([[logits]], dtype=np.float32),
        }
    )


@pytest.mark.parametrize(
    ("ids", "logits", "expected"),
    [
        ([9, 2, 7, 5], [3, 2, 2, 1], [9, 2, 7, 5]),
        ([9, 7, 2, 5], [3, 2, 2, 1], [9, 2, 7, 5]),
        ([9, 7, 5, 2], [3, 3, 1, 1], [7, 9, 2, 5]),
        ([9, 7, 5, 2], [3, 3, 3, 3], [2, 5, 7, 9]),
        ([9, 7, 5, 2], [0.0, -0.0, -1, -2], [7, 9, 5, 2]),
        ([9, 7, 5, 2], [NAN, NAN, 1, 1], [9, 7, 2, 5]),
        ([9, 7, 5, 2], [4, 3, 2, 1], [9, 7, 5, 2]),
    ],
)
def test_ids_of_equal_logits_are_ascending_and_nothing_else_moves(
    ids: list[int], logits: list[float], expected: list[int]
) -> None:
    scores = _scores(DeviceScores, ids, logits)
    for _ in range(2):
        found_ids, found_logits = scores.top()

        assert found_ids.tolist() == [[expected]]
        assert np.array_equal(found_logits[0, 0], np.float32(logits), equal_nan=True)


def test_scores_that_were_computed_here_are_given_out_as_they_are() -> None:
    found, _ = _scores(ArrayScores, [9, 7], [3, 3]).top()

    assert found.tolist() == [[[9, 7]]]
