"""Charts: from numbers to Vega-Lite specifications, with what a reader who does not see them needs.

A specification holds numbers and the words of `figures` only: names of runs, which anybody may have written, stay in
`Key` and `Table`, and the page escapes them. Those of `intervals` and `level_bars` are data, never part of an
expression, and Vega escapes what it draws. Colours are CSS variables of the page, so charts follow its dark mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bapo_openrlhf.workbench.report.data import Point
from bapo_openrlhf.workbench.report.runs import is_number

MAX_POINTS = 200  # of a curve, and rows of its table
FEW = 12  # points that are marked one by one
MAX_LABELLED = 17  # bins of a matrix whose cells have room for a number
STEP = "trainer step"  # what an axis of steps says
DASHES = ("", "7 3", "2 2", "7 2 2 2")

INK, MUTED, GRID = "var(--ink)", "var(--muted)", "var(--grid)"
SOURCE_COLOURS = {source: f"var(--{source})" for source in ("fresh", "reevaluated", "replayed")}
NONE_RIGHT, ALL_RIGHT = "#D55E00", "#009E73"  # in red and green that are told apart with any colour vision
PALETTE = tuple(f"var(--palette-{number})" for number in range(7))


@dataclass(frozen=True)
class Key:
    """A line of a legend.

    Attributes:
        shape: line or area.
        dash: SVG's stroke-dasharray; empty for a solid line.
    """

    name: str
    colour: str
    dash: str = ""
    shape: str = "line"


@dataclass(frozen=True)
class Table:
    """Cells are text, numbers, or None for nothing."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""


@dataclass(frozen=True)
class Chart:
    """A figure of the page.

    Attributes:
        title: what is drawn.
        says: in one plain sentence, what it shows.
        paper: the paper's figure that it corresponds to; empty for none.
        run: of which run; empty for all.
        spec: Vega-Lite, without a size; None where there is nothing to draw.
        summary: the numbers in words, in the place of the picture.
        table: the numbers drawn.
        keys: its legend.
        missing: what is not there, and why.
        domain: of the x axis, where the table's first column is on it.
        wide: worth more room than others.
        height: in pixels; 0 for that of the others.
    """

    title: str
    says: str
    spec: dict[str, Any] | None
    summary: str = ""
    table: Table | None = None
    paper: str = ""
    run: str = ""
    keys: Sequence[Key] = ()
    missing: Sequence[str] = ()
    domain: tuple[float, float] | None = None
    wide: bool = False
    height: int = 0

    @property
    def row(self) -> str:
        """What the charts of all runs share that are to be compared: they stand beside each other."""
        return self.title if self.run else ""


@dataclass(frozen=True)
class Curve:
    """One line of a chart: its legend, and all its points."""

    key: Key
    points: Sequence[Point]
    faint: bool = False


@dataclass(frozen=True)
class Band:
    """What lies between two curves: (x, low, high)."""

    colour: str
    points: Sequence[tuple[float, float, float]]


@dataclass(frozen=True)
class IntervalRow:
    """A line of `intervals`; low and high are None where there is no interval."""

    name: str
    value: float
    low: float | None
    high: float | None
    colour: str
    single: Sequence[float] = ()


def number(value: Any) -> str:
    """A number for people: at most four significant digits, thousands separated. Text stays; – for nothing."""
    if isinstance(value, str):
        return value
    if not is_number(value):
        return "–"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def in_words(curves: Sequence[Curve], x_name: str = "step") -> str:
    """Beginning, end and extremes of each curve."""
    parts = []
    for curve in curves:
        if not curve.points or curve.faint:
            continue
        first, last = curve.points[0], curve.points[-1]
        least, most = (pick(curve.points, key=lambda point: point[1]) for pick in (min, max))
        parts.append(
            f"{curve.key.name}: {number(first[1])} at {x_name} {number(first[0])}, {number(last[1])} at {x_name} "
            f"{number(last[0])}; between {number(least[1])} and {number(most[1])}"
        )
    return ". ".join(parts) + "." if parts else "Nothing to show."


