"""Curves, and the charts of the pages, in Altair: lines, stacked areas, bars, a matrix, and values with intervals.

A curve is values of y with x as their index. A chart has no size and no legend, because the page gives it both. It
gets numbers and words of this package. Names of runs, which anybody may have written, stay in `Key` and `Table`, which
the page escapes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from bapo_openrlhf.workbench.pages.colours import GRID, INK
from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.pages.text import number, smoothing_width

FEW = 12  # points of a curve that are marked one by one
MAX_LABELLED = 17  # bins of a matrix whose cells have room for a number
STEP = "trainer step"  # the title of an axis of steps

Domain = tuple[float, float]


# ── curves ──


@dataclass(frozen=True)
class Key:
    """An entry of a legend, which names a line or an area. `dash` is SVG's stroke-dasharray; "" makes a solid line."""

    name: str
    colour: str
    dash: str = ""
    shape: str = "line"


@dataclass(frozen=True)
class Curve:
    """One line of a chart: y by x in ascending order."""

    key: Key
    values: pd.Series
    faint: bool = False  # thin and pale
    band: pd.DataFrame | None = None  # the ends of an area around the line, in the columns low and high, by x


def curves_in_words(curves: Sequence[Curve], x_name: str = "step") -> str:
    """The beginning, the end and the extremes of each curve."""
    parts = []
    for values, name in ((curve.values, curve.key.name) for curve in curves if len(curve.values) and not curve.faint):
        first, last = (f"{number(values.iloc[place])} at {x_name} {number(values.index[place])}" for place in (0, -1))
        parts.append(f"{name}: {first}, {last}; between {number(values.min())} and {number(values.max())}")
    return ". ".join(parts) + "." if parts else "Nothing to show."


def curves_table(curves: Sequence[Curve], x: str) -> Table:
    """What is drawn: a row for each x, a column for each curve."""
    columns = [curve.values[~curve.values.index.duplicated(keep="last")] for curve in curves]
    frame = pd.concat(columns, axis=1, sort=True).reset_index()
    frame.columns = pd.Index([x, *(curve.key.name for curve in curves)], dtype=object)
    return Table(frame)


# ── thinner and smoother ──


def bin_width(last_step: int, most: int) -> int:
    """How many steps one drawn point stands for, so that at most `most` points are drawn."""
    return max(1, math.ceil(last_step / most))


