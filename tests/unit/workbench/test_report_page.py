"""The report as a page: one file that loads nothing, says everything in words too, and shows hostile text as text."""

import json
import re

import pytest
from page_parts import Page, in_browser, layout, needs_browser

from bapo_openrlhf.cli.main import run as command
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.record.outcome import nothing_trained
from bapo_openrlhf.workbench.findings import staleness_findings
from bapo_openrlhf.workbench.pages import figure
from bapo_openrlhf.workbench.pages.text import clean
from bapo_openrlhf.workbench.report import figures, sections
from bapo_openrlhf.workbench.report.runs import read_runs

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> <!-- & "
    "\u2028 \u202e {{ 7 * 7 }} {% for %} \"'><svg onload=alert(1)> \x00\x1b\ud800"
)


def write_run(folder, *, steps=6, adapted=True, groups=True, answers=True, name=None):
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
                row |= {f"value/{source}_error": 0.2, f"value/{source}_bias": -0.1}
        rows.append(row)
        for prompt in range(8):
            mean = (prompt % 3 if step < 3 else 1) / 4
            generated.append({
                "step": step, "uid": len(generated), "prompt": f"p{prompt}", "source": "fresh", "state": "fresh",
                "mean": None if prompt == 7 else mean, "responses": 4, "tokens": 9,
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
    (folder / "run.json").write_text(json.dumps(info))
    write_rows(folder, rows)
    if groups:
        write_rows(folder, generated, record.GROUPS)
    if answers:
        write_rows(folder, told, record.ANSWERS)
    return folder


def page_of(*folders):
    return Page(sections.make_page(read_runs(folders)))


@pytest.fixture(scope="module")
def parsed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    second = write_run(folder / "plain", adapted=False, name=f"plain {HOSTILE}", steps=4)
    return page_of(write_run(folder / "adapted"), second)


def section_of(runs, anchor):
    (section,) = [section for section in sections.build(runs) if section.anchor == anchor]
    return section


def rows_in(folder, file=record.METRICS):
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def write_rows(folder, rows, file=record.METRICS):
    (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def change_info(folder, **changes):
    path = folder / record.RUN
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_nothing_is_loaded_and_no_script_may_run(parsed):
    (meta,) = [meta for meta in parsed.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert meta["content"].startswith("default-src 'none';") and "script-src" not in meta["content"]
    loading = {"link", "img", "iframe", "object", "embed", "base", "form", "image", "script"}
    assert not {tag for tag, _ in parsed.elements} & loading
    for tag, attributes in parsed.elements:
        assert "src" not in attributes and "srcset" not in attributes, tag
        for name in ("href", "xlink:href"):
            assert attributes.get(name, "#").startswith("#"), attributes
        assert not [name for name in attributes if name.startswith("on")], attributes
        assert "url(" not in (attributes.get("style") or "") and "javascript:" not in str(attributes).lower()
    style = "".join(parsed.words("style"))
    assert "url(" not in style and "@import" not in style and not re.search("https?://", parsed.text)


def test_what_is_pointed_to_is_there_once(parsed):
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    pointed = [a["href"][1:] for a in parsed.all("a")]
    pointed += [a[key] for _, a in parsed.elements for key in ("aria-labelledby", "aria-describedby") if key in a]
    assert pointed and set(pointed) <= set(ids)


def test_charts_speak(parsed):
    """In words, and by a table of the same numbers."""
    pictures = [a for a in parsed.all("svg") if a.get("class") != "swatch"]
    assert pictures and all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in pictures)
    assert all("<table" in inside for inside in "".join(f"<{tag}" for tag, _ in parsed.elements).split("<figure")[1:])


def test_texts_of_models_and_data_sets_are_shown_as_text(parsed):
    assert not {"\x00", "\x1b"} & set(parsed.text)
    parsed.text.encode("utf-8")  # no lone surrogate
    shown = " ".join(clean(HOSTILE).split())
    assert sum(shown in words for words in parsed.words("pre")) >= 4  # prompt, label, response
    assert any(shown in words for words in parsed.words("td"))  # configuration, command
    assert shown in parsed.words("h1")[0] and shown in parsed.words("title")[0]
    assert "49" not in " ".join(parsed.words("pre"))  # no template in a text is run


def test_names_of_runs_never_reach_a_drawing(tmp_path, monkeypatch):
    specs, drawing = [], "<svg></svg>"
    monkeypatch.setattr(figure.vl_convert, "vegalite_to_svg", lambda spec: specs.append(json.dumps(spec)) or drawing)
    page_of(write_run(tmp_path / "a", name="run <one>"), write_run(tmp_path / "b", name="run <two>"))
    assert specs and not [spec for spec in specs if "run <" in spec]


def test_a_row_with_nothing_but_its_step_is_a_run(tmp_path, undrawn):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    result = page_of(tmp_path)
    assert result.all("figure") == [] and result.words("h2")[:2] == ["Outcome", "At a glance"]


def test_what_a_run_does_not_do_is_left_out(tmp_path, undrawn):
    result = page_of(write_run(tmp_path / "run", adapted=False, groups=False, answers=False))
    assert not {"Theory monitor", "Buffers, thresholds, staleness"} & {*result.words("h2")}
    assert "groups.jsonl is not there" in result.text and "answers.jsonl is not there" in result.text


def test_numbers_of_a_method_and_of_a_reward_function(tmp_path, undrawn):
    """One of a built-in method has the catalogue's words. No other run has a section for them."""
    folders = [write_run(tmp_path / name) for name in ("one", "other")]
    more = {"again/stored": 3, "mine/age": 1.5, "strict <b>": 0.25}
    write_rows(folders[0], [row | (more if row["step"] > 1 else {}) for row in rows_in(folders[0])])
    one, other = read_runs(folders)
    assert "others" not in [section.anchor for section in sections.build([other])]
    section = section_of([one, other], "others")
    assert [shown.title for shown in section.figures] == ["Stored prompts", "mine/age", "strict <b>"]
    assert section.figures[0].sentence == "Prompts that may be generated for again, now or later."
    assert not [shown for shown in section.figures if "strict" in shown.chart.to_json()]


def test_numbers_that_are_none(tmp_path, undrawn):
    folder = write_run(tmp_path / "run")
    nothing = [{key: value if key == "step" else None for key, value in row.items()} for row in rows_in(folder)]
    write_rows(folder, nothing)
    write_rows(folder, [row | {"mean": float("nan")} for row in rows_in(folder, record.GROUPS)], record.GROUPS)
    result = page_of(folder)
    assert result.all("figure") == [] and "no group of the run has a mean reward" in result.text


def test_an_interrupted_and_a_resumed_run_say_so(tmp_path, undrawn):
    folder = write_run(tmp_path / "run", steps=3)
    change_info(folder, total_steps=9, resumed=["2026-01-02T03:04"])
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text() + '{"step": 4, "rew')
    words = " ".join(page_of(folder).words("section"))
    assert "3 of 9" in words and "has no summary.json" in words
    assert "resumed 1 time(s), last at 2026-01-02T03:04" in words
    ended = {"how": "stopped", "at": "2026-01-02T03:04", "status": 143, "text": "stopped by SIGTERM after step 3"}
    change_info(folder, ended=ended)
    words = " ".join(page_of(folder).words("section"))
    assert "run: stopped by SIGTERM after step 3" in words and "has no summary.json" not in words


def encoding_of(drawn, layer):
    return drawn.chart.to_dict()["layer"][layer]["encoding"]


def test_runs_share_axes(tmp_path, undrawn):
    folders = [write_run(tmp_path / "b", steps=3), write_run(tmp_path / "a", steps=6)]
    write_rows(folders[0], [row | {"tv/fresh": 0.7 if row["step"] == 1 else 0.1} for row in rows_in(folders[0])])
    figures_of = [chart for section in sections.build(read_runs(folders)) for chart in section.figures]
    result = {(chart.title, chart.run): chart for chart in figures_of}
    places = [encoding_of(result["Distance to today's policy", name], -1) for name in "ba"]
    assert places[0]["x"] == places[1]["x"]
    assert [place["y"]["scale"]["domain"] for place in places] == [[0, 0.7], [0, 0.7]]
    stacked = [encoding_of(result["Batch composition", name], 0) for name in "ab"]
    assert stacked[0]["y"]["scale"] == stacked[1]["y"]["scale"] and stacked[0]["x"] == stacked[1]["x"]


def test_differences_of_the_flags_come_first(tmp_path, undrawn):
    folders = [write_run(tmp_path / name) for name in "ab"]
    flags = json.loads((folders[1] / "run.json").read_text())["config"]
    change_info(folders[1], config=flags | {"actor.adam.lr": 5e-6, "new.flag": 1})
    section = section_of(read_runs(folders), "configuration")
    assert [row[0] for row in section.tables[0].rows] == ["actor.adam.lr", "new.flag"]
    assert section.tables[0].rows[1][1:] == ["(no such flag)", "1"] and len(section.folded[0].rows) == 5


def test_the_cost_of_others_is_a_ratio_to_the_first(tmp_path, undrawn):
    folders = [write_run(tmp_path / str(steps), steps=steps, name="same") for steps in (4, 6)]
    runs = read_runs(folders)
    assert [run.name for run in runs] == [str(folder) for folder in folders]  # runs of one name are told apart
    rows = {row[0]: row[1:] for row in section_of(runs, "cost").tables[0].rows}
    assert rows["responses generated"] == ["128", "192 (× 1.50)"]
    assert rows["time: generation"] == ["8 s (66.7%)", "12 s (66.7%, × 1.50)"]


def test_long_runs_are_thinned_before_they_are_embedded(tmp_path, undrawn):
    folder = write_run(tmp_path / "run", steps=1000, groups=False, answers=False)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"actor_grad_norm": 1.0', '"actor_grad_norm": 77', 1))
    drawn = [chart for section in sections.build(read_runs([folder])) for chart in section.figures if chart.chart]
    assert max(len(chart.table.rows) for chart in drawn) <= figures.MAX_POINTS
    (norm,) = [chart for chart in drawn if chart.title == "Gradient norm"]
    assert "the largest of 5 steps" in norm.sentence and norm.table.rows[0] == [3, 77]


def test_far_groups_are_in_a_sentence_at_the_top(tmp_path, undrawn):
    folder = write_run(tmp_path / "run", name="mine")
    write_rows(folder, [row | {"tv/replayed": 0.56, "shift/replayed": 0.3} for row in rows_in(folder)])
    [run] = read_runs([folder])
    [said] = staleness_findings(run.rows, "6 steps")
    assert "a TV distance of 0.56 in 6 steps" in said and f"mine: {said}" in section_of([run], "overview").notes


def test_the_command_writes_the_page(tmp_path, undrawn, capsys):
    folder = write_run(tmp_path / "run")
    assert command(["report", str(folder)]) == 0
    said, written = capsys.readouterr().out.splitlines()
    assert "the mean reward rose from" in said and str(folder / "report.html") in written
    assert Page((folder / "report.html").read_text()).words("p")[0] == said
    target = tmp_path / "new" / "page.html"
    assert command(["report", str(folder), "--output", str(target)]) == 0
    assert target.read_text(encoding="utf-8") == (folder / "report.html").read_text(encoding="utf-8")


def test_errors_name_the_folder_and_what_is_missing(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    record.begin_run(tmp_path / "begun", {"name": "begun"})
    for arguments, words in (
        ([tmp_path / "nowhere"], ("nowhere", "no folder", "runs/NAME")),
        ([tmp_path / "empty"], ("empty", "it has no run.json")),
        ([tmp_path], ("is no run's folder", "begun, run")),
        ([tmp_path / "begun"], ("begun", "metrics.jsonl")),
        ([run, run], ("run", "twice")),
        ([run, "--output", tmp_path], ("--output", "folder")),
        ([run, "--output", run / "run.json" / "a.html"], ("run.json/a.html", "cannot be written", "--output")),
        ([], ("RUN",)),
    ):
        assert command(["report", *map(str, arguments)]) == 2
        out, err = capsys.readouterr()
        (line,) = err.splitlines()
        assert out == "" and all(word in line for word in words), line


def evaluated_run(folder, *sets):
    rows = [{"step": step, **{f"eval_{name}_pass1": step / 10 for name in sets}} for step in (2, 4)]
    write_rows(folder, rows, record.EVALUATIONS)
    return folder


def test_held_out_evaluations_come_first(tmp_path, undrawn):
    one, other = (evaluated_run(write_run(tmp_path / name), "sums", "long sums") for name in "ab")
    first, *_ = sections.build(read_runs([one]))
    assert [key.name for key in first.figures[0].keys] == ["sums", "long sums"]
    assert first.figures[0].table.rows == [[2, 0.2, 0.2], [4, 0.4, 0.4]]
    first, *_ = sections.build(read_runs([one, other]))
    assert [[key.name for key in shown.keys] for shown in first.figures] == [["a", "b"]] * 3  # each set, and the reward
    assert "sums 0.200 to 0.400" in page_of(one).words("p")[0]


def test_a_run_that_trained_nothing_says_why_at_the_top(tmp_path, undrawn):
    folder = write_run(tmp_path / "run", steps=3)
    rows = [row | {"groups/with_signal": 0, "skipped_update": 1} for row in rows_in(folder)]
    write_rows(folder, rows)
    assert nothing_trained(rows, "gae") in page_of(folder).words("p")[0]


@needs_browser
def test_in_a_browser_no_text_is_run(parsed, tmp_path):
    assert not in_browser(parsed.text, tmp_path).words("title")[0].startswith("owned")


@needs_browser
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (500, 844)])
def test_in_a_browser_nothing_is_cut_and_the_first_screen_has_a_chart(parsed, tmp_path, width, height):
    """500 pixels are the least that Chromium takes without a phone's screen."""
    found = layout(parsed.text, tmp_path, width)
    assert found["wide"] <= 0 and found["broken"] == []
    assert layout(page_of(evaluated_run(write_run(tmp_path / "run"), "sums")).text, tmp_path, width)["first"] <= height
