"""The report as a page: one file that loads nothing, says everything in words too, and shows hostile text as text."""

import json
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from bapo_openrlhf.cli.main import run as command
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.record.outcome import nothing_trained
from bapo_openrlhf.workbench.findings import far
from bapo_openrlhf.workbench.pages import figure, page
from bapo_openrlhf.workbench.pages.colours import PALETTE
from bapo_openrlhf.workbench.pages.text import clean
from bapo_openrlhf.workbench.report import figures, sections
from bapo_openrlhf.workbench.report.runs import Run, read_runs

sys.path.insert(0, str(Path(__file__).parent))
from page_parts import Page, in_browser, layout, needs_browser

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> <!-- & "
    "\u2028 \u202e {{ 7 * 7 }} {% for %} \"'><svg onload=alert(1)> \x00\x1b\ud800"
)
SHOWN = clean(HOSTILE)


def write_run(
    folder, *, steps=6, size=4, adapted=True, critic=True, groups=True, answers=True, metadata=True, name=None
):
    """A small made-up run as it lies on disk."""
    folder.mkdir(parents=True)
    rows, generated = [], []
    for step in range(1, steps + 1):
        row = {
            "step": step, "reward/fresh_mean": step / (steps + 1), "rollouts/total": 32 * step, "response_length": 7.0,
            "groups/fresh": 4, "groups/reevaluated": 0, "groups/replayed": 0, "groups/capacity": 8,
            "tokens/generated_total": 200 * step, "tokens/trained_total": 100 * step, "entropy_loss": 0.5,
            "actor_grad_norm": float("nan") if step == 2 else 1.0, "timing/generation": 2.0, "timing/step_total": 3.0,
        }  # fmt: skip
        if adapted:
            row |= {
                "groups/replayed": 2, "groups/filtered": 3, "filtered/none_right": 2, "filtered/all_right": 1,
                "filtered/by_draw": 0, "groups/capacity_used": 0.75, "buffer/hard": step, "buffer/replay": 2 * step,
                "threshold/c2": 0.2, "threshold/c3": 0.4, "threshold/average_reward": 0.3, "theory/k1": 2.0,
                "theory/k2": 2.0, "theory/k3": 1.2, "theory/bound": -0.1,
            }  # fmt: skip
            for source in ("fresh", "replayed"):
                row |= {f"tv/{source}": 0.1, f"theory/bound_{source}": -0.1, f"clip/{source}": 0.01}
                if critic:
                    row |= {f"value/{source}_error": 0.2, f"value/{source}_bias": -0.1}
        rows.append(row)
        for prompt in range(8):
            mean = (prompt % 3 if step < 3 else 1) / 4
            generated.append({
                "step": step, "uid": len(generated), "prompt": f"p{prompt}", "source": "fresh", "state": "fresh",
                "mean": None if prompt == 7 else mean, "responses": size, "tokens": 9,
            })  # fmt: skip
    told = [
        {"step": 1, "prompt": prompt, "kind": "failed", "text": f"{prompt} {HOSTILE}", "label": HOSTILE,
         "response": HOSTILE + "long " * 200, "reward": 0.0}
        for prompt in ("p0", "p3", "never")
    ]  # fmt: skip
    told.append({**told[0], "step": 3, "kind": "solved", "reward": 1.0})
    info = {
        "name": name or folder.name, "algorithm": "ba_ppo", "seed": 1, "total_steps": steps, "started": "2026-01-01",
        "commit": "c0ffee", "command": f"train {HOSTILE}", "versions": {"python": "3.11"},
        "config": {"adapt.method": "bapo", "adapt.c1": "1/8", "data.prompt_dataset": HOSTILE, "actor.adam.lr": 1e-6},
    }  # fmt: skip
    for file, lines, wanted in (
        ("metrics.jsonl", rows, True),
        ("groups.jsonl", generated, groups),
        ("answers.jsonl", told, answers),
    ):
        if wanted:
            (folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    if metadata:
        (folder / "run.json").write_text(json.dumps(info))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    second = write_run(folder / "plain", adapted=False, critic=False, name=f"plain {HOSTILE}", steps=4)
    return read_runs([write_run(folder / "adapted"), second])


@pytest.fixture(scope="module")
def html(runs):
    return sections.make_page(runs)


@pytest.fixture(scope="module")
def drawn(runs):
    """The figures that have a chart."""
    return [figure for section in sections.build(runs) for figure in section.figures if figure.chart]


@pytest.fixture(scope="module")
def parsed(html):
    return Page(html)


def page_of(*folders):
    text = sections.make_page(read_runs(folders))
    return Page(text), text


# ── one file, well made ──


def test_everything_is_closed_and_nothing_is_a_comment(parsed):
    assert parsed.declared == "doctype html" and parsed.open == []


def test_nothing_is_loaded(parsed, html):
    assert not {tag for tag, _ in parsed.elements} & {
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
        "image",
    }
    for tag, attributes in parsed.elements:
        assert "src" not in attributes and "srcset" not in attributes, tag
        for name in ("href", "xlink:href"):
            assert attributes.get(name, "#").startswith("#"), attributes
        assert not [name for name in attributes if name.startswith("on")], attributes
        assert "url(" not in (attributes.get("style") or "") and "javascript:" not in str(attributes).lower()
    style = "".join(parsed.words("style"))
    assert "url(" not in style and "@import" not in style
    assert "http://" not in html and "https://" not in html


def test_no_script_may_run(parsed):
    (meta,) = [meta for meta in parsed.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert meta["content"].startswith("default-src 'none';") and "script-src" not in meta["content"]
    assert parsed.all("script") == []


def test_headings_are_in_order_with_one_at_the_top(parsed):
    levels = [int(tag[1]) for tag, _ in parsed.elements if re.fullmatch(r"h\d", tag)]
    assert levels.count(1) == 1 and levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(parsed.words(f"h{level}").count("") == 0 for level in (1, 2, 3))


def test_what_is_pointed_to_is_there_once(parsed):
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    pointed = [a["href"][1:] for a in parsed.all("a")]
    pointed += [
        a[key] for _, a in parsed.elements for key in ("aria-labelledby", "aria-describedby", "for") if key in a
    ]
    assert pointed and set(pointed) <= set(ids)
    assert {section.anchor for section in sections.build([Run("r", [{"step": 1}])])} <= set(ids)


def test_charts_speak(parsed, drawn):
    pictures = [a for a in parsed.all("svg") if a.get("class") != "swatch"]
    assert len(pictures) == len(drawn) + sum(figure.wide for figure in drawn)
    for attributes in pictures:
        assert attributes["role"] == "img" and len(attributes["aria-label"]) > 20
        assert "viewbox" in attributes
    inside = [a for tag, a in parsed.elements if tag in ("g", "path", "text", "rect")]
    assert not [a for a in inside if "role" in a or "aria-label" in a]
    assert all(a.get("aria-hidden") == "true" for a in parsed.all("svg") if a.get("class") == "swatch")
    places = [k for k, (tag, _) in enumerate(parsed.elements) if tag == "figure"]
    for start, end in zip(places, [*places[1:], len(parsed.elements)], strict=True):
        assert "table" in [tag for tag, _ in parsed.elements[start:end]]  # the same numbers


def test_landmarks_and_a_way_past_them(parsed):
    tags = [tag for tag, _ in parsed.elements]
    assert tags.count("main") == tags.count("nav") == tags.count("header") == tags.count("footer") == 1
    assert parsed.all("html") == [{"lang": "en"}]
    assert parsed.all("a")[0] == {"class": "skip", "href": "#main"}
    assert len(parsed.words("title")[0]) > 5


# ── hostile text ──


def test_texts_of_models_and_data_sets_are_shown_as_text(parsed, html):
    assert "\x00" not in html and "\x1b" not in html
    html.encode("utf-8")  # no lone surrogate
    shown = " ".join(SHOWN.split())
    assert sum(shown in words for words in parsed.words("pre")) >= 4  # prompt, label, response
    assert any(shown in words for words in parsed.words("td"))  # configuration, command
    assert shown in parsed.words("h1")[0] and shown in parsed.words("title")[0]
    assert "49" not in " ".join(parsed.words("pre"))  # no template in a text is run


def test_names_of_runs_never_reach_a_drawing(tmp_path, monkeypatch):
    specs = []
    monkeypatch.setattr(
        figure.vl_convert, "vegalite_to_svg", lambda spec: specs.append(json.dumps(spec)) or "<svg></svg>"
    )
    page_of(write_run(tmp_path / "a", name="run <one>"), write_run(tmp_path / "b", name="run <two>"))
    assert specs and not [spec for spec in specs if "run <" in spec]


# ── what may be missing ──


def test_a_row_with_nothing_but_its_step_is_a_run(tmp_path, undrawn):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    result, _ = page_of(tmp_path)
    assert result.all("figure") == [] and result.words("h2")[:2] == ["Outcome", "At a glance"]


def test_what_a_run_does_not_do_is_left_out(tmp_path, undrawn):
    _, text = page_of(write_run(tmp_path / "run", adapted=False, critic=False, groups=False, answers=False))
    words = Page(text).words("h2")
    assert "Theory monitor" not in words and "Buffers, thresholds, staleness" not in words
    assert "there is no groups.jsonl" in text and "answers.jsonl is not there" in text


def test_numbers_of_a_method_and_of_a_reward_function(tmp_path, undrawn):
    """One of a built-in method has the catalogue's words. No other run has a section for them."""
    write_run(tmp_path / "other")
    write_run(tmp_path / "one")
    rows = record.read_metrics(tmp_path / "one")
    more = {"again/stored": 3, "mine/age": 1.5, "strict <b>": 0.25}
    text = "".join(json.dumps(row | (more if row["step"] > 1 else {})) + "\n" for row in rows)
    (tmp_path / "one" / "metrics.jsonl").write_text(text)
    one, other = read_runs([tmp_path / "one", tmp_path / "other"])
    assert "others" not in [section.anchor for section in sections.build([other])]
    (section,) = [section for section in sections.build([one, other]) if section.anchor == "others"]
    assert [shown.title for shown in section.figures] == ["Stored prompts", "mine/age", "strict <b>"]
    assert section.figures[0].says == "Prompts that may be generated for again, now or later."
    for shown in section.figures:
        assert "strict" not in shown.chart.to_json()


def test_numbers_that_are_none(tmp_path, undrawn):
    folder = write_run(tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    nothing = [{key: value if key == "step" else None for key, value in row.items()} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in nothing))
    groups = [json.loads(line) | {"mean": float("nan")} for line in (folder / "groups.jsonl").read_text().splitlines()]
    (folder / "groups.jsonl").write_text("".join(json.dumps(row) + "\n" for row in groups))
    result, text = page_of(folder)
    assert result.all("figure") == [] and "no group of the run has a mean reward" in text


def test_rewards_outside_0_and_1_have_no_bins(tmp_path, undrawn):
    folder = write_run(tmp_path / "run")
    path = folder / "groups.jsonl"
    path.write_text(path.read_text().replace('"mean": 0.5', '"mean": -2.5'))
    assert "mean rewards are not between 0 and 1" in page_of(folder)[1]


def test_an_interrupted_and_a_resumed_run_say_so(tmp_path, undrawn):
    folder = write_run(tmp_path / "run", steps=3)
    info = json.loads((folder / "run.json").read_text()) | {"total_steps": 9, "resumed": ["2026-01-02T03:04"]}
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text() + '{"step": 4, "rew')
    words = " ".join(page_of(folder)[0].words("section"))
    assert (
        "3 of 9" in words and "has no summary.json" in words and "resumed 1 time(s), last at 2026-01-02T03:04" in words
    )


def test_a_run_that_a_signal_stopped_says_so(tmp_path, undrawn):
    folder = write_run(tmp_path / "run", steps=3)
    ended = {"how": "stopped", "at": "2026-01-02T03:04", "status": 143, "text": "stopped by SIGTERM after step 3"}
    (folder / "run.json").write_text(json.dumps(json.loads((folder / "run.json").read_text()) | {"ended": ended}))
    words = " ".join(page_of(folder)[0].words("section"))
    assert "run: stopped by SIGTERM after step 3" in words and "has no summary.json" not in words


# ── several runs ──


def encoding_of(drawn, layer):
    return drawn.chart.to_dict()["layer"][layer]["encoding"]


def test_runs_share_axes_and_keep_their_colours(tmp_path, undrawn):
    folders = [write_run(tmp_path / "b", steps=3), write_run(tmp_path / "a", steps=6)]
    path = folders[0] / "metrics.jsonl"
    path.write_text(path.read_text().replace('"tv/fresh": 0.1', '"tv/fresh": 0.7', 1))
    runs = read_runs(folders)
    result = {(chart.title, chart.run): chart for section in sections.build(runs) for chart in section.figures}
    short, long = result["Distance to today's policy", "b"], result["Distance to today's policy", "a"]
    places = [encoding_of(one, -1) for one in (short, long)]
    assert places[0]["x"] == places[1]["x"]
    assert [place["y"]["scale"]["domain"] for place in places] == [[0, 0.7], [0, 0.7]]
    stacked = [encoding_of(result["Batch composition", name], 0) for name in "ab"]
    assert stacked[0]["y"]["scale"] == stacked[1]["y"]["scale"] and stacked[0]["x"] == stacked[1]["x"]
    colours = {
        tuple(key.colour for key in chart.keys)
        for (_, run), chart in result.items()
        if not run and len(chart.keys) == 2
    }
    assert colours == {PALETTE[:2]}
    rows = page.rows_of([result[title, name] for title in ("Batch composition", "Clipped tokens") for name in "ab"])
    assert [[chart.run for chart in row] for row in rows] == [["a", "b"], ["a", "b"]]


def test_differences_of_the_flags_come_first(tmp_path, undrawn):
    folders = [write_run(tmp_path / name) for name in "ab"]
    info = json.loads((folders[1] / "run.json").read_text())
    info["config"] |= {"actor.adam.lr": 5e-6, "new.flag": 1}
    (folders[1] / "run.json").write_text(json.dumps(info))
    (section,) = [section for section in sections.build(read_runs(folders)) if section.anchor == "configuration"]
    assert [row[0] for row in section.tables[0].rows] == ["actor.adam.lr", "new.flag"]
    assert section.tables[0].rows[1][1:] == ["(no such flag)", "1"]
    assert len(section.folded[0].rows) == 5


def test_the_cost_of_others_is_a_ratio_to_the_first(tmp_path, undrawn):
    runs = read_runs([write_run(tmp_path / "a", steps=4), write_run(tmp_path / "b", steps=6)])
    (section,) = [section for section in sections.build(runs) if section.anchor == "cost"]
    rows = {row[0]: row[1:] for row in section.tables[0].rows}
    assert rows["responses generated"] == ["128", "192 (× 1.50)"]
    assert rows["time: generation"] == ["8 s (66.7%)", "12 s (66.7%, × 1.50)"]


def test_long_runs_are_thinned_before_they_are_embedded(tmp_path, undrawn):
    folder = write_run(tmp_path / "run", steps=1000, groups=False, answers=False)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"actor_grad_norm": 1.0', '"actor_grad_norm": 77', 1))
    runs = read_runs([folder])
    drawn = [chart for section in sections.build(runs) for chart in section.figures if chart.chart]
    assert max(len(chart.table.rows) for chart in drawn) <= figures.MAX_POINTS
    (norm,) = [chart for chart in drawn if chart.title == "Gradient norm"]
    assert "A point is the largest of 5 steps." in norm.says
    assert norm.table.rows[0] == [3, 77]


def test_the_table_has_the_numbers_that_are_drawn(tmp_path, undrawn):
    (chart,) = [
        chart
        for section in sections.build(read_runs([write_run(tmp_path / "run")]))
        for chart in section.figures
        if chart.title == "Hard buffer"
    ]
    assert chart.table.rows == chart.chart.data[["x", "y"]].to_numpy().tolist()
    assert chart.table.rows == [[step, step] for step in range(1, 7)]
    assert chart.summary == "run: 1 at step 1, 6 at step 6; between 1 and 6."


def test_flags_are_code(parsed):
    assert {"--adapt.max_shift_fresh", "--actor.dual_clip"} <= set(parsed.words("code"))


def test_far_groups_are_in_a_sentence_at_the_top(tmp_path, undrawn):
    folder = write_run(tmp_path / "run", name="mine")
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"tv/replayed": 0.1', '"tv/replayed": 0.56, "shift/replayed": 0.3'))
    [run] = read_runs([folder])
    [said] = far(run.rows, "6 steps")
    assert "a TV distance of 0.56 in 6 steps" in said
    assert f"mine: {said}" in next(one for one in sections.build([run]) if one.anchor == "overview").notes


# ── the command ──


def test_the_command_writes_the_page(tmp_path, undrawn, capsys):
    folder = write_run(tmp_path / "run")
    assert command(["report", str(folder)]) == 0
    said, written = capsys.readouterr().out.splitlines()
    assert "the mean reward rose from" in said and str(folder / "report.html") in written
    # The sentence is the first one of the page, below its heading.
    assert Page((folder / "report.html").read_text()).words("p")[0] == said
    target = tmp_path / "new" / "page.html"
    assert command(["report", str(folder), "--output", str(target)]) == 0
    assert target.read_text(encoding="utf-8") == (folder / "report.html").read_text(encoding="utf-8")


def test_two_runs_of_one_name_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / name, name="same") for name in "ab"]
    assert [run.name for run in read_runs(folders)] == [str(folder) for folder in folders]


