"""A whole contest: who takes part runs alone first, then all of them against each other."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from la_export.bench.peers.entries import Field
from la_export.bench.peers.race import (
    Alone,
    Lap,
    Report,
    measure_alone,
    run_laps,
)
from la_export.bench.peers.task import Task
from la_runtime.errors import LookaheadError, NotRunError

__all__ = ["Settings", "Standing", "hold_contest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a contest is held.

    Args:
        rounds: how often each prompt is put.
        new_tokens: most of an answer.
        minutes: after which no further prompt is begun; None for no limit.
        logs: folder for what programs print.
    """

    rounds: int
    new_tokens: int
    minutes: float | None
    logs: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What was found, by name of the entry; each is in `absent`, or in the others.

    Args:
        field: who was to take part.
        alone: found of each by itself.
        laps: its answers in the race.
        absent: why there are none.
    """

    field: Field
    alone: Mapping[str, Alone]
    laps: Mapping[str, tuple[Lap, ...]]
    absent: Mapping[str, str]


def hold_contest(field: Field, task: Task, settings: Settings, report: Report) -> Standing:
    """Measure everyone.

    Args:
        field: who takes part.
        task: what they are asked.
        settings: how.
        report: told in a line what was done.

    Raises:
        NotRunError: nobody could take part.
    """
    began = time.monotonic()
    alone, absent = _run_alone(field, task, settings, report)
    left = [one for one in field.contestants if one.name in alone]
    if not left:
        reasons = "; ".join(dict.fromkeys(absent.values()))
        raise NotRunError(f"no program could take part: {reasons}")

    def goes_on() -> bool:
        elapsed = time.monotonic() - began
        return settings.minutes is None or elapsed < 60 * settings.minutes

    outcome = run_laps(
        left,
        task.prompts,
        rounds=settings.rounds,
        new_tokens=settings.new_tokens,
        logs=settings.logs,
        goes_on=goes_on,
        report=report,
    )
    absent |= outcome.failed
    return Standing(
        field=field,
        alone=alone,
        laps={
            entry.name: tuple(lap for lap in outcome.laps if lap.contestant == entry.name)
            for entry in field.entries
        },
        absent=absent,
    )


def _run_alone(
    field: Field, task: Task, settings: Settings, report: Report
) -> tuple[dict[str, Alone], dict[str, str]]:
    """Each contestant by itself, and who is absent from there on."""
    found: dict[str, Alone] = {}
    absent = dict(field.absent)
    # Plain mode comes first; the other one has the same weights.
    plain: dict[tuple[str, str], Alone] = {}
    for contestant in field.contestants:
        entry = contestant.entry
        report(f"alone: {entry.name}")
        try:
            one = measure_alone(
                contestant,
                task.longest,
                task.texts,
                new_tokens=settings.new_tokens,
                logs=settings.logs,
            )
        except LookaheadError as error:
            report(f"absent: {error}")
            absent[entry.name] = str(error)
            continue
        first = plain.setdefault((entry.peer, entry.precision), one)
        found[entry.name] = replace(
            one, perplexity_own=first.perplexity_own, perplexity_pages=first.perplexity_pages
        )
    return found, absent