def lines(
    curves: Sequence[Curve],
    *,
    x: str,
    y: str,
    x_domain: tuple[float, float],
    y_domain: tuple[float, float] | None = None,
    zero: bool = False,
    log: bool = False,
    bands: Sequence[Band] = (),
) -> dict[str, Any]:
    """Lines over a common axis; curves of few points have these marked.

    Args:
        curves: as they are drawn, thinned already.
        bands: under the lines.
        x, y: what the axes say, with units.
        y_domain: from the data if None.
        zero: the y axis starts at 0.
        log: a logarithmic y axis, where all values are positive.
    """
    data = [
        {"x": px, "y": py, "s": str(index), "faint": curve.faint}
        for index, curve in enumerate(curves)
        for px, py in curve.points
    ]
    log = log and all(row["y"] > 0 for row in data)
    scale: dict[str, Any] = {"type": "log"} if log else {"zero": zero, "nice": True}
    if y_domain is not None:
        scale |= {"domain": list(y_domain)}
    names = [str(index) for index in range(len(curves))]
    encoding = {
        "x": {
            "field": "x",
            "type": "quantitative",
            "scale": {"domain": list(x_domain), "nice": False},
            "axis": _x_axis(x),
        },
        "y": {"field": "y", "type": "quantitative", "scale": scale, "axis": _y_axis(y)},
        "color": {
            "field": "s",
            "type": "nominal",
            "scale": {"domain": names, "range": [curve.key.colour for curve in curves]},
            "legend": None,
        },
        "strokeDash": {
            "field": "s",
            "type": "nominal",
            "scale": {"domain": names, "range": [_dash(curve.key.dash) for curve in curves]},
            "legend": None,
        },
    }
    bold: dict[str, Any] = {"type": "line", "strokeWidth": 2, "strokeJoin": "round"}
    layers: list[dict[str, Any]] = [
        {"transform": [{"filter": "datum.faint"}], "mark": {"type": "line", "strokeWidth": 1, "opacity": 0.4}},
        {"transform": [{"filter": "!datum.faint"}], "mark": bold},
    ]
    few = {str(index) for index, curve in enumerate(curves) if len(curve.points) <= FEW}
    for band in reversed(bands):
        layers.insert(0, _band(band, encoding))
    if few:
        marked = {"filter": {"field": "s", "oneOf": sorted(few)}}
        layers.append({"transform": [marked], "mark": {"type": "point", "filled": True, "size": 30, "opacity": 1}})
        layers[-1]["encoding"] = {"strokeDash": {"value": []}}
    return {"data": {"values": data}, "encoding": encoding, "layer": layers}


def _band(band: Band, encoding: dict[str, Any]) -> dict[str, Any]:
    return {
        "data": {"values": [{"x": x, "y": low, "y2": high} for x, low, high in band.points]},
        "mark": {"type": "area", "opacity": 0.22, "color": band.colour, "line": False},
        "encoding": {"x": encoding["x"], "y": encoding["y"], "y2": {"field": "y2"}, "color": {"value": band.colour},
                     "strokeDash": {"value": []}},
    }  # fmt: skip


def intervals(
    rows: Sequence[IntervalRow], *, x: str, domain: tuple[float, float], reference: float | None = None
) -> dict[str, Any]:
    """A line a row: a value with its interval, and smaller and fainter the single values behind it.

    Args:
        rows: from above.
        x: what the axis says, with its unit.
        domain: of the axis, at least.
        reference: a value to compare with, drawn as a line across.
    """
    shown = [
        {"name": row.name, "x": row.value, "low": row.low, "high": row.high, "s": str(place)}
        for place, row in enumerate(rows)
    ]
    single = [{"name": row.name, "x": value} for row in rows for value in row.single]
    colour = {
        "field": "s", "type": "nominal", "legend": None,
        "scale": {"domain": [row["s"] for row in shown], "range": [row.colour for row in rows]},
    }  # fmt: skip
    place = {
        "field": "x",
        "type": "quantitative",
        "scale": {"domain": list(domain), "nice": True},
        "axis": {**_x_axis(x), "grid": True},
    }
    layers: list[dict[str, Any]] = [
        {
            "transform": [{"filter": "isValid(datum.low) && isValid(datum.high)"}],
            "mark": {"type": "rule", "strokeWidth": 2.5},
            "encoding": {"x": {**place, "field": "low"}, "x2": {"field": "high"}, "y": _names(), "color": colour},
        },
        {
            "data": {"values": single},
            "mark": {
                "type": "point",
                "filled": True,
                "size": 20,
                "opacity": 1,
                "color": INK,
                "stroke": "var(--card)",
                "strokeWidth": 1,
            },
            "encoding": {"x": place, "y": _names()},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
            "encoding": {"x": place, "y": _names(), "color": colour},
        },
    ]
    if reference is not None:
        mark = {"type": "rule", "color": MUTED, "strokeDash": [4, 3]}
        layers.insert(0, {"data": {"values": [{"x": reference}]}, "mark": mark, "encoding": {"x": place}})
    return {"data": {"values": shown}, "layer": layers}


