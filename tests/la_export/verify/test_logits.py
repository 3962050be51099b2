"""Logits beside the reference's, where it does not hold its own answer either."""

from __future__ import annotations

import numpy as np
import pytest

from la_export.options import Precision
from la_export.reference import TorchReference
from la_export.verify.findings import Suspect
from la_export.verify.rungs.logits import LogitDifferences
from la_export.verify.tolerance import tolerance_of

INT8 = tolerance_of(Precision.INT8)
TEXT = Suspect(token_ids=(1, 2, 3))


def rows(seed, count=3):
    return np.random.default_rng(seed).uniform(0, 40, size=(count, 50)).astype(np.float32)


def test_a_row_may_be_near_any_of_the_answers_that_rounding_gives():
    truth, other = rows(1), rows(2)
    found = truth.copy()
    found[1] = other[1] + 0.5

    differences = LogitDifferences(tolerance=INT8)
    answers = [truth, other]
    differences.add("text", found, truth, TEXT, ask_again=lambda seed: answers[min(seed, 1)])

    assert differences.problems == []
    assert differences.unsteady == 1
    assert differences.largest == pytest.approx(0.5, abs=1e-5)
    (figure,) = [f for f in differences.figures if f.name == "rows PyTorch is unsteady at"]
    assert (figure.value, figure.bound) == (1, 1)


def test_a_row_that_is_near_none_of_them_is_a_difference():
    truth, other, found = rows(1), rows(2), rows(3)
    asked = []

    def ask_again(seed):
        asked.append(seed)
        return other

    differences = LogitDifferences(tolerance=INT8)
    differences.add("text", found, truth, TEXT, ask_again=ask_again)

    assert any("text: logits at position" in problem for problem in differences.problems)
    assert differences.unsteady == 0
    assert asked == list(range(INT8.nudges))


def test_more_unsteady_rows_than_near_ties_are_allowed_break_the_bound():
    truth, found = rows(1), rows(2)

    differences = LogitDifferences(tolerance=INT8)
    differences.add("text", found, truth, TEXT, ask_again=lambda seed: found)

    assert differences.unsteady == 3
    assert any(not figure.is_kept for figure in differences.figures)


def test_a_near_answer_is_not_asked_for_again():
    truth = rows(1)

    def ask_again(seed):
        raise AssertionError("nothing is far")

    differences = LogitDifferences(tolerance=INT8)
    differences.add("text", truth + 1, truth, TEXT, ask_again=ask_again)

    assert differences.problems == []


def test_float_precisions_ask_once():
    assert [p for p in Precision if tolerance_of(p).nudges] == [Precision.INT8, Precision.INT4]


def test_a_nudged_reference_says_nearly_the_same_and_then_the_same_again(tiny):
    reference = TorchReference.load(str(tiny / "checkpoint"))
    truth = reference.scores((1, 2, 3))

    nudged = reference.nudged_scores((1, 2, 3), seed=0)

    difference = np.abs(nudged - truth).max()
    assert 0 < difference < 1e-3
    assert np.array_equal(reference.scores((1, 2, 3)), truth)
    assert not np.array_equal(reference.nudged_scores((1, 2, 3), seed=1), nudged)
