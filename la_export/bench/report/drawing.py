"""Charts drawn with matplotlib: the only module that knows it.

The same chart gives the same bytes. Ink stands out from a white page and from a dark one alike, so
that an SVG without a background of its own can be read on both.
"""

from __future__ import annotations

import io
import re
from typing import Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter
from matplotlib.typing import RcKeyType

from la_export.bench.report.charts import BarChart, Bars, Chart, LineChart, LineKind, Scale

__all__ = ["INK", "PALETTE", "draw_png", "draw_svg"]

INK: Final = "#797979"
PALETTE: Final = ("#1f77c4", "#d55e00", "#009e73", "#b8589a", "#a07800", "#1787a8")

_MARKERS: Final = "osD^vP"
_INCHES: Final = (8.0, 4.2)
_GROUP_WIDTH: Final = 0.8
_LOG_STEPS: Final = (1.0, 2.0, 5.0)
_PNG_DOTS_PER_INCH: Final = 150
_MOST_LEVEL_LABELS: Final = 5
_STYLE: Final[dict[RcKeyType, object]] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": "medium",
    "font.family": "sans-serif",
    "grid.alpha": 0.25,
    "grid.color": INK,
    "legend.fontsize": "small",
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "svg.fonttype": "none",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
_IDENTIFIER: Final = re.compile(r'(\bid="|href="#|url\(#)')


def draw_svg(chart: Chart) -> str:
    """A chart as an SVG element without background, its identifiers begun with the chart's name."""
    stream = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": chart.name}):
        metadata = {"Date": None, "Creator": None, "Title": chart.title}
        _draw(chart).savefig(stream, format="svg", transparent=True, metadata=metadata)
    text = stream.getvalue()
    element = text[text.index("<svg") :]
    return _IDENTIFIER.sub(lambda match: f"{match[1]}{_as_identifier(chart.name)}-", element)


def draw_png(chart: Chart) -> bytes:
    """A chart as a PNG on white."""
    stream = io.BytesIO()
    with mpl.rc_context(_STYLE):
        _draw(chart).savefig(
            stream, format="png", dpi=_PNG_DOTS_PER_INCH, metadata={"Software": None}
        )
    return stream.getvalue()


def _as_identifier(name: str) -> str:
    return re.sub(r"[^\w-]", "_", name)


def _draw(chart: Chart) -> Figure:
    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(chart.title, loc="left")
    axes.set_ylabel(chart.y_label)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    if isinstance(chart, LineChart):
        _draw_lines(axes, chart)
    else:
        _draw_bars(axes, chart)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _draw_lines(axes: Axes, chart: LineChart) -> None:
    axes.set_xlabel(chart.x_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if chart.scale is Scale.LOG:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=_LOG_STEPS))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    for line in chart.lines:
        color = _color(line.color)
        places = [point.x for point in line.points]
        values = [point.y.value for point in line.points]
        if line.kind is LineKind.BOUND:
            axes.plot(places, values, color=color, linestyle="--", label=line.label)
            continue
        marker = _MARKERS[line.color % len(_MARKERS)]
        axes.plot(places, values, color=color, marker=marker, markersize=4, label=line.label)
        low, high = ([getattr(point.y, end) for point in line.points] for end in ("low", "high"))
        axes.fill_between(places, low, high, color=color, alpha=0.2, linewidth=0)
    if chart.scale is Scale.LINEAR:
        axes.set_ylim(bottom=0)


def _draw_bars(axes: Axes, chart: BarChart) -> None:
    width = _GROUP_WIDTH / len(chart.bars)
    for place, bars in enumerate(chart.bars):
        offset = (place - (len(chart.bars) - 1) / 2) * width
        _draw_series(axes, bars, color=_color(place), offset=offset, width=width)
    if chart.reference is not None:
        axes.axhline(chart.reference, color=INK, linestyle="--", linewidth=1)
    axes.set_xlim(-_GROUP_WIDTH, len(chart.groups) - 1 + _GROUP_WIDTH)
    rotation = 0 if len(chart.groups) <= _MOST_LEVEL_LABELS else 30
    alignment = "right" if rotation else "center"
    axes.set_xticks(range(len(chart.groups)), chart.groups, rotation=rotation, ha=alignment)


def _draw_series(axes: Axes, bars: Bars, *, color: str, offset: float, width: float) -> None:
    known = [(group, value) for group, value in enumerate(bars.values) if value is not None]
    places = [group + offset for group, _ in known]
    heights = np.array([value.value for _, value in known])
    axes.bar(places, heights, width, color=color, label=bars.label)
    ends = np.array([[value.low, value.high] for _, value in known]).reshape(-1, 2)
    if (ends != heights[:, None]).any():
        reach = np.abs(ends - heights[:, None]).T
        axes.errorbar(places, heights, yerr=reach, fmt="none", ecolor=INK, capsize=2)


def _color(number: int) -> str:
    return PALETTE[number % len(PALETTE)]
