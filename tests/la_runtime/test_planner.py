"""How many drafts and slots a pass carries."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from la_runtime.drafting.candidates import NO_RANKING, RankedTree
from la_runtime.layout import DraftTree, Group, Layout
from la_runtime.planner import CostPlanner, FixedPlanner, PlainReason
from la_runtime.source_names import SourceName
from la_runtime.step_costs import StepCosts

SUFFIX, LOOKAHEAD = frozenset({SourceName.SUFFIX}), frozenset({SourceName.LOOKAHEAD})


def ranked(*chances, source=SUFFIX, parents=None):
    count = len(chances)
    parents = tuple(range(count)) if parents is None else parents
    return RankedTree(
        drafts=DraftTree(token_ids=tuple(range(count)), parents=parents),
        chances=chances,
        sources=(source,) * count,
    )


def test_drafts_are_verified_while_each_gives_more_than_its_row_takes():
    """Rows cost a tenth of a pass each: a draft pays while it is likelier than the pass so far."""
    planner = CostPlanner(StepCosts([(1, 1.0), (31, 4.0)]), k=0, most_rows=31)

    plan = planner.plan(ranked(0.9, 0.5, 0.2, 0.1), batch=1, has_read_slots=True)

    # (1 + .9) / 1.1 = 1.73, (1 + 1.4) / 1.2 = 2.0, (1 + 1.6) / 1.3 = 2.0 exactly as much
    assert plan.drafts.token_ids == (0, 1)
    assert plan.sources == (SUFFIX, SUFFIX)
    assert plan.plain_because is None


def test_more_sequences_share_the_pass_and_make_rows_dearer():
    planner = CostPlanner(StepCosts([(1, 1.0), (2, 1.02), (9, 9.0)]), k=0, most_rows=8)

    assert planner.plan(ranked(0.4), batch=1, has_read_slots=True).drafts.token_ids == (0,)
    assert planner.plan(ranked(0.4), batch=4, has_read_slots=True).drafts.token_ids == ()


def test_a_plain_pass_says_why():
    planner = CostPlanner(StepCosts([(1, 1.0), (2, 2.0)]), k=0, most_rows=8)

    assert (
        planner.plan(NO_RANKING, batch=1, has_read_slots=True).plain_because is PlainReason.NO_DRAFT
    )
    assert (
        planner.plan(ranked(0.5), batch=1, has_read_slots=True).plain_because
        is PlainReason.NOT_WORTH_A_ROW
    )


def test_slots_go_where_the_path_likely_ends():
    """Rows are all but free; the path stops at the root, or runs down to draft 2."""
    planner = CostPlanner(StepCosts([(1, 1.0), (32, 1.01)]), k=2, most_rows=32)
    assert planner.first() == (Group(0, 2),)

    plan = planner.plan(ranked(0.6, 0.59, 0.01), batch=1, has_read_slots=True)

    assert {0, 2} <= {group.node for group in plan.groups}


def test_tuned_slots_are_tried_at_once():
    """Where untuned ones would have to promise more than is first taken for granted."""
    costs = StepCosts([(1, 1.0), (32, 9.0)])
    plans = []
    for is_tuned in (False, True):
        planner = CostPlanner(costs, k=2, most_rows=32, is_tuned=is_tuned)
        planner.first()
        plans.append(planner.plan(NO_RANKING, batch=1, has_read_slots=False))

    untuned, tuned = plans
    assert not untuned.groups
    assert tuned.groups


def test_slots_that_add_nothing_are_left_out_and_tried_again_now_and_then():
    planner = CostPlanner(StepCosts([(1, 1.0), (32, 3.0)]), k=4, most_rows=32)
    planner.first()

    with_slots = [
        bool(planner.plan(ranked(0.5), batch=1, has_read_slots=True).groups) for _ in range(400)
    ]

    tried = [index for index, has_slots in enumerate(with_slots) if has_slots and index >= 100]
    assert all(later - earlier >= 48 for earlier, later in pairwise(tried))
    assert len(tried) >= 4


def test_one_slot_is_taken_where_the_second_adds_nothing():
    """Only the first slot's proposals are worth a row."""
    planner = CostPlanner(StepCosts([(1, 1.0), (32, 3.0)]), k=4, most_rows=32)
    planner.first()

    sizes = []
    for _ in range(60):
        plan = planner.plan(ranked(0.6, source=LOOKAHEAD), batch=1, has_read_slots=True)
        sizes.append({group.num_slots for group in plan.groups})

    assert sizes[-10:] == [{1}] * 10


