"""How many rows the next pass should have: which drafts it verifies, and where it puts slots.

A planner is given the drafts in the order of their chances. The one that counts costs takes as
many, and as many groups of slots, as give the most tokens per millisecond; how long a pass of
so many rows takes was measured. What it decides follows from the history of the sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import Final, Protocol

from la_runtime.drafting.candidates import RankedTree
from la_runtime.layout import NO_DRAFTS, DraftTree, Group, Layout
from la_runtime.source_names import SourceName
from la_runtime.step_costs import StepCosts

__all__ = [
    "NO_PLAN",
    "CostPlanner",
    "FixedPlanner",
    "PlainReason",
    "Planner",
    "StepPlan",
]


class PlainReason(StrEnum):
    """Why a pass has one row though drafts were wanted.

    ``no-draft``: no source had anything to propose.
    ``not-worth-a-row``: what was proposed was less likely than a row is expensive.
    """

    NO_DRAFT = "no-draft"
    NOT_WORTH_A_ROW = "not-worth-a-row"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the next pass of a sequence carries besides its known tokens.

    Args:
        drafts: to be verified.
        sources: per draft, who proposed it.
        groups: of slots.
        columns: per draft, where its key stands, counted from the root's; empty if each stands
            behind the one before it.
        plain_because: set if there is neither.
    """

    drafts: DraftTree = NO_DRAFTS
    sources: tuple[frozenset[SourceName], ...] = ()
    groups: tuple[Group, ...] = ()
    columns: tuple[int, ...] = ()
    plain_because: PlainReason | None = None

    def keep(self, drafts: Sequence[int]) -> StepPlan:
        """The same with these drafts alone, from 1; groups behind the others go with them."""
        renamed = {0: 0} | {old: new for new, old in enumerate(drafts, 1)}
        return replace(
            self,
            drafts=self.drafts.keep(drafts),
            columns=(),
            sources=tuple([self.sources[draft - 1] for draft in drafts]),
            groups=tuple(
                [
                    Group(renamed[group.node], group.num_slots)
                    for group in self.groups
                    if group.node in renamed
                ]
            ),
        )


NO_PLAN: Final = StepPlan()


class Planner(Protocol):
    """Shapes the passes of one sequence."""

    @property
    def most_drafts(self) -> int:
        """Most drafts of a pass."""
        ...

    @property
    def most_rows(self) -> int:
        """Rows of the widest pass that it plans, behind known tokens but the root."""
        ...

    def first(self) -> tuple[Group, ...]:
        """The groups of the pass that ends the prompt."""
        ...

    def plan(self, ranked: RankedTree, *, batch: int, has_read_slots: bool) -> StepPlan:
        """The next pass.

        Args:
            ranked: what may be verified, no more than `most_drafts`.
            batch: sequences that share the pass.
            has_read_slots: whether the last pass had slots, and what they propose is in `ranked`.
        """
        ...


class FixedPlanner:
    """The same number of drafts and slots in every pass, as far as there are drafts.

    Args:
        k: slots of a group.
        layout: where groups stand.
        most_drafts: drafts to verify.
    """

    def __init__(self, *, k: int, layout: Layout, most_drafts: int) -> None:
        self._k = k
        self._layout = layout
        self.most_drafts = most_drafts

    @property
    def most_rows(self) -> int:
        """See `Planner.most_rows`."""
        groups = self._layout.groups(self.most_drafts, self._k)
        return 1 + self.most_drafts + self._k * len(groups)

    def first(self) -> tuple[Group, ...]:
        """See `Planner.first`."""
        return self._layout.groups(0, self._k)

    def plan(self, ranked: RankedTree, *, batch: int, has_read_slots: bool) -> StepPlan:
        """See `Planner.plan`."""
        chosen = ranked.first(self.most_drafts)
        return StepPlan(
            drafts=chosen.drafts,
            sources=chosen.sources,
            groups=self._layout.groups(len(chosen.chances), self._k),
        )


