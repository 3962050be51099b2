"""What became better or worse between two runs.

Times of different runs do not compare: a machine is faster or slower by the minute. So only ratios
within a run are judged, and counts of tokens; other figures stand beside them. A judged figure has
regressed if it is worse by more than the tolerance and no interval says that this may be noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from la_export.bench.report.tables import NOTHING, Table
from la_export.bench.speed.record import BundleRun, DecodeRun, Settings, SpeedRecord

__all__ = [
    "DEFAULT_TOLERANCE",
    "Change",
    "Comparison",
    "Direction",
    "Figure",
    "Kind",
    "Verdict",
    "compare",
]

DEFAULT_TOLERANCE: Final = 0.1
_DIGITS: Final = 3
_MEGABYTE: Final = 1e6


class Direction(StrEnum):
    """Which way is better."""

    HIGHER = "higher"
    LOWER = "lower"


class Verdict(StrEnum):
    """What became of a figure.

    ``regressed``, ``improved``: by more than the tolerance, and more than its intervals explain.
    ``within noise``: by more than the tolerance, but the intervals of both runs overlap.
    ``steady``: within the tolerance.
    ``not judged``: shown only.
    """

    REGRESSED = "regressed"
    IMPROVED = "improved"
    NOISE = "within noise"
    STEADY = "steady"
    NOT_JUDGED = "not judged"


class Kind(StrEnum):
    """What a figure is made of.

    ``steps``: times of steps, as ratios within the run.
    ``decoding``: tokens of the prompts, and ratios of speeds within the run.
    ``absolute``: times, rates and sizes as they were; never judged.
    """

    STEPS = "steps"
    DECODING = "decoding"
    ABSOLUTE = "absolute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of a run; `low` and `high` are None where it has no interval."""

    value: float
    direction: Direction
    kind: Kind
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A figure that both runs have."""

    name: str
    old: Figure
    new: Figure
    verdict: Verdict

    @property
    def relative(self) -> float | None:
        """By how much it is higher: 0.1 for ten percent; None if it was 0."""
        return self.new.value / self.old.value - 1 if self.old.value else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs side by side.

    Args:
        changes: of figures that both have.
        missing: names of figures that the old run has and the new one lacks.
        added: names of figures that only the new run has.
        notes: why figures that could be judged are not.
    """

    changes: tuple[Change, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def regressed(self) -> tuple[Change, ...]:
        """The figures that make a comparison fail."""
        return tuple(change for change in self.changes if change.verdict is Verdict.REGRESSED)

    def table(self) -> Table:
        """What changed; the judged figures first, the steady ones last among them."""
        order = list(Verdict)
        ranked = sorted(self.changes, key=lambda change: order.index(change.verdict))
        notes = list(self.notes)
        for what, names in (("missing now", self.missing), ("new", self.added)):
            if names:
                notes.append(f"{what}: {', '.join(names)}")
        return Table(
            title="Compared with the older run",
            note="; ".join(notes),
            columns=("figure", "better is", "old", "new", "change", "verdict"),
            rows=tuple(
                (
                    *(change.name, change.new.direction.value),
                    *(_show(change.old), _show(change.new)),
                    NOTHING if change.relative is None else f"{change.relative:+.1%}",
                    change.verdict.value,
                )
                for change in ranked
            ),
        )


def _show(figure: Figure) -> str:
    value = f"{figure.value:,.{_DIGITS}f}"
    if figure.low is None or figure.high is None:
        return value
    return f"{value} ({figure.low:,.{_DIGITS}f}–{figure.high:,.{_DIGITS}f})"


def compare(
    old: SpeedRecord, new: SpeedRecord, *, tolerance: float = DEFAULT_TOLERANCE
) -> Comparison:
    """Compare figures of the same name.

    Args:
        old: the run to compare with.
        new: the run that is judged.
        tolerance: by how much a judged figure may be worse; 0.1 for ten percent.
    """
    notes = _find_obstacles(old.settings, new.settings)
    before, after = dict(_figures(old)), dict(_figures(new))
    return Comparison(
        changes=tuple(
            Change(
                name=name,
                old=before[name],
                new=figure,
                verdict=(
                    Verdict.NOT_JUDGED
                    if figure.kind is Kind.ABSOLUTE or figure.kind in notes
                    else _judge(before[name], figure, tolerance)
                ),
            )
            for name, figure in after.items()
            if name in before
        ),
        missing=tuple(name for name in before if name not in after),
        added=tuple(name for name in after if name not in before),
        notes=tuple(dict.fromkeys(notes.values())),
    )


def _find_obstacles(old: Settings, new: Settings) -> dict[Kind, str]:
    """Why figures of a kind are those of something else in the other run."""
    if old.threads != new.threads:
        note = f"nothing is judged: {old.threads} threads then, {new.threads} now"
        return dict.fromkeys((Kind.STEPS, Kind.DECODING), note)
    for field, meaning in (("prompts_sha256", "prompts"), ("new_tokens", "lengths of answers")):
        if getattr(old, field) != getattr(new, field):
            return {Kind.DECODING: f"decoding is not judged: the runs had different {meaning}"}
    return {}


def _figures(record: SpeedRecord) -> Iterator[tuple[str, Figure]]:
    """Every figure that is compared, with its name."""
    for bundle in record.bundles:
        ratios = _step_ratios(bundle)
        for rows, ratio in ratios.items():
            yield f"{bundle.name}: L({rows})/L(1)", ratio
        for run in bundle.decoding:
            for name, figure in _decoding_figures(run, ratios):
                yield f"{bundle.name}, {run.name}: {name}", figure
        for name, figure in _absolute_figures(bundle):
            yield f"{bundle.name}: {name}", figure


def _step_ratios(bundle: BundleRun) -> dict[int, Figure]:
    """L(T)/L(1) with all rows scored, by T; its ends are those of quartiles."""
    times = {p.rows: p.time for p in bundle.step_times if p.scored_rows == p.rows}
    first = times.pop(1, None)
    if first is None:
        return {}
    return {
        rows: Figure(
            value=time.median_ms / first.median_ms,
            low=time.low_ms / first.high_ms,
            high=time.high_ms / first.low_ms,
            direction=Direction.LOWER,
            kind=Kind.STEPS,
        )
        for rows, time in times.items()
    }


def _decoding_figures(run: DecodeRun, ratios: Mapping[int, Figure]) -> Iterator[tuple[str, Figure]]:
    overall = run.overall
    if overall.speedup is not None:
        yield (
            "speedup",
            Figure(
                value=overall.speedup.value,
                low=overall.speedup.low,
                high=overall.speedup.high,
                direction=Direction.HIGHER,
                kind=Kind.DECODING,
            ),
        )
    if run.k == 0:
        return
    if overall.tokens_per_pass is not None:
        yield "tokens per pass", _higher(overall.tokens_per_pass, Kind.DECODING)
    if overall.yielded is not None and overall.rows_per_pass is not None:
        yield "yield", _yield(overall.yielded, overall.rows_per_pass, ratios)


def _yield(value: float, rows_per_pass: float, ratios: Mapping[int, Figure]) -> Figure:
    """Tokens per pass over L(T)/L(1): as unsure as that is at the nearest T."""
    figure = _higher(value, Kind.DECODING)
    if not ratios:
        return figure
    ratio = ratios[min(ratios, key=lambda rows: abs(rows - rows_per_pass))]
    assert ratio.low is not None, "ratios of times have ends"
    assert ratio.high is not None, "ratios of times have ends"
    return replace(
        figure, low=value * ratio.value / ratio.high, high=value * ratio.value / ratio.low
    )


def _absolute_figures(bundle: BundleRun) -> Iterator[tuple[str, Figure]]:
    for point in bundle.step_times:
        if point.rows == 1:
            yield "L(1), ms", _lower(point.time.median_ms)
    for run in bundle.decoding:
        overall = run.overall
        if overall.decode_tokens_per_s is not None:
            rate = _higher(overall.decode_tokens_per_s, Kind.ABSOLUTE)
            yield f"{run.name}, decode tokens/s", rate
        if overall.ttft_s is not None:
            yield f"{run.name}, first token, s", _lower(overall.ttft_s)
    if bundle.memory is not None:
        yield "PSS, MB", _lower(bundle.memory.pss_bytes / _MEGABYTE)


def _higher(value: float, kind: Kind) -> Figure:
    return Figure(value=value, direction=Direction.HIGHER, kind=kind)


def _lower(value: float) -> Figure:
    return Figure(value=value, direction=Direction.LOWER, kind=Kind.ABSOLUTE)


def _judge(old: Figure, new: Figure, tolerance: float) -> Verdict:
    change = new.value - old.value
    if abs(change) <= tolerance * old.value:
        return Verdict.STEADY
    if _overlap(old, new):
        return Verdict.NOISE
    is_better = (change > 0) is (new.direction is Direction.HIGHER)
    return Verdict.IMPROVED if is_better else Verdict.REGRESSED


def _overlap(old: Figure, new: Figure) -> bool:
    """Whether both have an interval and these meet."""
    if old.low is None or old.high is None or new.low is None or new.high is None:
        return False
    return old.low <= new.high and new.low <= old.high