def binned(values: pd.Series, width: int, *, peaks: bool = False) -> pd.Series:
    """A point at the middle of each `width` steps that have values: their mean, or with `peaks` the largest."""
    if width == 1:
        return values
    bins = values.groupby((values.index.astype(int) - 1) // width)
    of_bins = bins.max() if peaks else bins.mean()
    return of_bins.set_axis(of_bins.index * width + (width + 1) / 2)


def smoothed(values: pd.Series) -> pd.Series:
    """Centred moving average over `smoothing_width` points; at the ends over those that exist."""
    return values.rolling(smoothing_width(len(values)), center=True, min_periods=1).mean()


# ── lines and areas ──


def lines(
    curves: Sequence[Curve], *, x: str, y: str, x_domain: Domain, y_domain: Domain | None = None, zero: bool = False
) -> alt.LayerChart:
    """Lines over a common axis, with their bands. `x` and `y` are titles with units; with `zero`, y starts at 0."""
    parts = [
        pd.DataFrame({"x": curve.values.index, "y": curve.values.to_numpy(), "curve": str(place), "faint": curve.faint})
        for place, curve in enumerate(curves)
    ]
    data = pd.concat(parts, ignore_index=True)
    y_limits = {} if y_domain is None else {"domain": list(y_domain)}
    places = {
        "x": _x(x, alt.Scale(domain=list(x_domain), nice=False)),
        "y": alt.Y("y:Q", scale=alt.Scale(zero=zero, nice=True, **y_limits), axis=_y_axis(y)),
    }
    names = [str(place) for place in range(len(curves))]
    dashes = alt.Scale(domain=names, range=[_dash(curve.key) for curve in curves])
    base = alt.Chart(data).encode(**places, color=_colour("curve:N", names, [curve.key.colour for curve in curves]))
    dashed = base.encode(strokeDash=alt.StrokeDash("curve:N", scale=dashes, legend=None))
    layers = [_band(curve, places) for curve in curves if curve.band is not None]
    layers.append(dashed.transform_filter("datum.faint").mark_line(strokeWidth=1.2, opacity=0.7))
    layers.append(dashed.transform_filter("!datum.faint").mark_line(strokeWidth=2.5, strokeJoin="round"))
    short_curves = [str(place) for place, curve in enumerate(curves) if len(curve.values) <= FEW]
    if short_curves:
        points = base.transform_filter(alt.FieldOneOfPredicate(field="curve", oneOf=short_curves))
        layers.append(points.mark_point(filled=True, size=30, opacity=1))
    return alt.layer(*layers)


def _band(curve: Curve, places: dict[str, Any]) -> alt.Chart:
    frame = pd.DataFrame({"x": curve.band.index, "y": curve.band["low"], "high": curve.band["high"]})  # type: ignore[union-attr,index]
    return alt.Chart(frame).mark_area(opacity=0.22, color=curve.key.colour, line=False).encode(**places, y2="high:Q")


def areas(
    layers: Sequence[Curve], over: Sequence[Curve] = (), *, width: int, last_step: int, y: str, top: float
) -> alt.LayerChart:
    """Amounts stacked over the steps, in bins of `width`, and lines over them. Charts that are compared share `top`."""
    places = {
        "x": _x(STEP, alt.Scale(domain=[0.5, last_step + 0.5], nice=False)),
        "y": alt.Y("y:Q", scale=alt.Scale(domain=[0, top], nice=True), axis=_y_axis(y)),
    }
    names = [str(place) for place in range(len(layers))]
    table = pd.concat([curve.values for curve in (*layers, *over)], axis=1, sort=True)
    heights = table.iloc[:, : len(layers)].fillna(0.0)
    tops = heights.cumsum(axis=1)
    data = pd.DataFrame({
        "x": table.index.repeat(len(layers)), "layer": names * len(table),
        "y": (tops - heights).to_numpy().ravel(), "y2": tops.to_numpy().ravel(),
    })  # fmt: skip
    stack = alt.Chart(_edges(data, width)).mark_area(line=False, opacity=1)
    colour = _colour("layer:N", names, [curve.key.colour for curve in layers])
    parts = [stack.encode(**places, y2="y2:Q", color=colour)]
    for curve in over:
        line = alt.Chart(_edges(pd.DataFrame({"x": curve.values.index, "y": curve.values.to_numpy()}), width))
        mark = line.mark_line(strokeWidth=1.5, color=curve.key.colour, strokeDash=_dash(curve.key))
        parts.append(mark.encode(**places))
    return alt.layer(*parts)


def _edges(data: pd.DataFrame, width: int) -> pd.DataFrame:
    """Each row twice, at the left and at the right edge of its bin, so that what is drawn is a flat column."""
    both = data.loc[data.index.repeat(2)].reset_index(drop=True)
    return both.assign(x=both["x"] + [-width / 2, width / 2] * len(data))


# ── bars ──


def bars(counts: pd.DataFrame, colours: Sequence[str], *, x: str, y: str, top: float) -> alt.Chart:
    """A bar for each row of `counts`, with its parts, the columns, stacked from below."""
    labels = "[" + ",".join(f"'{name}'" for name in counts.index) + "][datum.value]"
    axis = alt.Axis(title=x, grid=False, labelExpr=labels, labelAngle=0, ticks=False, labelFlush=True)
    return (
        alt.Chart(_long(counts))
        .mark_bar(cornerRadius=0)
        .encode(
            x=alt.X("row:O", scale=alt.Scale(paddingInner=0.15), axis=axis),
            y=alt.Y("amount:Q", stack="zero", scale=alt.Scale(domain=[0, top]), axis=_y_axis(y)),
            color=_colour("part:O", range(len(colours)), colours),
            order="part:O",
        )
    )


def _long(wide: pd.DataFrame) -> pd.DataFrame:
    """A row for each cell: the places of its row and its part, and the amount."""
    row, part = np.indices(wide.shape).reshape(2, -1)
    return pd.DataFrame({"row": row, "part": part, "amount": wide.to_numpy().ravel()})


# ── matrix ──


def matrix(counts: pd.DataFrame, *, x: str, y: str) -> alt.LayerChart:
    """Counts by row and column, from the lowest row up. The darker a cell, the larger its share of its row."""
    size = len(counts) - 1
    shares = counts.div(counts.sum(axis=1).where(lambda sums: sums > 0, 1), axis=0)
    data = _long(counts).rename(columns={"part": "column", "amount": "n"}).assign(share=shares.to_numpy().ravel())
    labels = f"datum.value % {max(1, (size + 1) // 9)} == 0 ? datum.value + '/{size}' : ''"
    axis = {"labelExpr": labels, "labelAngle": 0, "ticks": False, "domain": False, "grid": False, "labelFlush": False}
    base = alt.Chart(data).encode(
        x=alt.X("column:O", axis=_x_axis(x, **axis)), y=alt.Y("row:O", sort="descending", axis=_y_axis(y, **axis))
    )
    shade = alt.FillOpacity("share:Q", scale=alt.Scale(domain=[0, 1], range=[0, 1]), legend=None)
    layers = [base.mark_rect(color="var(--cell)", stroke=GRID, strokeWidth=0.5).encode(fillOpacity=shade)]
    if size < MAX_LABELLED:
        digits = ".3~s" if data["n"].max() > 999 else "d"
        text = base.transform_filter("datum.n > 0").mark_text(fontSize=10)
        ink = alt.condition("datum.share > 0.8", alt.value("var(--on-cell)"), alt.value(INK))
        layers.append(text.encode(text=alt.Text("n:Q", format=digits), color=ink))
    return alt.layer(*layers)


# ── values with intervals ──


def intervals(rows: pd.DataFrame, *, x: str) -> alt.LayerChart:
    """A line for each row, from above: different names, value, low, high (NaN without an interval) and colour."""
    names = alt.Axis(title=None, labelLimit=230, ticks=False, domain=False, grid=True)
    base = alt.Chart(rows).encode(
        y=alt.Y("name:N", sort=None, axis=names), color=alt.Color("colour:N", scale=None, legend=None)
    )
    place = alt.X("value:Q", scale=alt.Scale(zero=False, nice=True), axis=_x_axis(x))
    ranges = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=3, opacity=0.5)
    return alt.layer(
        ranges.encode(x=alt.X("low:Q", title=x), x2="high:Q"), base.mark_point(filled=True, size=90).encode(x=place)
    )


