"""How long a pass takes by its rows."""

from __future__ import annotations

import pytest

from la_runtime.step_costs import StepCosts


def test_costs_follow_the_line_between_measured_points_and_never_fall():
    costs = StepCosts([(1, 10.0), (3, 14.0), (4, 13.0), (8, 21.0)])

    assert [costs(rows) for rows in (1, 2, 3, 4, 6, 8, 10)] == [10, 12, 14, 14, 17.5, 21, 24.5]


def test_a_pass_costs_what_its_padded_width_costs():
    costs = StepCosts([(1, 10.0), (8, 17.0), (16, 25.0)], widths=(1, 8, 16))

    assert [costs(rows) for rows in (1, 2, 8, 9)] == [10, 17, 17, 25]


def test_rows_of_a_batch_are_padded_sequence_by_sequence():
    costs = StepCosts([(1, 1.0), (64, 64.0)], widths=(1, 8), drafting=0.5)

    assert costs(1, batch=4) == 4.0
    assert costs(2, batch=4) == 32.5


def test_one_point_is_the_time_of_every_pass():
    assert [StepCosts([(1, 3.0)])(rows) for rows in (1, 5, 90)] == [3.0, 3.0, 3.0]


def test_what_drafting_takes_beside_a_pass_is_part_of_its_time():
    costs = StepCosts.measured([(1, 10.0), (2, 11.0), (3, 12.0)], widths=())

    drafting = costs(2) - 11.0
    assert 0 < drafting < 1
    assert costs(1) == 10.0
    assert costs(3) == pytest.approx(12.0 + drafting)