def test_errors_name_the_folder_and_what_is_missing(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    record.begin_run(tmp_path / "begun", {"name": "begun"})
    broken = write_run(tmp_path / "broken")
    (broken / "groups.jsonl").write_text("no json\n")
    spoiled = write_run(tmp_path / "spoiled")
    (spoiled / "run.json").write_text("{")
    for arguments, words in (
        ([tmp_path / "nowhere"], ("nowhere", "no folder", "runs/NAME")),
        ([tmp_path / "empty"], ("empty", "it has no run.json")),
        ([tmp_path], ("is no run's folder", "these folders in it have one: begun, broken, run, spoiled")),
        ([tmp_path / "begun"], ("begun", "metrics.jsonl")),
        ([run, run], ("run", "twice")),
        ([broken], ("broken", "groups.jsonl, line 1")),
        ([spoiled], ("spoiled", "cannot be read")),
        ([run, "--output", tmp_path], ("--output", "folder", "PAGE.html")),
        (
            [run, "--output", run / "run.json" / "a.html"],
            ("run.json/a.html", "cannot be written", "--output PAGE.html"),
        ),
        ([], ("RUN",)),
    ):
        assert command(["report", *map(str, arguments)]) == 2
        out, err = capsys.readouterr()
        (line,) = err.splitlines()
        assert out == "" and all(word in line for word in words), line


# ── the first screen ──


def evaluated(folder, *sets):
    """Two evaluations of a run."""
    rows = [{"step": step, **{f"eval_{name}_pass1": step / 10 for name in sets}} for step in (2, 4)]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_held_out_evaluations_come_first(tmp_path, undrawn):
    one, other = (evaluated(write_run(tmp_path / name), "sums", "long sums") for name in "ab")
    first, *_ = sections.build(read_runs([one]))
    assert [key.name for key in first.figures[0].keys] == ["sums", "long sums"]
    assert first.figures[0].table.rows == [[2, 0.2, 0.2], [4, 0.4, 0.4]]
    first, *_ = sections.build(read_runs([one, other]))
    assert [[key.name for key in shown.keys] for shown in first.figures] == [["a", "b"]] * 3  # each set, and the reward
    text = page_of(one)[1]
    assert "sums 0.200 to 0.400" in Page(text).words("p")[0]


def test_a_run_that_trained_nothing_says_why_at_the_top(tmp_path, undrawn):
    folder = write_run(tmp_path / "run", steps=3)
    rows = [row | {"groups/with_signal": 0, "skipped_update": 1} for row in record.read_metrics(folder)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert nothing_trained(rows, "gae") in page_of(folder)[0].words("p")[0]


@needs_browser
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (500, 844)])
def test_in_a_browser_the_first_screen_has_a_chart(tmp_path, width, height):
    """500 pixels are the least that Chromium takes without a phone's screen."""
    runs = read_runs([evaluated(write_run(tmp_path / "run"), "sums")])
    _, bottom = layout(sections.make_page(runs), tmp_path, width)["first"]
    assert bottom <= height


# ── in a browser ──


@needs_browser
def test_in_a_browser_no_text_is_run(html, tmp_path):
    assert not in_browser(html, tmp_path).words("title")[0].startswith("owned")


@needs_browser
@pytest.mark.parametrize("width", [1280, 500])
def test_in_a_browser_nothing_is_cut_and_nothing_is_empty(html, tmp_path, width):
    found = layout(html, tmp_path, width)
    assert found["wide"] <= 0 and found["broken"] == []
    assert found["room"] <= 10  # pixels; 42 were empty