def level_bars(
    names: Sequence[str], amounts: Sequence[Sequence[float]], colours: Sequence[str], *, x: str, top: float
) -> dict[str, Any]:
    """A level bar a name, from above, its parts side by side.

    Args:
        amounts: (names, parts).
        top: of the x axis, the same for all charts to be compared.
    """
    data = []
    for name, parts in zip(names, amounts, strict=True):
        base = 0.0
        for part, amount in enumerate(parts):
            data.append({"name": name, "x": base, "x2": base + amount, "s": part})
            base += amount
    return {
        "data": {"values": data},
        "mark": {"type": "bar"},
        "encoding": {
            "x": {
                "field": "x",
                "type": "quantitative",
                "scale": {"domain": [0, top], "nice": True},
                "axis": {**_x_axis(x), "grid": True},
            },
            "x2": {"field": "x2"},
            "y": {**_names(), "scale": {"paddingInner": 0.25}},
            "color": {
                "field": "s",
                "type": "ordinal",
                "scale": {"domain": list(range(len(colours))), "range": list(colours)},
                "legend": None,
            },
        },
    }


def _names() -> dict[str, Any]:
    """A level line a name; where it holds ends of lines, it is written in several."""
    axis = {"title": None, "labelLimit": 200, "ticks": False, "domain": False, "labelColor": INK}
    axis |= {"labelExpr": "split(datum.label, '\\n')", "labelLineHeight": 13}
    return {"field": "name", "type": "nominal", "sort": None, "axis": axis}


def areas(
    layers: Sequence[Curve],
    over: Sequence[Curve] = (),
    *,
    width: int,
    last_step: int,
    y: str,
    top: float,
) -> dict[str, Any]:
    """Amounts stacked on each other over the steps, a column a bin, and lines over them.

    Args:
        layers: from below; binned by `width` steps. A bin without a point counts as 0.
        over: lines, binned the same.
        top: of the y axis, the same for all charts to be compared.
    """
    values = [dict(curve.points) for curve in layers]
    middles = sorted({x for found in (*values, *(dict(curve.points) for curve in over)) for x in found})
    data = []
    for x in middles:
        base = 0.0
        for index, found in enumerate(values):
            height = base + found.get(x, 0.0)
            data += [{"x": x + side, "y": base, "y2": height, "s": str(index)} for side in (-width / 2, width / 2)]
            base = height
    domain = (0.5, last_step + 0.5)
    axes = {
        "x": {
            "field": "x",
            "type": "quantitative",
            "scale": {"domain": domain, "nice": False},
            "axis": _x_axis(STEP),
        },
        "y": {"field": "y", "type": "quantitative", "scale": {"domain": [0, top], "nice": True}, "axis": _y_axis(y)},
    }
    colour = {"domain": [str(index) for index in range(len(layers))], "range": [curve.key.colour for curve in layers]}
    spec = [
        {
            "mark": {"type": "area", "line": False, "opacity": 1},
            "encoding": {
                **axes,
                "y2": {"field": "y2"},
                "color": {"field": "s", "type": "nominal", "scale": colour, "legend": None},
            },
        }
    ]
    for curve in over:
        line = [{"x": x + side, "y": value} for x, value in curve.points for side in (-width / 2, width / 2)]
        mark = {"type": "line", "strokeWidth": 1.5, "color": curve.key.colour, "strokeDash": _dash(curve.key.dash)}
        spec.append({"data": {"values": line}, "mark": mark, "encoding": axes})
    return {"data": {"values": data}, "layer": spec}