# Groups and slots of each that a pass may carry, and how many passes without any there are before
# one carries the first of them, to see whether slots have become worth their rows.
_GROUPS: Final = (
    (1, 2), (1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (1, 4), (4, 2), (6, 2),
)  # fmt: skip
_PASSES_BETWEEN_PROBES: Final = 48
# Of each slot of a group in turn, until some were seen.
_FIRST_GAINS: Final = (0.2, 0.06, 0.03, 0.03)
_FIRST_GAINS_TUNED: Final = (0.35, 0.12, 0.05, 0.03)
# What drafts have to promise: their chances and the times are estimates.
_LEAST_SPEEDUP: Final = 1.03
_GAIN_WEIGHT: Final = 0.06


class CostPlanner:
    """As many drafts and slots as give the most tokens per unit of time.

    A pass gives one token and, of each draft, its chance. Slots give nothing at once. What a group
    adds to the next pass, if the path ends where it stands, is estimated from what groups have
    added so far: the chances of the drafts that nobody else proposed.

    Args:
        costs: time of a pass.
        k: most slots of a group; 0 for none at all.
        most_rows: rows of the widest pass.
        is_tuned: whether the lookaheads were taught.
    """

    def __init__(self, costs: StepCosts, *, k: int, most_rows: int, is_tuned: bool = False) -> None:
        self._costs = costs
        sizes = dict.fromkeys((groups, min(slots, k)) for groups, slots in _GROUPS) if k else ()
        self._sizes = [(groups, slots) for groups, slots in sizes if groups * slots < most_rows]
        self.most_rows = most_rows
        self.most_drafts = most_rows - 1
        # By each slot of the groups of a pass.
        self._added = list(_FIRST_GAINS_TUNED if is_tuned else _FIRST_GAINS)
        self._covered = 1.0  # the chance that one stood right
        self._last_covered = 0.0
        self._last_slots = 0
        self._num_weighed = 0
        self._since_slots = 0

    def first(self) -> tuple[Group, ...]:
        """See `Planner.first`."""
        if not self._sizes:
            return ()
        self._last_covered, self._last_slots = 1.0, self._sizes[0][1]
        return (Group(0, self._last_slots),)

    def plan(self, ranked: RankedTree, *, batch: int, has_read_slots: bool) -> StepPlan:
        """See `Planner.plan`."""
        chosen = ranked.first(self._count_drafts(ranked.chances, batch))
        if has_read_slots:
            self._weigh_slots(chosen, batch)
        groups = self._place_groups(chosen, batch)
        is_plain = not groups and not chosen.chances
        return StepPlan(
            drafts=chosen.drafts,
            sources=chosen.sources,
            groups=groups,
            plain_because=_why_plain(ranked) if is_plain else None,
        )

    def _weigh_slots(self, chosen: RankedTree, batch: int) -> None:
        """Count what the groups of the last pass have added to this one.

        That is, slot by slot, the tokens that drafts of slots alone promise, less those that other
        passes give in the time their rows take.
        """
        own = [0.0] * self._last_slots
        num_own = [0] * self._last_slots
        depths = chosen.drafts.depths
        for depth, chance, sources in zip(depths, chosen.chances, chosen.sources, strict=True):
            if depth <= self._last_slots and sources == {SourceName.LOOKAHEAD}:
                own[depth - 1] += chance
                num_own[depth - 1] += 1
        rows = 1 + len(chosen.chances)
        cost = self._costs(rows, batch)
        speed = (1.0 + sum(chosen.chances)) / cost
        row = (cost - self._costs(rows - sum(num_own), batch)) / max(1, sum(num_own))
        self._num_weighed += 1
        weight = max(_GAIN_WEIGHT, 1 / (1 + self._num_weighed))
        for slot, (promised, count) in enumerate(zip(own, num_own, strict=True)):
            added = max(0.0, promised - speed * row * count)
            self._added[slot] += weight * (added - self._added[slot])
        self._covered += weight * (self._last_covered - self._covered)

    def _count_drafts(self, chances: Sequence[float], batch: int) -> int:
        """How many of the drafts are worth their rows."""
        tokens, best, num_drafts = 1.0, _LEAST_SPEEDUP / self._costs(1, batch), 0
        for count, chance in enumerate(chances, 1):
            tokens += chance
            speed = tokens / self._costs(1 + count, batch)
            if speed > best:
                best, num_drafts = speed, count
        return num_drafts

    def _place_groups(self, chosen: RankedTree, batch: int) -> tuple[Group, ...]:
        """The groups that are worth their rows, behind the nodes where the path likely ends."""
        self._last_covered = 0.0
        if not self._sizes:
            return ()
        ends = _find_ends(chosen)
        likeliest = sorted(range(len(ends)), key=ends.__getitem__, reverse=True)
        tokens = 1.0 + sum(chosen.chances)
        rows = len(ends)
        gains = [added / self._covered for added in accumulate(self._added)]
        best, best_size = tokens / self._costs(rows, batch), (0, 0)
        if (
            self._since_slots >= _PASSES_BETWEEN_PROBES
            and rows + self._sizes[0][1] <= self.most_rows
        ):
            best, best_size = 0.0, self._sizes[0]
        else:
            for groups, slots in self._sizes:
                if rows + groups * slots > self.most_rows:
                    continue
                covered = sum(ends[node] for node in likeliest[:groups])
                cost = self._costs(rows + groups * slots, batch, has_slots=True)
                speed = (tokens + gains[slots - 1] * covered) / cost
                if speed > best:
                    best, best_size = speed, (groups, slots)
        groups, slots = best_size
        if not groups:
            self._since_slots += 1
            return ()
        self._since_slots = 0
        self._last_slots = slots
        nodes = sorted(likeliest[:groups])
        self._last_covered = sum(ends[node] for node in nodes)
        return tuple([Group(node, slots) for node in nodes])


def _find_ends(ranked: RankedTree) -> list[float]:
    """Per node (0 is the root), the chance that the accepted path ends there."""
    ends = [1.0, *ranked.chances]
    for parent, chance in zip(ranked.drafts.parents, ranked.chances, strict=True):
        ends[parent] -= chance
    return ends


def _why_plain(ranked: RankedTree) -> PlainReason:
    return PlainReason.NOT_WORTH_A_ROW if ranked.chances else PlainReason.NO_DRAFT
