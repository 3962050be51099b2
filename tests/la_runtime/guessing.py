"""A source of drafts that guesses, and a decoder that uses it: random trees, random planners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from la_runtime.decoder import Decoder
from la_runtime.drafter import Drafter, Source, make_sources
from la_runtime.drafting.candidates import Candidates
from la_runtime.drafting.news import PassNews
from la_runtime.layout import Layout
from la_runtime.planner import CostPlanner, FixedPlanner, Planner
from la_runtime.sampling import SamplingParams, Select
from la_runtime.source_names import SourceName
from la_runtime.step_costs import StepCosts

__all__ = ["GuessingDecoder", "GuessingSource"]

_VOCAB_SIZE: Final = 320
_MOST_GUESSES: Final = 20
_MOST_ROWS: Final = 24


class GuessingSource:
    """Random tries with chances out of the air; now and then a branch is what will be said.

    Args:
        rng: draws.
        prompt_len: tokens of the prompt.
        future: the prompt and what is said behind it.
    """

    def __init__(self, rng: np.random.Generator, prompt_len: int, future: Sequence[int]) -> None:
        self._rng = rng
        self._num_known = prompt_len
        self._future = future
        self._knowledge = float(rng.choice([0.2, 0.7, 0.95]))

    def learn(self, news: PassNews) -> None:
        """See `Source.learn`."""
        self._num_known += len(news.token_ids)

    def propose(self) -> Candidates:
        """See `Source.propose`."""
        rng, future = self._rng, self._future
        token_ids: list[int] = []
        parents: list[int] = []
        chances: list[float] = []
        places = [self._num_known]  # per node, where its children stand
        is_right = [True]
        taken: set[tuple[int, int]] = set()
        for _ in range(int(rng.integers(_MOST_GUESSES + 1))):
            parent = int(rng.integers(len(places)))
            place = places[parent]
            knows = is_right[parent] and place < len(future) and rng.random() < self._knowledge
            token_id = future[place] if knows else int(rng.integers(_VOCAB_SIZE))
            if (parent, token_id) in taken:
                continue
            taken.add((parent, token_id))
            token_ids.append(token_id)
            parents.append(parent)
            chances.append((chances[parent - 1] if parent else 1.0) * float(rng.random()))
            places.append(place + 1)
            is_right.append(is_right[parent] and place < len(future) and token_id == future[place])
        return Candidates(
            token_ids=tuple(token_ids), parents=tuple(parents), chances=tuple(chances)
        )


class GuessingDecoder(Decoder):
    """A decoder whose requests may have such a source, and a planner drawn by its seed.

    Args:
        guesses: per request, in the order they are made, a seed and what is said; None leaves the
            request as it is.
    """

    def __init__(
        self, *args: Any, guesses: Sequence[tuple[int, Sequence[int]] | None], **rest: Any
    ) -> None:
        super().__init__(*args, **rest)
        self._guesses = list(guesses)

    def _make_drafter(self, prompt: Sequence[int], params: SamplingParams, *, k: int) -> Drafter:
        guess = self._guesses.pop(0)
        if guess is None or params.select is Select.THRESHOLD:
            return super()._make_drafter(prompt, params, k=k)
        seed, future = guess
        rng = np.random.default_rng(seed)
        sources: dict[SourceName, Source] = dict(
            make_sources(params.sources or (), prompt=list(prompt), k=k)
        )
        # Under a name that the planner knows: that of slots, when they are not there.
        name = next(n for n in reversed(SourceName) if n not in sources or n is SourceName.SUFFIX)
        sources[name] = GuessingSource(rng, len(prompt), future)
        row_places = self.backend.contract.row_places
        return Drafter(sources, _draw_planner(rng, k), row_places=row_places)


def _draw_planner(rng: np.random.Generator, k: int) -> Planner:
    if rng.random() < 0.4:
        return FixedPlanner(
            k=k if rng.random() < 0.5 else 0,
            layout=Layout.ROOT_ONLY,
            most_drafts=int(rng.integers(_MOST_ROWS)),
        )
    rows = np.unique(rng.integers(1, 40, size=rng.integers(1, 6))).tolist()
    costs = rng.random(len(rows)) * rng.choice([0.1, 1.0]) + 1.0
    points = list(zip(map(int, rows), map(float, costs), strict=True))
    return CostPlanner(StepCosts(points), k=k, most_rows=int(rng.integers(1, _MOST_ROWS)))
