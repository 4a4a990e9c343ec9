"""The page: sections to one HTML file that loads nothing.

Every text is escaped by the template. A Content-Security-Policy lets no script run but the page's own, by its hash, and
nothing be loaded, so that what a model wrote stays text even where escaping should ever fail.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from typing import Any

import vl_convert
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from bapo_openrlhf.workbench.report.charts import THEME, Chart, Key, number
from bapo_openrlhf.workbench.report.data import step_ranges
from bapo_openrlhf.workbench.report.runs import Run
from bapo_openrlhf.workbench.report.sections import Section, build

NARROW, WIDE = (330, 235), (700, 245)  # pixels that a chart is laid out for; the page scales it a little
MAX_OPEN = 400  # characters of an answer that are shown before it is unfolded
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def make_page(runs: Sequence[Run], progress: Callable[[Iterable[Chart], int], Iterable[Chart]] | None = None) -> str:
    """The report of runs.

    Args:
        runs: at least one, of different names.
        progress: wraps the charts (and their number) while they are drawn.
    """
    return render([run.name for run in runs], build(runs), title="report", made_by="report", progress=progress)


def render(
    names: Sequence[str],
    sections: Sequence[Section],
    *,
    title: str,
    made_by: str,
    progress: Callable[[Iterable[Chart], int], Iterable[Chart]] | None = None,
) -> str:
    """Sections as a whole page.

    Args:
        names: what it is about; the heading.
        title: what follows them in the browser's title.
        made_by: the command.
        progress: wraps the charts (and their number) while they are drawn.
    """
    todo = [chart for section in sections for chart in section.charts if chart.spec]
    drawings = {id(chart): drawings_of(chart) for chart in (progress(todo, len(todo)) if progress else todo)}
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            names=names,
            title=title,
            made_by=made_by,
            sections=sections,
            drawings=drawings,
            style=_text("page.css"),
            script=_text("page.js"),
            policy=_policy(),
        )
    )


def drawings_of(chart: Chart) -> list[Markup]:
    """The chart as SVG: one drawing, or for a wide chart a narrow one and a wide one, of which the page shows one."""
    sizes = {"narrow": NARROW, "wide": WIDE} if chart.wide else {"": NARROW}
    return [_drawing(chart, width, chart.height or height, name) for name, (width, height) in sizes.items()]


def _drawing(chart: Chart, width: int, height: int, name: str) -> Markup:
    spec = {**(chart.spec or {}), "width": width, "height": height, "config": THEME}
    spec["autosize"] = {"type": "fit", "contains": "padding"}
    svg = vl_convert.vegalite_to_svg(spec)
    inside = re.sub(r"^.*?<svg[^>]*>", "", svg, count=1, flags=re.S)
    inside = re.sub(r' (role|aria-[a-z]+)="[^"]*"', "", inside)  # of the marks: the label says it, and the table
    label = escape(clean(f"{chart.title}. {chart.summary}"))
    return Markup(f'<svg class="{name}" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{inside}')


def rows_of(charts: Sequence[Chart]) -> list[list[Chart]]:
    """The charts that can be drawn; the same one of several runs makes a row of its own."""
    return [list(row) for _, row in groupby((chart for chart in charts if chart.spec), key=lambda chart: chart.row)]


@dataclass(frozen=True)
class Lacking:
    """Figures of a run that cannot be drawn, for the same reason."""

    run: str
    why: str
    titles: Sequence[str]


def lacking(charts: Sequence[Chart]) -> list[Lacking]:
    """What cannot be drawn, a line a run and reason."""
    titles: dict[tuple[str, str], list[str]] = {}
    for chart in charts:
        if not chart.spec:
            name = chart.title + (f" ({chart.paper})" if chart.paper else "")
            titles.setdefault((chart.run, "; ".join(chart.missing)), []).append(name)
    return [Lacking(run, why, found) for (run, why), found in titles.items()]


def swatch(key: Key) -> Markup:
    """A legend's sample."""
    if key.shape == "area":
        inside = f'<rect width="22" height="12" rx="2" fill="{key.colour}"/>'
    else:
        inside = f'<path d="M0 6h22" stroke="{key.colour}" stroke-width="3" stroke-dasharray="{key.dash}"/>'
    return Markup(f'<svg class="swatch" width="22" height="12" aria-hidden="true">{inside}</svg>')


def clean(text: str) -> str:
    """`text` with characters that no HTML file may hold shown as replacements; tabs and ends of line stay."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _environment() -> Environment:
    from jinja2 import PackageLoader

    environment = Environment(
        loader=PackageLoader("bapo_openrlhf.workbench.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_final,
    )
    environment.filters |= {
        "id": id,
        "number": number,
        "swatch": swatch,
        "steps": step_ranges,
        "rows": rows_of,
        "lacking": lacking,
    }
    environment.globals["MAX_OPEN"] = MAX_OPEN
    return environment


def _final(value: Any) -> Any:
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _text(name: str) -> Markup:
    return Markup(files("bapo_openrlhf.workbench.report").joinpath(name).read_text(encoding="utf-8"))


def _policy() -> str:
    digest = base64.b64encode(hashlib.sha256(_text("page.js").encode()).digest()).decode()
    script = f"script-src 'sha256-{digest}'"
    return f"default-src 'none'; style-src 'unsafe-inline'; {script}; base-uri 'none'; form-action 'none'"
