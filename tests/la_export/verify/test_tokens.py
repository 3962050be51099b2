"""What counts as the same tokens."""

from __future__ import annotations

import pytest

from la_export.verify.tokens import Comparisons, Verdict, compare_tokens, refuse_near_ties
from la_export.verify.tolerance import FP32

EPSILON = 0.5


@pytest.mark.parametrize(
    ("found", "verdict", "num_compared", "position", "margin"),
    [
        ((1, 2, 3), Verdict.EQUAL, 3, -1, 0.0),
        ((9, 2, 3), Verdict.DIFFERENT, 1, 0, 1.0),
        ((1, 9, 9), Verdict.EXCUSED, 2, 1, 0.4),
        ((1, 9), Verdict.EXCUSED, 2, 1, 0.4),
        ((1, 2, 9), Verdict.DIFFERENT, 3, 2, 0.5),
        ((1, 2), Verdict.DIFFERENT, 2, 2, 0.0),
        ((1, 2, 3, 4), Verdict.DIFFERENT, 3, 3, 0.0),
        ((), Verdict.DIFFERENT, 0, 0, 0.0),
    ],
)
def test_only_a_near_tie_at_the_first_difference_excuses(
    found, verdict, num_compared, position, margin
):
    """The margins say that the second token was a near-tie and the third just not."""
    comparison = compare_tokens((1, 2, 3), (1.0, 0.4, 0.5), found, epsilon=EPSILON)

    assert comparison.verdict is verdict
    assert comparison.num_compared == num_compared
    assert (comparison.position, comparison.margin) == (position, margin)


def test_a_near_tie_met_in_several_ways_is_excused_once():
    comparisons = Comparisons(tolerance=FP32, epsilon=EPSILON)

    for way in ("k=2", "k=4"):
        comparisons.compare("text", way, (1, 2, 3), (1.0, 0.4, 1.0), (1, 9, 9))

    assert len(comparisons.near_ties) == 1
    assert comparisons.num_tokens == 4
    assert comparisons.problems == ()


def test_more_near_ties_than_allowed_are_a_problem_and_each_is_listed():
    comparisons = Comparisons(tolerance=FP32, epsilon=EPSILON)

    comparisons.compare("one", "k=2", (1, 2, 3), (1.0, 0.4, 1.0), (1, 9, 9))
    comparisons.compare("two", "k=2", (1, 2, 3), (0.1, 0.4, 1.0), (7, 9, 9))

    assert comparisons.problems == (
        "2 near-ties, allowed 1",
        "one, k=2: new token 1 is 9, expected 2 (margin 0.4, epsilon 0.5)",
        "two, k=2: new token 0 is 7, expected 1 (margin 0.1, epsilon 0.5)",
    )


def test_a_difference_names_text_way_place_tokens_and_margin():
    comparisons = Comparisons(tolerance=FP32, epsilon=EPSILON)

    comparisons.compare("text", "k=4 full", (1, 2, 3), (1.0, 1.0, 0.7), (1, 2, 9))
    comparisons.compare("text", "k=2 full", (1, 2, 3), (1.0, 1.0, 0.7), (1, 2))

    assert comparisons.problems == (
        "text, k=4 full: new token 2 is 9, expected 3 (margin 0.7, epsilon 0.5)",
        "text, k=2 full: new token 2 is missing, expected 3 (margin 0, epsilon 0.5)",
    )


def test_near_ties_are_refused_only_beyond_their_allowance():
    assert refuse_near_ties(("a",), 1) == ()
    assert refuse_near_ties(("a", "b"), 2) == ()
    assert refuse_near_ties(("a", "b"), 1) == ("2 near-ties, allowed 1", "a", "b")