def bars(
    names: Sequence[str], counts: Sequence[Sequence[int]], colours: Sequence[str], *, x: str, y: str, top: float
) -> dict[str, Any]:
    """A bar a name, its parts stacked from below.

    Args:
        counts: (names, parts).
    """
    data = []
    for place, parts in enumerate(counts):
        base = 0
        for part, count in enumerate(parts):
            data.append({"x": place, "y": base, "y2": base + count, "s": part})
            base += count
    labels = "[" + ",".join(f"'{name}'" for name in names) + "][datum.value]"
    return {
        "data": {"values": data},
        "mark": {"type": "bar", "cornerRadius": 0},
        "encoding": {
            "x": {
                "field": "x",
                "type": "ordinal",
                "scale": {"paddingInner": 0.15},
                "axis": {**_x_axis(x), "labelExpr": labels, "labelAngle": 0, "ticks": False},
            },
            "y": {"field": "y", "type": "quantitative", "scale": {"domain": [0, top]}, "axis": _y_axis(y)},
            "y2": {"field": "y2"},
            "color": {
                "field": "s",
                "type": "ordinal",
                "scale": {"domain": list(range(len(colours))), "range": list(colours)},
                "legend": None,
            },
        },
    }


def matrix(counts: Sequence[Sequence[int]], *, x: str, y: str) -> dict[str, Any]:
    """Counts by row and column, from the lowest row up; the darker, the larger the share of its row."""
    size = len(counts) - 1
    data = []
    for row, line in enumerate(counts):
        for column, count in enumerate(line):
            data.append({"row": row, "column": column, "n": count, "share": count / sum(line) if count else 0})
    every = max(1, (size + 1) // 9)
    labels = f"datum.value % {every} == 0 ? datum.value + '/{size}' : ''"
    axis = {"labelExpr": labels, "labelAngle": 0, "ticks": False, "domain": False, "grid": False, "labelFlush": False}
    places = {
        "x": {"field": "column", "type": "ordinal", "axis": {**_x_axis(x), **axis}},
        "y": {"field": "row", "type": "ordinal", "sort": "descending", "axis": {**_y_axis(y), **axis}},
    }
    cell = {"type": "rect", "color": "var(--cell)", "stroke": GRID, "strokeWidth": 0.5}
    shade = {"field": "share", "type": "quantitative", "scale": {"domain": [0, 1], "range": [0, 1]}, "legend": None}
    layers: list[dict[str, Any]] = [{"mark": cell, "encoding": {**places, "fillOpacity": shade}}]
    if size < MAX_LABELLED:
        layers.append(
            {
                "transform": [{"filter": "datum.n > 0"}],
                "mark": {"type": "text", "fontSize": 10},
                "encoding": {
                    **places,
                    "text": {"field": "n", "format": ".3~s" if max(map(max, counts)) > 999 else "d"},
                    "color": {"condition": {"test": "datum.share > 0.8", "value": "var(--on-cell)"}, "value": INK},
                },
            }
        )
    return {"data": {"values": data}, "layer": layers}


def accuracy_colours(size: int) -> list[str]:
    """Of the bins 0..G: none right in red, all right in green, and between them blues from light to dark."""
    low, high = (0xCF, 0xE6, 0xF5), (0x00, 0x5A, 0x8F)
    shares = [k / max(size - 2, 1) for k in range(size - 1)]
    blues = [
        "#" + "".join(f"{round(a + share * (b - a)):02X}" for a, b in zip(low, high, strict=True)) for share in shares
    ]
    return [NONE_RIGHT, *blues, ALL_RIGHT]


def _dash(dash: str) -> list[int]:
    return [int(part) for part in dash.split()]


NUMBERS = "abs(datum.value) >= 1000 ? format(datum.value, '.4~s') : format(datum.value, '.4~g')"
STEPS = "datum.value == floor(datum.value) ? format(datum.value, ',d') : ''"


def _x_axis(title: str) -> dict[str, Any]:
    axis = {"title": title, "tickCount": 5, "grid": False, "labelFlush": True}
    return axis | ({"tickMinStep": 1, "labelExpr": STEPS} if title == STEP else {"labelExpr": NUMBERS})


def _y_axis(title: str) -> dict[str, Any]:
    """The title above the axis, level: it is read without turning one's head, and takes no width."""
    place = {"titleAngle": 0, "titleAlign": "left", "titleX": -34, "titleY": -10}
    return {"title": title, "tickCount": 5, "domain": False, "ticks": False, "labelExpr": NUMBERS, **place}


THEME = {
    "aria": False,  # the page says it in words
    "background": None,
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": MUTED,
        "titleColor": MUTED,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "gridColor": GRID,
        "domainColor": MUTED,
        "tickColor": MUTED,
    },
}
