"""The kit for pages: its curves, charts, tables and colours."""

import inspect
import json
import re
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_openrlhf.adapt.vocabulary import FAILED, SOURCES, STATES
from bapo_openrlhf.workbench.pages import charts, colours, figure
from bapo_openrlhf.workbench.pages.charts import Curve, Key
from bapo_openrlhf.workbench.pages.figure import Figure, drawings_of, save_png, save_svg, specification
from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.pages.text import duration, many, number, size, smooth, smoothing_width

VALUES = st.lists(st.floats(-10, 10), min_size=1, max_size=60).map(lambda ys: pd.Series(ys, range(1, len(ys) + 1)))


@given(st.dictionaries(st.integers(1, 60), st.floats(-10, 10), min_size=1), st.integers(1, 9))
def test_a_bin_is_the_mean_of_its_steps(values, width):
    """A bin without a step is left out."""
    series = pd.Series(values).sort_index()
    result, peaks = (charts.binned(series, width, peaks=whether).to_dict() for whether in (False, True))
    inside = {}
    for step, value in values.items():
        inside.setdefault((step - 1) // width * width + (width + 1) / 2, []).append(value)
    assert result == pytest.approx({middle: np.mean(ys) for middle, ys in inside.items()})
    assert peaks == {middle: max(ys) for middle, ys in inside.items()}


@given(st.integers(1, 100_000), st.integers(1, 300))
def test_bins_are_as_few_as_asked_for_and_no_fewer_than_needed(last, most):
    width = charts.bin_width(last, most)
    assert -(-last // width) <= most
    assert width == 1 or -(-last // (width - 1)) > most


@given(VALUES)
def test_smoothing_is_a_centred_average_of_a_tenth(values):
    width = smoothing_width(len(values))
    assert width % 2 == 1 and width >= 3 and (width == 3 or width <= len(values) // 10 + 1)
    half, result = width // 2, charts.smoothed(values)
    assert list(result.index) == list(values.index)
    for place, value in enumerate(result):
        assert value == pytest.approx(values.iloc[max(0, place - half) : place + half + 1].mean(), abs=1e-9)
    assert result.to_list() == pytest.approx(smooth(values.to_list()), abs=1e-9)  # as `watch` does it


@pytest.mark.parametrize(
    ("write", "texts"),
    [
        (duration, {0: "0 s", 0.0312: "0.0312 s", 1.57: "1.57 s", 42.4: "42 s", 59.6: "1 min", 208: "3 min 28 s",
                    3580: "59 min 40 s", 3599.6: "1 h", 7549: "2 h 6 min", 97200: "1 d 3 h", 172800: "2 d"}),
        (number, {None: "–", 0: "0", 3.0: "3", 1234567: "1,234,567", 0.123456: "0.1235", 1234.5: "1,234", "a": "a",
                  float("nan"): "–", -0.5: "-0.5"}),
        (size, {512: "512 B", 1024: "1.0 KiB", 2**50: "1024.0 TiB"}),
        (lambda count: many(count, "step"), {0: "0 steps", 1: "1 step", 2: "2 steps"}),
    ],
)  # fmt: skip
def test_numbers_for_people(write, texts):
    assert {value: write(value) for value in texts} == texts


def test_the_table_of_curves_has_a_row_for_each_place():
    drawn = [Curve(Key("a", "red"), pd.Series({1: 5.0, 3: 6.0})), Curve(Key("b", "red"), pd.Series({2: 7.0}))]
    table = charts.curves_table(drawn, "step")
    assert table.head == ["step", "a", "b"]
    assert [[number(cell) for cell in row] for row in table.rows] == [["1", "5", "–"], ["2", "–", "7"], ["3", "6", "–"]]
    assert charts.curves_in_words(drawn).startswith("a: 5 at step 1, 6 at step 3; between 5 and 6. b: ")


def test_stacks_end_where_the_next_begins():
    parts = ({1: 2.0, 2: 3.0}, {2: 4.0}, {1: 5.0})
    stack = [Curve(Key("", "red", shape="area"), pd.Series(values)) for values in parts]
    data = charts.areas(stack, width=1, last_step=2, y="groups", top=9).data
    result = {(row.layer, row.x): (row.y, row.y2) for row in data.itertuples() if row.x != 1.5}
    assert result["0", 0.5] == (0, 2.0) and (result["1", 0.5], result["2", 0.5]) == ((2.0, 2.0), (2.0, 7.0))
    assert (result["0", 2.5], result["1", 2.5], result["2", 2.5]) == ((0, 3.0), (3.0, 7.0), (7.0, 7.0))


def test_a_matrix_shades_by_the_share_of_the_row():
    chart = charts.matrix(pd.DataFrame([[1, 3], [5, 0], [0, 0]]), x="x", y="y")
    cells = {(cell.row, cell.column): cell for cell in chart.data.itertuples()}
    assert [cells[0, k].share for k in (0, 1)] == [0.25, 0.75]
    assert (cells[1, 0].share, cells[1, 1].share, cells[2, 0].share, cells[0, 1].n) == (1, 0, 0, 3)


def every_chart():
    """One chart of each kind, with a name that would end a string of Vega's expressions."""
    band = pd.DataFrame({"low": [1.0, 2.0], "high": [3.0, 4.0]}, index=[1, 2])
    curve = Curve(Key("a", colours.PALETTE[0]), pd.Series({1: 2.0, 2: 3.0}), band=band)
    counts = pd.DataFrame([[1, 3], [5, 0]], index=["it's\nlong", "</svg>"])
    return {
        "lines": charts.lines([curve], x=charts.STEP, y="reward", x_domain=(1, 2)),
        "areas": charts.areas([curve], [curve], width=1, last_step=2, y="groups", top=9),
        "bars": charts.bars(counts.set_axis(["first", "1"]), colours.accuracy_colours(1), x="x", y="y", top=5),
        "matrix": charts.matrix(counts.reset_index(drop=True), x="x", y="y"),
    }


@pytest.mark.parametrize("kind", every_chart())
def test_a_drawing_asks_for_nothing_and_is_the_same_each_time(kind):
    first, again = (drawings_of(Figure("T", "Says.", every_chart()[kind], wide=True)) for _ in range(2))
    assert first == again and len(first) == 2
    for drawing in first:
        assert not re.search(r"https?://(?!www\.w3\.org)|url\(|\bid=|href", drawing)
        assert "var(--" in drawing and 'role="img"' in drawing and "</svg>" in drawing


def test_many_rows_are_no_error():
    curve = Curve(Key("a", "red"), pd.Series(np.arange(6000.0)))
    assert specification(charts.lines([curve], x="x", y="y", x_domain=(0, 6000)))


def test_a_png_has_colours_of_its_own(tmp_path, monkeypatch):
    specs = []
    monkeypatch.setattr("vl_convert.vegalite_to_png", lambda spec, scale: specs.append(json.dumps(spec)) or b"PNG")
    save_png(every_chart()["lines"], tmp_path / "new" / "x.png")
    assert (tmp_path / "new" / "x.png").read_bytes() == b"PNG" and "var(" not in specs[0]


def test_an_svg_defines_the_colours_that_it_uses(tmp_path):
    save_svg(every_chart()["lines"], tmp_path / "new" / "x.svg")
    svg = ElementTree.fromstring((tmp_path / "new" / "x.svg").read_text())
    defined = set(re.findall(r"--([\w-]+):", svg[0].text))
    assert set(re.findall(r"var\(--([\w-]+)\)", ElementTree.tostring(svg, encoding="unicode"))) <= defined


def test_every_colour_is_defined_for_both_themes_and_every_source_and_state_has_a_label():
    code = "".join(inspect.getsource(module) for module in (charts, colours, figure))
    named = set(re.findall(r"var\(--([a-z-]+)\)", code)) | {name[6:-1] for name in colours.PALETTE}
    assert named <= set(colours.LIGHT) and set(colours.DARK) < set(colours.LIGHT)
    assert tuple(colours.SOURCE_LABELS) == SOURCES
    assert set(colours.STATE_LABELS) == {*STATES, FAILED, *colours.REASON_COLOURS}


def test_a_table_as_markdown():
    rows = [["a|b", 1234.5], ["c\nd", None]]
    lines = Table.of(["name | x", "value"], rows, "Title", strong=frozenset([1]), notes=["n"]).markdown().splitlines()
    head, _, *cells = [" ".join(line.split()) for line in lines if line.startswith("|")]
    assert lines[0] == "## Title" and lines[-1] == "- n"
    assert (head, cells) == (r"| name \| x | value |", [r"| a\|b | 1,234 |", "| **c d** | **–** |"])
    assert "| a | b |" in " ".join(Table.of(["a", "b"], []).markdown().split())
