"""Sections as one HTML file that loads nothing.

The template escapes every text. A Content-Security-Policy allows no script and forbids to load anything. So what a
model wrote stays text even if escaping should ever fail.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from tqdm import tqdm

from bapo_openrlhf.workbench.pages.colours import css
from bapo_openrlhf.workbench.pages.figure import Figure, drawings_of, swatch
from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.pages.text import clean, number

PACKAGE = "bapo_openrlhf.workbench.pages"
FLAG = re.compile(r"--[a-z][\w.-]{0,38}\w")  # no longer than a line of a narrow page
MAX_OPEN = 400  # characters of a text that are shown before it is unfolded
MOST_RANGES = 8  # that `step_ranges` names


@dataclass(frozen=True)
class Condition:
    """A condition or a claim, whether it held (None: not known), what was seen, and the steps at which it did not."""

    what: str
    held: bool | None
    note: str = ""
    steps: Sequence[int] = ()


@dataclass(frozen=True)
class Verdict:
    """Conditions of a run (empty if there is only one), and what the page writes for each outcome."""

    run: str
    conditions: Sequence[Condition]
    words: Mapping[str, str] = field(
        default_factory=lambda: {"held": "Held", "unknown": "Not known", "broken": "Did not hold"}
    )


@dataclass(frozen=True)
class Entry:
    """A folded entry of a `Listing`: its line, what distinguishes its text, and (heading, kind, text) of each text."""

    what: str
    start: str
    texts: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Listing:
    """Texts of a run that a reader can unfold, how many there are in all, and why there may be none."""

    run: str
    title: str
    entries: Sequence[Entry]
    total: int
    missing: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page under a heading of its own. Folded tables open when a reader asks for them."""

    anchor: str
    title: str
    intro: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    folded: Sequence[Table] = ()
    verdicts: Sequence[Verdict] = ()
    listings: Sequence[Listing] = ()
    notes: Sequence[str] = ()

    @property
    def shows(self) -> bool:
        """Whether it has anything but its words. The charts of what a run does not do are left out."""
        charts = any(figure.chart is not None for figure in self.figures)
        return bool(charts or self.tables or self.folded or self.verdicts or self.listings or self.notes)


def render(names: Sequence[str], sections: Sequence[Section], *, command: str, lead: str = "") -> str:
    """Sections as a whole page, under `names` and `lead`. The first is the outcome, above the list of the others.

    `command` follows the names in the browser's title. A progress bar shows how many figures are drawn.
    """
    figures = [figure for section in sections for figure in section.figures if figure.chart is not None]
    drawings = {id(figure): drawings_of(figure) for figure in tqdm(figures, desc="charts", leave=False)}
    environment = Environment(
        loader=PackageLoader(PACKAGE, "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_final,
    )  # fmt: skip
    environment.filters |= {
        "id": id, "number": number, "swatch": swatch, "steps": step_ranges, "flags": with_flags,
        "rows": rows_of_figures,
    }  # fmt: skip
    style = css() + files(PACKAGE).joinpath("page.css").read_text(encoding="utf-8")
    page = environment.get_template("page.html.jinja", globals={"MAX_OPEN": MAX_OPEN, "style": Markup(style)})
    return page.render(names=names, command=command, lead=lead, sections=sections, drawings=drawings)


def _final(value: Any) -> Any:
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def with_flags(text: str) -> Markup:
    """Text with its flags, such as --adapt.filter, as code, which no line breaks after the dashes."""
    return Markup(FLAG.sub(r"<code>\g<0></code>", str(escape(clean(text)))))


def rows_of_figures(figures: Sequence[Figure]) -> list[list[Figure]]:
    """The figures that can be drawn. The same figure of several runs makes a row of its own."""
    charts = (figure for figure in figures if figure.chart is not None)
    return [list(row) for _, row in groupby(charts, key=lambda figure: figure.title if figure.run else "")]


def step_ranges(steps: Iterable[int]) -> str:
    """3, 4, 5, 9 as "3–5, 9". Beyond MOST_RANGES it says how many other steps there are."""
    in_a_row = groupby(enumerate(sorted(set(steps))), key=lambda placed: placed[1] - placed[0])
    ranges = [[step for _, step in placed] for _, placed in in_a_row]
    text = ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in ranges[:MOST_RANGES])
    rest = sum(map(len, ranges[MOST_RANGES:]))
    return text + (f" and {rest:,} more" if rest else "")