# ── axes ──

NUMBERS = "abs(datum.value) >= 1000 ? format(datum.value, '.4~s') : format(datum.value, '.4~g')"
STEPS = "datum.value == floor(datum.value) ? format(datum.value, ',d') : ''"


def _x(title: str, scale: alt.Scale) -> alt.X:
    return alt.X("x:Q", scale=scale, axis=_x_axis(title))


def _x_axis(title: str, **more: Any) -> alt.Axis:
    kind = {"tickMinStep": 1, "labelExpr": STEPS} if title == STEP else {"labelExpr": NUMBERS}
    return alt.Axis(**{"title": title, "tickCount": 5, "grid": False, "labelFlush": True, **kind, **more})


def _y_axis(title: str, **more: Any) -> alt.Axis:
    """The title stands level above the axis. There it is easy to read and takes no width."""
    place = {"titleAngle": 0, "titleAlign": "left", "titleX": -34, "titleY": -10}
    line = {"tickCount": 5, "domain": False, "ticks": False, "labelExpr": NUMBERS}
    return alt.Axis(**{"title": title, **line, **place, **more})


def _colour(field: str, domain: Sequence[Any], colours: Sequence[str]) -> alt.Color:
    return alt.Color(field, scale=alt.Scale(domain=list(domain), range=list(colours)), legend=None)


def _dash(key: Key) -> list[int]:
    return [int(part) for part in key.dash.split()]
