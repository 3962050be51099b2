"""Steps of a long check: each runs, fails or says why it cannot run, and the rest goes on. Pure.

Owns the time that is left, and what is known after each step. It does not know what steps do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

__all__ = ["Outcome", "Progress", "Status", "Step", "StepError", "run_steps"]

# A child that takes this many times what is usual hangs.
_PATIENCE: Final = 3.0
# Starting an interpreter and its libraries may take most of a minute, whatever the step.
_START_S: Final = 60.0


class Status(StrEnum):
    """``done``; ``failed``: it ran and went wrong; ``not_run``: it could not be run, or not now."""

    DONE = "done"
    FAILED = "failed"
    NOT_RUN = "not_run"


class StepError(Exception):
    """A step went wrong, or could not be run after all.

    Args:
        reason: why.
        found: what it had found until then, if that is worth keeping.
        status: how the step ended.
    """

    def __init__(
        self,
        reason: str,
        found: Mapping[str, Any] | None = None,
        *,
        status: Status = Status.FAILED,
    ) -> None:
        super().__init__(reason)
        self.found = dict(found or {})
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a step ended.

    Args:
        name: of the step.
        status: how.
        why: what went wrong, or why it was not run; empty when it is done.
        seconds: it took.
        found: what it found, a JSON object.
    """

    name: str
    status: Status
    why: str = ""
    seconds: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The outcome as one JSON object."""
        return {
            "name": self.name,
            "status": self.status.value,
            "why": self.why,
            "seconds": round(self.seconds, 1),
            "found": self.found,
        }


@dataclass(slots=True)
class Progress:
    """What is known so far, in the order in which it became known."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def is_done(self, name: str) -> bool:
        """Whether a step has been run and ended well."""
        outcome = self.outcomes.get(name)
        return outcome is not None and outcome.status is Status.DONE

    def found(self, name: str) -> dict[str, Any]:
        """What a step found; nothing if it was not run."""
        outcome = self.outcomes.get(name)
        return {} if outcome is None else outcome.found


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step.

    Args:
        name: unique among the steps.
        needs: steps that must be done before.
        usual_s: about what it takes; it is not begun with less time left.
        run: does it, within a number of seconds, and gives what it found.
        obstacle: why it cannot be run, of what is known; empty when it can.
    """

    name: str
    usual_s: float
    run: Callable[[Progress, float], dict[str, Any]]
    needs: tuple[str, ...] = ()
    obstacle: Callable[[Progress], str] = lambda _: ""


def run_steps(
    steps: Sequence[Step],
    *,
    clock: Callable[[], float],
    deadline: float | None,
    report: Callable[[Progress, Outcome | None, Step], None],
) -> Progress:
    """Run every step that can be run and still fits.

    Args:
        steps: in order.
        clock: seconds, from anywhere.
        deadline: when to have ended, by that clock; None for no limit.
        report: is told before a step (with no outcome) and after it.

    Returns:
        How each ended. An exception of a step is how that step ended.
    """
    progress = Progress()
    for index, step in enumerate(steps):
        began = clock()
        left = None if deadline is None else deadline - began
        why = next(_obstacles(step, progress, left), "")
        if why:
            outcome = Outcome(name=step.name, status=Status.NOT_RUN, why=why)
        else:
            report(progress, None, step)
            limit = _limit(step, progress, left, steps[index + 1 :])
            outcome = _run(step, progress, limit, clock)
        progress.outcomes[step.name] = outcome
        report(progress, outcome, step)
    return progress


def _obstacles(step: Step, progress: Progress, left: float | None) -> Iterator[str]:
    why = step.obstacle(progress)
    if why:
        yield why
    for name in step.needs:
        if not progress.is_done(name):
            before = progress.outcomes.get(name)
            reason = "was not reached" if before is None else before.why
            yield f"it needs {name!r}: {reason}"
    if left is not None and left < step.usual_s:
        yield f"it takes about {step.usual_s:.0f} s, and {max(left, 0.0):.0f} s are left"


def _limit(step: Step, progress: Progress, left: float | None, later: Sequence[Step]) -> float:
    """Seconds that a step may take: beyond what is usual, half of those that later steps need."""
    patience = max(_START_S, _PATIENCE * step.usual_s)
    if left is None:
        return patience
    needed = sum(other.usual_s for other in later if _may_run(other, progress))
    return min(left, max(step.usual_s, min(patience, max(left - needed, left / 2))))


def _may_run(step: Step, progress: Progress) -> bool:
    """Whether nothing that is known yet keeps a step from being run."""
    lacks = (
        name for name in step.needs if name in progress.outcomes and not progress.is_done(name)
    )
    return next(lacks, None) is None and not step.obstacle(progress)


def _run(step: Step, progress: Progress, limit: float, clock: Callable[[], float]) -> Outcome:
    began = clock()
    try:
        found = step.run(progress, limit)
    except StepError as error:
        status, why, found = error.status, str(error), error.found
    except Exception as error:  # noqa: BLE001 - what is timed behind it is worth more than a trace
        status, why, found = Status.FAILED, f"{type(error).__name__}: {error}", {}
    else:
        status, why = Status.DONE, ""
    return Outcome(name=step.name, status=status, why=why, seconds=clock() - began, found=found)
