"""The draft sources of one sequence, and the drafts they give together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from la_runtime.contract import RowPlaces
from la_runtime.drafting.candidates import NO_RANKING, Candidates, merge
from la_runtime.drafting.news import PassNews
from la_runtime.drafting.slots import SlotChain, SlotTree
from la_runtime.drafting.successors import RecycledSource, Successors
from la_runtime.drafting.suffix import SuffixSource
from la_runtime.layout import Group
from la_runtime.placement import place_drafts, trim_to_runs
from la_runtime.planner import Planner, StepPlan
from la_runtime.source_names import SourceName

__all__ = ["Drafter", "Source", "make_chain", "make_sources"]


class Source(Protocol):
    """Proposes what may stand behind a sequence's last token. Its state belongs to the sequence."""

    def learn(self, news: PassNews) -> None:
        """Hear of a pass."""
        ...

    def propose(self) -> Candidates:
        """What may follow the last token heard of."""
        ...


def make_chain() -> dict[SourceName, Source]:
    """The slots alone, one draft behind the other."""
    return {SourceName.LOOKAHEAD: SlotChain()}


def make_sources(
    names: Sequence[SourceName], *, prompt: Sequence[int], k: int, is_tuned: bool = False
) -> dict[SourceName, Source]:
    """Sources by name, for a sequence that begins with a prompt.

    Args:
        names: which.
        prompt: token ids.
        k: most slots of a group; without any the slots propose nothing.
        is_tuned: whether the lookaheads were taught.
    """
    made: dict[SourceName, Source] = {}
    root = (prompt[max(-2, -len(prompt))], prompt[-1])
    successors = Successors()
    # In the order of the names: slots judge what they proposed by the lists of before a pass.
    for name in SourceName:
        if name not in names:
            continue
        match name:
            case SourceName.LOOKAHEAD:
                made[name] = SlotTree(k, root, successors, is_tuned=is_tuned)
            case SourceName.SUFFIX:
                made[name] = SuffixSource(prompt)
            case SourceName.RECYCLED:
                made[name] = RecycledSource(root, successors)
    return made


class Drafter:
    """Plans the passes of one sequence.

    Args:
        sources: who proposes.
        planner: what is done with it.
        row_places: of the graph. Where they can be chosen, drafts stand so that none can be told
            from a chain's, and one that cannot stand so is left out. Where they cannot, only the
            likeliest path is verified.
    """

    def __init__(
        self,
        sources: Mapping[SourceName, Source],
        planner: Planner,
        *,
        row_places: RowPlaces = RowPlaces.BEHIND,
    ) -> None:
        self._sources = sources
        self._planner = planner
        self._is_chosen = row_places is RowPlaces.CHOSEN
        self._has_read_slots = False

    @property
    def most_rows(self) -> int:
        """Rows of the widest pass, known tokens before the root aside."""
        return self._planner.most_rows

    def first_groups(self) -> tuple[Group, ...]:
        """The groups of the pass that ends the prompt."""
        return self._planner.first()

    def learn(self, news: PassNews) -> None:
        """Let every source hear of a pass."""
        self._has_read_slots = news.goes_on and bool(news.part.rows.groups)
        for source in self._sources.values():
            source.learn(news)

    def plan(self, *, root_column: int, max_depth: int, batch: int) -> StepPlan:
        """The next pass.

        Args:
            root_column: where the root's key will stand: the number of cached tokens.
            max_depth: of a draft.
            batch: sequences that share the pass.
        """
        if not self._sources:
            return self._planner.plan(NO_RANKING, batch=batch, has_read_slots=False)
        ranked = merge(
            [(name, source.propose()) for name, source in self._sources.items()],
            most=self._planner.most_drafts,
            max_depth=max_depth,
        )
        if not self._is_chosen:
            ranked = ranked.likeliest_path()
        plan = self._planner.plan(ranked, batch=batch, has_read_slots=self._has_read_slots)
        if not plan.drafts.has_branches:
            return plan
        kept = trim_to_runs(plan.drafts, root_column=root_column)
        if len(kept) < len(plan.sources):
            plan = plan.keep(kept)
        return replace(plan, columns=place_drafts(plan.drafts.parents))
