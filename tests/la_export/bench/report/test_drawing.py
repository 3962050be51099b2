from __future__ import annotations

import re
from functools import cache
from xml.etree import ElementTree

import pytest

from la_export.bench.report.charts import Chart, make_charts
from la_export.bench.report.drawing import INK, PALETTE, draw_png, draw_svg
from tests.la_export.bench.report.records import make_bundle, make_record

CHARTS = make_charts(make_record(make_bundle("a"), make_bundle("b b", growth=())))
CHART_NAMES = [chart.name for chart in CHARTS]

WHITE = "#ffffff"
DARK = "#0d1117"
# What WCAG 2 asks of graphics and large text.
LEAST_CONTRAST = 3.0

_SVG = "{http://www.w3.org/2000/svg}"


@cache
def _draw(chart: Chart) -> str:
    """Drawing takes a while, and most tests only look."""
    return draw_svg(chart)


def _luminance(color: str) -> float:
    channels = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(one: str, other: str) -> float:
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("chart", CHARTS, ids=CHART_NAMES)
def test_svg_is_well_formed_and_holds_the_words_as_text(chart: Chart) -> None:
    root = ElementTree.fromstring(_draw(chart))

    assert root.tag == f"{_SVG}svg"
    words = {"".join(node.itertext()).strip() for node in root.iter(f"{_SVG}text")}
    assert {chart.title, chart.y_label} <= words


@pytest.mark.parametrize("chart", CHARTS, ids=CHART_NAMES)
def test_same_chart_is_the_same_bytes(chart: Chart) -> None:
    assert draw_svg(chart) == _draw(chart)


@pytest.mark.parametrize("chart", CHARTS, ids=CHART_NAMES)
def test_every_colour_can_be_told_from_a_white_page_and_from_a_dark_one(chart: Chart) -> None:
    colors = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", _draw(chart)))

    assert INK in colors
    for color in colors:
        for page in (WHITE, DARK):
            assert _contrast(color, page) >= LEAST_CONTRAST, color


def test_no_colour_of_the_palette_is_lost_on_either_page() -> None:
    faint = [c for c in PALETTE for page in (WHITE, DARK) if _contrast(c, page) < LEAST_CONTRAST]

    assert not faint


def test_svgs_on_one_page_share_no_identifier() -> None:
    found = [name for chart in CHARTS for name in re.findall(r'\bid="([^"]+)"', _draw(chart))]
    text = "".join(map(_draw, CHARTS))

    assert len(found) == len(set(found))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= set(found)


def test_png_is_one_and_the_same() -> None:
    png = draw_png(CHARTS[0])

    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert png == draw_png(CHARTS[0])