def test_what_slots_take_beside_their_rows_counts():
    """A pass with slots takes half as long again: then even good ones are left out."""
    line = [(1, 1.0), (32, 3.0)]
    groups = []
    for extra in (0.0, 0.5):
        planner = CostPlanner(StepCosts(line, slots=extra), k=1, most_rows=32)
        planner.first()
        plan = planner.plan(ranked(0.3, source=LOOKAHEAD), batch=1, has_read_slots=True)
        groups.append(plan.groups)

    assert groups[0]
    assert not groups[1]


def test_slots_that_add_much_stay():
    planner = CostPlanner(StepCosts([(1, 1.0), (32, 3.0)]), k=4, most_rows=32)
    planner.first()

    with_slots = [
        bool(planner.plan(ranked(0.8, 0.5, source=LOOKAHEAD), batch=1, has_read_slots=True).groups)
        for _ in range(50)
    ]

    assert all(with_slots)


def test_a_single_slot_is_used_where_there_are_no_more():
    planner = CostPlanner(StepCosts([(1, 1.0), (32, 1.01)]), k=1, most_rows=32)

    assert planner.first() == (Group(0, 1),)
    groups = planner.plan(ranked(0.5), batch=1, has_read_slots=False).groups
    assert {group.num_slots for group in groups} == {1}


def test_slots_that_were_not_read_count_for_nothing():
    """A pass that left its last choice open has not been asked what may follow it."""
    planner = CostPlanner(StepCosts([(1, 1.0), (32, 3.0)]), k=4, most_rows=32)
    planner.first()
    before = planner._added

    for _ in range(5):
        planner.plan(ranked(0.5), batch=1, has_read_slots=False)

    assert planner._added == before


@pytest.mark.parametrize("seed", range(30))
def test_plans_fit_and_depend_on_the_history_alone(seed):
    def run():
        rng = np.random.default_rng(seed)
        points = [(1, 1.0), (8, 1.0 + float(rng.random())), (32, 3.0)]
        most_rows = int(rng.integers(1, 33))
        planner = CostPlanner(StepCosts(points), k=int(rng.integers(5)), most_rows=most_rows)
        plans = [planner.first()]
        for _ in range(60):
            chances = sorted(rng.random(rng.integers(most_rows)).tolist(), reverse=True)
            source = LOOKAHEAD if rng.random() < 0.5 else SUFFIX
            parents = tuple(int(rng.integers(i + 1)) for i in range(len(chances)))
            plan = planner.plan(
                ranked(*chances, source=source, parents=parents), batch=1, has_read_slots=True
            )
            rows = 1 + len(plan.drafts.parents) + sum(group.num_slots for group in plan.groups)
            assert rows <= most_rows
            plans.append(plan)
        return plans

    assert run() == run()


def test_a_plan_without_some_drafts_has_no_group_behind_them():
    planner = FixedPlanner(k=1, layout=Layout.FULL, most_drafts=3)
    plan = planner.plan(ranked(0.9, 0.8, 0.7, parents=(0, 1, 0)), batch=1, has_read_slots=True)
    assert [group.node for group in plan.groups] == [0, 1, 2, 3]

    kept = plan.keep([1, 3])

    assert kept.drafts == DraftTree(token_ids=(0, 2), parents=(0, 0))
    assert kept.groups == (Group(0, 1), Group(1, 1), Group(2, 1))
    assert len(kept.sources) == 2
