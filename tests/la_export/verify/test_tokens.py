"""What counts as the same tokens."""

from __future__ import annotations

import pytest

from la_export.verify.tokens import Verdict, compare_tokens

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
