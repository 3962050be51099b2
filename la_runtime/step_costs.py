"""How long a pass takes by its rows, for whoever chooses how many it has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from la_runtime.block import block_width

__all__ = ["ASSUMED_COSTS", "StepCosts"]

# Choosing drafts, and making a block that no earlier pass had, beside a pass of SmolLM2-135M.
_DRAFTING_MS: Final = 0.4


class StepCosts:
    """Time of a pass by its rows.

    Between two numbers of rows that were measured it is taken from the line through them, behind
    the last from the line through the last two. A pass of more rows never counts as cheaper.

    Args:
        points: numbers of rows and the time of each at batch 1, ascending, in any unit.
        widths: block widths that passes are padded to; empty where they are not.
        drafting: what drafting takes beside a pass that has drafts or slots, in the same unit.
        slots: what a pass takes longer for having slots among its rows, however many: their
            adapter is read for them alone.
    """

    def __init__(
        self,
        points: Sequence[tuple[int, float]],
        *,
        widths: tuple[int, ...] = (),
        drafting: float = 0.0,
        slots: float = 0.0,
    ) -> None:
        assert points, "costs are measured somewhere"
        least = accumulate((cost for _, cost in points), max)
        self._points = [(rows, cost) for (rows, _), cost in zip(points, least, strict=True)]
        self._widths = widths
        self._drafting = drafting
        self._slots = slots
        self._known: dict[tuple[int, int], float] = {}

    @classmethod
    def measured(
        cls, times: Sequence[tuple[int, float]], *, widths: tuple[int, ...], slots_ms: float = 0.0
    ) -> StepCosts:
        """Of measured passes.

        Args:
            times: numbers of rows, ascending, and milliseconds.
            widths: see above.
            slots_ms: what slots take beside that.
        """
        return cls(times, widths=widths, drafting=_DRAFTING_MS, slots=slots_ms)

    def __call__(self, num_rows: int, batch: int = 1, *, has_slots: bool = False) -> float:
        """Time of a pass of so many rows per sequence.

        Args:
            num_rows: of each sequence; one is a plain pass.
            batch: sequences. Rows of a batch count as so many rows of one sequence.
            has_slots: whether some of the rows are lookaheads.
        """
        return self._of_rows(num_rows, batch) + self._slots * has_slots

    def _of_rows(self, num_rows: int, batch: int) -> float:
        found = self._known.get((num_rows, batch))
        if found is None:
            found = self._line(batch * block_width(num_rows, self._widths))
            found += self._drafting * (num_rows > 1)
            self._known[num_rows, batch] = found
        return found

    def _line(self, num_rows: int) -> float:
        points = self._points
        if len(points) == 1 or num_rows <= points[0][0]:
            return points[0][1]
        end = next((i for i, (rows, _) in enumerate(points) if rows >= num_rows), len(points) - 1)
        (low, before), (high, after) = points[end - 1], points[end]
        return before + (after - before) * (num_rows - low) / (high - low)


ASSUMED_COSTS: Final = StepCosts([(1, 1.0), (9, 1.5), (17, 2.0), (33, 3.0)])
"""Of a bundle that was never measured: a pass of 17 rows takes as long as two of one."""
