"""Plans as they are built, in plain lines: they are built where there may be no rich.

Also what was built, as a table for people and as a record for programs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

import click

from la_export.plan import PlanReport, PlansReport
from la_runtime.contract import Axis
from la_runtime.plans import PlanProfile

__all__ = ["PlanLines", "plans_record", "print_plans"]

_CLEAR_LINE: Final = "\r\x1b[K"
_TITLES: Final = ("plan", "size", "seconds", "fused attentions", "profiles")


class PlanLines:
    """Progress on stderr: a line a plan; in a terminal, the running phase is shown too.

    Args:
        quiet: write nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._is_quiet = quiet
        self._is_live = not quiet and sys.stderr.isatty()
        self._path = ""

    def __enter__(self) -> PlanLines:
        return self

    def __exit__(self, *_: object) -> None:
        self._hide()

    def note(self, text: str) -> None:
        """See `PlanProgress.note`."""
        self._line(f"note: {text}")

    def start_plan(self, path: str) -> None:
        """See `PlanProgress.start_plan`."""
        self._path = path
        self._show("reading the graph")

    def advance(self, phase: str, step: int, num_steps: int) -> None:
        """See `PlanProgress.advance`."""
        self._show(f"{phase} {step}/{num_steps}")

    def finish_plan(self, plan: PlanReport) -> None:
        """See `PlanProgress.finish_plan`."""
        self._line(f"  {plan.facts.path}   {plan.compiled.seconds:6.1f} s")

    def _line(self, text: str) -> None:
        self._hide()
        if not self._is_quiet:
            click.echo(text, err=True)

    def _show(self, text: str) -> None:
        if self._is_live:
            sys.stderr.write(f"{_CLEAR_LINE}  {self._path}   {text}")
            sys.stderr.flush()

    def _hide(self) -> None:
        if self._is_live:
            sys.stderr.write(_CLEAR_LINE)


def print_plans(report: PlansReport) -> None:
    """Print a table of plans to stderr, and what was skipped."""
    rows = [_TITLES, *(_row(plan) for plan in report.plans)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip(), err=True)
    for line in report.skipped:
        click.echo(f"note: skipped: {line}", err=True)


def _row(plan: PlanReport) -> tuple[str, ...]:
    compiled = plan.compiled
    fused = compiled.fused_attentions
    return (
        plan.facts.path,
        f"{compiled.bytes / 1e6:.1f} MB",
        f"{compiled.seconds:.1f}",
        "unknown" if fused is None else f"{fused} of {compiled.num_attentions}",
        ", ".join(_describe_profiles(plan.facts.profiles)),
    )


def _describe_profiles(profiles: tuple[PlanProfile, ...]) -> Iterator[str]:
    for profile in profiles:
        block = profile.axes[Axis.BLOCK]
        yield f"{profile.name} k={profile.k} {block.least}..{block.most} rows"


def plans_record(report: PlansReport) -> dict[str, Any]:
    """The report as a JSON object."""
    return {
        "skipped": list(report.skipped),
        "plans": [
            {
                **plan.facts.model_dump(mode="json"),
                "bytes": plan.compiled.bytes,
                "seconds": round(plan.compiled.seconds, 3),
                "attentions": plan.compiled.num_attentions,
                "fused_attentions": plan.compiled.fused_attentions,
                "layers": None if plan.compiled.layers is None else plan.compiled.layers.num_layers,
            }
            for plan in report.plans
        ],
    }
