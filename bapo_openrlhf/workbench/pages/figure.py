"""A figure: a chart with the words and numbers that explain it, drawn as SVG or PNG."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import altair as alt
import vl_convert
from markupsafe import Markup, escape

from bapo_openrlhf.workbench.pages.charts import Curve, Key, curves_in_words, curves_table
from bapo_openrlhf.workbench.pages.colours import GRID, INK, MUTED, css, without_variables
from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.pages.text import clean

NARROW, WIDE = (330, 235), (700, 245)  # pixels that a chart is laid out for; the page scales it a little
FONT = "text { font-family: Helvetica, Arial, sans-serif; }"  # as wide as the one that a chart is laid out with
PIXELS = 1.5  # pixels of a PNG file for each pixel of the layout

AnyChart = alt.Chart | alt.LayerChart | alt.HConcatChart | alt.VConcatChart | alt.FacetChart
LETTERS = {"labelFontSize": 12, "titleFontSize": 12}
AXIS = {**dict.fromkeys(("labelColor", "titleColor", "domainColor", "tickColor"), MUTED), "gridColor": GRID}
THEME: dict[str, Any] = {
    "aria": False,  # the page describes the chart in words
    "background": None,
    "font": "sans-serif",
    "view": {"stroke": None},
    "title": {"color": INK, "subtitleColor": MUTED},
    "header": {"labelColor": INK, "titleColor": INK, "labelFontSize": 13, "labelFontWeight": "bold"},
    "axis": {**AXIS, **LETTERS, "titleFontWeight": "normal"},
    "legend": {**LETTERS, "labelColor": INK, "titleColor": INK, "labelLimit": 400},
}


@dataclass(frozen=True)
class Figure:
    """A figure of a page."""

    title: str
    sentence: str  # what it shows
    chart: AnyChart | None = None  # without a size; None if there is nothing to draw
    summary: str = ""  # the numbers in words, for readers who do not see the picture
    table: Table | None = None
    paper: str = ""  # the figure of the paper that corresponds to it
    run: str = ""  # the run that it shows; empty if it shows all
    keys: Sequence[Key] = ()  # the legend, which the page shows above the chart
    wide: bool = False  # more room than other figures
    height: int = 0  # in pixels; 0 for the usual one

    def with_curves(self, curves: Sequence[Curve], chart: AnyChart, x: str, **more: Any) -> Self:
        """This figure with a chart of curves, and with their legend, words and numbers unless `more` has others."""
        of_curves = {
            "keys": [curve.key for curve in curves],
            "summary": curves_in_words(curves),
            "table": curves_table(curves, x),
        }
        return replace(self, **{"chart": chart, **of_curves, **more})


def drawings_of(figure: Figure) -> list[Markup]:
    """The figure as SVG. A wide figure has a narrow and a wide drawing, and the page shows one of them."""
    spec = specification(figure.chart)
    sizes = {"narrow": NARROW, "wide": WIDE} if figure.wide else {"": NARROW}
    label = escape(clean(f"{figure.title}. {figure.summary}"))
    return [_drawing(spec, width, figure.height or height, name, label) for name, (width, height) in sizes.items()]


def specification(chart: AnyChart) -> dict[str, Any]:
    """The chart in Vega-Lite, in the theme of the pages."""
    with alt.data_transformers.enable("default", max_rows=None):
        return {**chart.to_dict(), "config": THEME}


def _drawing(spec: dict[str, Any], width: int, height: int, name: str, label: str) -> Markup:
    sized = {**spec, "width": width, "height": height, "autosize": {"type": "fit", "contains": "padding"}}
    svg = vl_convert.vegalite_to_svg(sized)
    inside = re.sub(r"^.*?<svg[^>]*>", "", svg, count=1, flags=re.S)
    inside = re.sub(r' (role|aria-[a-z]+)="[^"]*"', "", inside)  # of the marks: the label and the table say it
    return Markup(f'<svg class="{name}" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{inside}')


def swatch(key: Key) -> Markup:
    if key.shape == "area":
        inside = f'<rect width="22" height="12" rx="2" fill="{key.colour}"/>'
    else:
        inside = f'<path d="M0 6h22" stroke="{key.colour}" stroke-width="3" stroke-dasharray="{key.dash}"/>'
    return Markup(f'<svg class="swatch" width="22" height="12" aria-hidden="true">{inside}</svg>')


def save_svg(chart: AnyChart, path: Path) -> None:
    """Write a chart, which has a size, to an SVG file with a background, in the reader's theme, light or dark."""
    svg = vl_convert.vegalite_to_svg(
        {"padding": {"left": 28, "right": 20, "top": 16, "bottom": 16}, **specification(chart)}
    )
    style = f'<style>{css()}{FONT}</style><rect width="100%" height="100%" fill="var(--paper)"/>'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        re.sub(r"^(.*?<svg[^>]*>)", lambda match: match[1] + style, svg, count=1, flags=re.S), encoding="utf-8"
    )


def save_png(chart: AnyChart, path: Path) -> None:
    """Write a chart, which has a size, to a PNG file in the colours of the light theme."""
    spec = json.loads(without_variables(json.dumps(specification(chart)))) | {"background": "white"}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(vl_convert.vegalite_to_png(spec, scale=PIXELS))
