"""What the charts of a run show. Values only: nothing here knows how they are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Final, TypeAlias

from la_export.bench.speed.record import (
    OVERALL,
    AnswerFigures,
    BundleRun,
    DecodeRun,
    Interval,
    PeerMode,
    PeerRun,
    Selection,
    SpeedFigures,
    SpeedRecord,
    StepPoint,
    Timing,
)

__all__ = [
    "BarChart",
    "Bars",
    "Chart",
    "Estimate",
    "Line",
    "LineChart",
    "LineKind",
    "Point",
    "Scale",
    "fastest_lossless",
    "make_charts",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure and how far it may be off; the ends are the figure itself where that is unknown."""

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Estimate:
        """A figure without an interval."""
        return cls(value=value, low=value, high=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """An estimate over a place on the horizontal axis."""

    x: float
    y: Estimate


class LineKind(StrEnum):
    """``measured``: points joined. ``bound``: what a measured line cannot get past."""

    MEASURED = "measured"
    BOUND = "bound"


class Scale(StrEnum):
    """Of a vertical axis."""

    LINEAR = "linear"
    LOG = "log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line; lines of the same `color` number share a colour."""

    label: str
    kind: LineKind
    color: int
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Lines over numbers; `name` is for files."""

    name: str
    title: str
    x_label: str
    y_label: str
    scale: Scale
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """One bar for each group of a chart; None where there is no figure."""

    label: str
    values: tuple[Estimate | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """Groups of bars; `reference` is a value that all are to be compared with."""

    name: str
    title: str
    y_label: str
    groups: tuple[str, ...]
    bars: tuple[Bars, ...]
    reference: float | None = None


Chart: TypeAlias = LineChart | BarChart

_NO_SPEEDUP: Final = 1.0


def make_charts(record: SpeedRecord) -> tuple[Chart, ...]:
    """Every chart of which the run measured something."""
    charts: Iterator[Chart] = chain(
        _speedups(record),
        _step_times(record),
        _acceptance(record),
        *(_growth(bundle) for bundle in record.bundles),
        _programs(record),
    )
    return tuple(charts)


def fastest_lossless(bundle: BundleRun) -> DecodeRun | None:
    """The lossless way with lookaheads that decoded all prompts the fastest."""
    runs = [run for run in bundle.decoding if run.k > 0 and run.lossless]
    return max(runs, key=lambda run: run.overall.decode_tokens_per_s or 0.0, default=None)


def _of(interval: Interval | None) -> Estimate | None:
    if interval is None:
        return None
    return Estimate(value=interval.value, low=interval.low, high=interval.high)


def _timed(timing: Timing) -> Estimate:
    return Estimate(value=timing.median_ms, low=timing.low_ms, high=timing.high_ms)


def _speedups(record: SpeedRecord) -> Iterator[BarChart]:
    """Of the fastest way of each bundle, by category."""
    fastest = [(bundle, run) for bundle in record.bundles if (run := fastest_lossless(bundle))]
    names = dict.fromkeys(entry.category for _, run in fastest for entry in run.answers)
    groups = (*(name for name in names if name != OVERALL), OVERALL)
    bars = []
    for bundle, run in fastest:
        known: dict[str, AnswerFigures] = {entry.category: entry for entry in run.answers}
        found = [known.get(group) for group in groups]
        values = tuple(None if entry is None else _of(entry.speedup) for entry in found)
        bars.append(Bars(label=f"{bundle.name}, {run.name}", values=values))
    if any(value for entry in bars for value in entry.values):
        yield BarChart(
            name="speedup",
            title="Decoding speed over plain decoding, 95 % interval",
            y_label="times plain",
            groups=groups,
            bars=tuple(bars),
            reference=_NO_SPEEDUP,
        )


def _step_times(record: SpeedRecord) -> Iterator[LineChart]:
    """L(T) with all rows scored, and its ceilings."""
    lines = []
    for color, bundle in enumerate(record.bundles):
        points = [p for p in bundle.step_times if p.scored_rows == p.rows]
        measured = tuple(Point(x=p.rows, y=_timed(p.time)) for p in points)
        bounds = tuple(
            Point(x=p.rows, y=Estimate.exact(bound))
            for p in points
            if (bound := _least_ms(p)) is not None
        )
        for label, kind, drawn in (
            (bundle.name, LineKind.MEASURED, measured),
            (f"{bundle.name}, least", LineKind.BOUND, bounds),
        ):
            if drawn:
                lines.append(Line(label=label, kind=kind, color=color, points=drawn))
    if lines:
        yield LineChart(
            name="step-times",
            title="L(T): time of an exact step of T rows",
            x_label="rows of the step, T",
            y_label="milliseconds",
            scale=Scale.LINEAR,
            lines=tuple(lines),
        )


def _least_ms(point: StepPoint) -> float | None:
    """What reading the weights or the operations take at the machine's rates."""
    known = [ms for ms in (point.weights_ms, point.operations_ms) if ms is not None]
    return max(known, default=None)


def _acceptance(record: SpeedRecord) -> Iterator[LineChart]:
    """Of the longest exact chains of each bundle."""
    lines = []
    for color, bundle in enumerate(record.bundles):
        exact = [run for run in bundle.decoding if run.selection is Selection.EXACT]
        run = max(exact, key=lambda run: run.k, default=None)
        tested = [] if run is None else [p for p in run.overall.accepted if p.drafted]
        if run is not None and tested:
            points = tuple(Point(x=p.position, y=Estimate.exact(p.share)) for p in tested)
            label = f"{bundle.name}, {run.name}"
            lines.append(Line(label=label, kind=LineKind.MEASURED, color=color, points=points))
    if lines:
        yield LineChart(
            name="acceptance",
            title="Drafts accepted, by position behind the bonus token",
            x_label="position",
            y_label="share of the drafts tested",
            scale=Scale.LINEAR,
            lines=tuple(lines),
        )


def _growth(bundle: BundleRun) -> Iterator[LineChart]:
    """L(T) behind more and more tokens, a line for each batch size and T."""
    lines = []
    kinds = dict.fromkeys((point.batch, point.rows) for point in bundle.growth)
    for color, (batch, rows) in enumerate(kinds):
        points = tuple(
            Point(x=p.past, y=_timed(p.time))
            for p in bundle.growth
            if (p.batch, p.rows) == (batch, rows) and p.time is not None
        )
        if points:
            label = f"batch {batch}, T = {rows}"
            lines.append(Line(label=label, kind=LineKind.MEASURED, color=color, points=points))
    if lines:
        yield LineChart(
            name=f"growth-{bundle.name}",
            title=f"{bundle.name}: time of a step as the cache grows",
            x_label="tokens in the cache",
            y_label="milliseconds",
            scale=Scale.LOG,
            lines=tuple(lines),
        )


def _programs(record: SpeedRecord) -> Iterator[BarChart]:
    """Decode tokens a second of bundles and peers, plainly and in the fastest lossless way."""
    groups: dict[str, dict[PeerMode, float]] = {}
    for bundle in record.bundles:
        plain = next((run for run in bundle.decoding if run.selection is Selection.PLAIN), None)
        for mode, run in ((PeerMode.PLAIN, plain), (PeerMode.BEST, fastest_lossless(bundle))):
            if run is not None and run.overall.decode_tokens_per_s is not None:
                groups.setdefault(bundle.name, {})[mode] = run.overall.decode_tokens_per_s
    for peer in record.peers:
        overall = _overall(peer)
        if overall is not None and overall.decode_tokens_per_s is not None:
            rates = groups.setdefault(f"{peer.name} {peer.precision}", {})
            rates[peer.mode] = overall.decode_tokens_per_s
    if groups:
        yield BarChart(
            name="programs",
            title="Decoding speed over all prompts",
            y_label="tokens a second",
            groups=tuple(groups),
            bars=tuple(
                Bars(label=label, values=tuple(_rate(rates, mode) for rates in groups.values()))
                for mode, label in ((PeerMode.PLAIN, "plain"), (PeerMode.BEST, "its fastest way"))
            ),
        )


def _rate(rates: dict[PeerMode, float], mode: PeerMode) -> Estimate | None:
    return Estimate.exact(rates[mode]) if mode in rates else None


def _overall(peer: PeerRun) -> SpeedFigures | None:
    return next((figures for figures in peer.figures if figures.category == OVERALL), None)
