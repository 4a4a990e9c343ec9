"""Curves: values of y with x as their index. Here they are thinned, smoothed, and told in words and in a table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.pages.text import number, smoothing_width


@dataclass(frozen=True)
class Key:
    """A line of a legend, for a line or an area. `dash` is SVG's stroke-dasharray. It is empty if the line is solid."""

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


def chunk_means(values: pd.Series, most: int) -> pd.Series:
    """At most `most` points. Each is the mean, in x and y, of equally many consecutive points; the last of fewer."""
    chunks = np.arange(len(values)) // max(1, math.ceil(len(values) / most))
    points = pd.DataFrame({"x": values.index, "y": values.to_numpy()}).groupby(chunks).mean()
    return points.set_index("x")["y"]


def smoothed(values: pd.Series) -> pd.Series:
    """Centred moving average over `smoothing_width` points; at the ends over those that exist."""
    return values.rolling(smoothing_width(len(values)), center=True, min_periods=1).mean()
