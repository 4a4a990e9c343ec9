"""`prepare` turns published rows into the files of a task. The task is made for these tests."""

import itertools
import json
import os
import random
import socket
from collections import Counter
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from bapo_openrlhf import tasks, user_file
from bapo_openrlhf.cli.main import run
from bapo_openrlhf.cli.prepare import _token_counter
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.tasks.task import BadRow, Part, Problem, Source, Task, require, text_key
from bapo_openrlhf.workbench.prepare import build, source_rows
from bapo_openrlhf.workbench.prepare.build import Preparation, prepare, read_manifest

BASE_MODEL = Path(__file__).parents[3] / "examples" / "quickstart" / "base_model.py"
SHARED = Source("someone/shared", ("question", "gold"), rows=30)
OTHER = Source("someone/other", ("question", "gold"), split="test")


def problem(row):
    question, gold = require(row, ("question", "gold"))
    if not str(gold).isdecimal():
        raise BadRow(f"label is no number: {gold!r}")
    return Problem(question, str(gold), text_key(question))


def generate(generator, part, size, seed):
    if size > 100:
        raise ValueError(f"there are 100 problems, not {size}")
    numbers = random.Random(f"{seed}/{part}").sample(range(100), size)
    return (Problem(f"{part} {number}", str(number), f"{part}{number}") for number in numbers)


TASK = Task(
    name="toy",
    file=Path(__file__),
    train=Part("train", SHARED, first=5, count=10, shuffled=True),
    benchmarks={"held_out": Part("Held out", SHARED, count=5, shuffled=True), "other": Part("Other", OTHER)},
    problem=problem,
    prompts={"plain": lambda problem: problem.text, "loud": lambda problem: f"Solve: {problem.text}"},
    generate=generate,
    sizes={"counting": {"train": 20, "held_out": 4, "other": 3}, "few": {"train": 20}},
)


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def shared(tmp_path):
    return jsonl(tmp_path / "shared.jsonl", [{"question": f"question number {i}", "gold": i} for i in range(30)])


@pytest.fixture
def other(tmp_path):
    return jsonl(tmp_path / "other.jsonl", [{"question": f"another {i}", "gold": i} for i in range(4)])


@pytest.fixture
def prepare_all(tmp_path, shared, other):
    """A function that prepares all parts, with other values of some fields of the request."""
    local = {"train": shared, "held_out": shared, "other": other}
    return lambda **changes: prepare(TASK, Preparation(**{"out": tmp_path / "out", "local": local} | changes))


def prepare_other(out, *path, task=TASK):
    return prepare(task, Preparation(out=out, local=dict(zip(["other"], path, strict=False)), parts=("other",)))


def test_parts_of_one_source_share_it_out(tmp_path, prepare_all):
    manifest = prepare_all()
    train, held_out = lines(tmp_path / "out" / "train.jsonl"), lines(tmp_path / "out" / "held_out.jsonl")
    assert (len(train), len(held_out)) == (10, 5)
    questions = [row["input"] for row in train + held_out]
    assert len(set(questions)) == 15 and questions != sorted(questions)  # dealt in another order than published
    for row in train + held_out:
        number = int(row["id"].rsplit("-", 1)[1])
        assert row["input"] == f"question number {number - 1}" and row["label"] == str(number - 1)
        assert row["datasource"] == row["id"].split("-")[0]
    assert manifest["parts"]["train"]["left_over"] == 20 and manifest["parts"]["held_out"]["left_over"] == 25
    # the same seed deals alike, another one otherwise where it deals
    for seed, changed in ((0, []), (1, ["held_out", "train"])):
        again = prepare_all(out=tmp_path / f"again{seed}", seed=seed)["parts"]
        assert sorted(part for part in again if again[part]["sha256"] != manifest["parts"][part]["sha256"]) == changed


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "folder", "splits"])
def test_formats_give_the_same_rows(tmp_path, kind):
    rows = [{"question": f"wie viel ist {i}, ü?\n{i}", "gold": str(i)} for i in range(30)]
    path, data = tmp_path / f"rows.{kind}", datasets.Dataset.from_list(rows)
    write = {
        "jsonl": lambda: jsonl(path, rows),
        "json": lambda: path.write_text(json.dumps(rows)),
        "parquet": lambda: data.to_parquet(path),
        "folder": lambda: data.save_to_disk(path),
        "splits": lambda: datasets.DatasetDict({"test": data, "train": data.select([0])}).save_to_disk(path),
    }
    write[kind]()
    prepare_other(tmp_path / "out", path)
    result = lines(tmp_path / "out" / "other.jsonl")
    assert [(row["input"], row["label"]) for row in result] == [(row["question"], row["gold"]) for row in rows]


ROWS = st.lists(
    st.one_of(
        st.builds(
            lambda text, gold: json.dumps({"question": text, "gold": gold}),
            st.sampled_from(["a b", "A  b", "c", "", None, "d"]),
            st.sampled_from([1, 2, "x", None]),
        ),
        st.sampled_from(['{"question": 1', "[]", '{"gold": 3}', "", "\xff"]),
        # half of a surrogate pair, which Python cannot write, and a whole one
        st.sampled_from([r'{"question": "\ud835?", "gold": 1}', r'{"question": "\ud835\udc65?", "gold": 2}']),
    ),
    min_size=1,
    max_size=12,
)


@given(rows=ROWS)
def test_every_row_is_written_rejected_or_left_over(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("rows")
    # the columns are checked on the first readable row
    rows = [json.dumps({"question": "first", "gold": 7}), *rows]
    (folder / "rows.jsonl").write_bytes("\n".join(rows).encode("latin-1") + b"\n")
    entry = prepare_other(folder, folder / "rows.jsonl")["parts"]["other"]
    written, rejected = lines(folder / "other.jsonl"), lines(folder / "other.rejected.jsonl")
    assert {row["input"] for row in written} <= {"first", "a b", "A  b", "c", "d", "\U0001d465?"}
    expected, seen = Counter(), {}
    for row in rows:
        try:
            row = json.loads(row)
        except ValueError:
            expected["no valid JSON"] += 1
            continue
        if not isinstance(row, dict):
            expected["no JSON object"] += 1
        elif "question" not in row:
            expected["no column question"] += 1
        elif not row["question"]:
            expected["question is empty"] += 1
        elif row["gold"] is None:
            expected["gold is empty"] += 1
        elif row["gold"] == "x":
            expected["label is no number"] += 1
        elif row["question"] == "\ud835?":
            expected["no valid Unicode"] += 1
        else:
            key = row["question"].replace(" ", "").lower()
            if key in seen:
                expected["duplicate" if seen[key] == row["gold"] else "duplicate with another label"] += 1
            else:
                seen[key] = row["gold"]
    assert entry["rejected"] == dict(expected)
    assert len(written) == entry["written"] == len(seen)
    assert entry["read"] == len(rows) == len(written) + len(rejected) + entry["left_over"]
    numbers = sorted([int(row["id"].split("-")[1]) for row in written] + [row["row"] for row in rejected])
    assert numbers == list(range(1, len(rows) + 1))


def test_long_prompts_are_left_out(tmp_path, prepare_all):
    entry = prepare_all(tokens=len, max_tokens=len("question number 9"))["parts"]["train"]
    short = {f"question number {i}" for i in range(10)}
    assert {row["input"] for row in lines(tmp_path / "out" / "train.jsonl")} <= short
    assert entry["rejected"]["prompt too long"] == 10 - entry["written"] > 0
    assert "18 tokens, at most 17" in (tmp_path / "out" / "train.rejected.jsonl").read_text()


def test_no_usable_row_is_an_error(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [{"question": "a", "gold": "x"}] * 3)
    with pytest.raises(ConfigError, match=r"other: none of 3 rows .*: 3 x label is no number"):
        prepare_other(tmp_path / "out", path)
    path = jsonl(tmp_path / "few.jsonl", [{"question": str(i), "gold": "1"} for i in range(4)])
    with pytest.raises(ConfigError, match=r"train: none of 4 .*: 4 x in another part: .* after the first 5$"):
        prepare(TASK, Preparation(out=tmp_path / "out", local={"train": path}, parts=("train",)))
    assert {file.name for file in (tmp_path / "out").iterdir()} <= {"other.rejected.jsonl", "train.rejected.jsonl"}


def test_second_call_changes_nothing(tmp_path, prepare_all, monkeypatch):
    first = prepare_all()
    files = [tmp_path / "out" / f"{part}.jsonl" for part in TASK.parts]
    stamps = [path.stat().st_mtime_ns for path in files]
    monkeypatch.setattr(build, "_Build", None)  # nothing may be made
    assert prepare_all() == first and [path.stat().st_mtime_ns for path in files] == stamps


def test_changes_are_noticed(tmp_path, other, prepare_all):
    first = prepare_all()
    path = tmp_path / "out" / "other.jsonl"
    path.write_text(path.read_text() + "\n")  # somebody edited the file
    assert prepare_all() == first and len(path.read_text().splitlines()) == 4
    jsonl(other, [{"question": "new", "gold": 1}])  # the data changed
    assert prepare_all()["parts"]["other"]["written"] == 1
    assert prepare_all(limits={"train": 2})["parts"]["train"]["written"] == 2
    for change in ({"seed": 3}, {"limits": {"train": 3}}, {"style": "loud"}):
        changed = prepare_all(**change)
        assert changed["parts"]["train"]["sha256"] != first["parts"]["train"]["sha256"], change
    assert all(row["input"].startswith("Solve: question") for row in lines(tmp_path / "out" / "train.jsonl"))


@pytest.mark.parametrize("changed", ["task.py", "rules.py"])
def test_another_version_of_the_task_makes_its_files_anew(tmp_path, other, changed, monkeypatch):
    """Also another version of a file beside a built-in one, because it may judge the labels."""
    monkeypatch.setattr(tasks, "__file__", str(tmp_path / "__init__.py"))
    file = tmp_path / "task.py"
    file.write_text("one")
    prepare_other(tmp_path / "out", other, task=replace(TASK, file=file))
    (tmp_path / changed).write_text("two")
    loud = replace(TASK, file=file, prompts={"plain": lambda problem: problem.text.upper()})
    prepare_other(tmp_path / "out", other, task=loud)
    assert lines(tmp_path / "out" / "other.jsonl")[0]["input"] == "ANOTHER 0"


def test_interrupted_call_goes_on_to_the_same_files(tmp_path, prepare_all, monkeypatch):
    whole = prepare_all(out=tmp_path / "whole")
    real = os.replace
    for stop in itertools.count(1):
        left = iter(range(stop))

        def replace(source, target, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            real(source, target)

        out = tmp_path / f"stopped{stop}"
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            try:
                prepare_all(out=out)
                break
            except KeyboardInterrupt:
                pass
        assert prepare_all(out=out) == whole
        for name in ("train.jsonl", "held_out.jsonl", "other.jsonl", "overlap.jsonl", "train.rejected.jsonl"):
            assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    # three parts with their rejected rows and a manifest each, overlap.jsonl and the last manifest
    assert stop == 3 * 3 + 2


def test_overlap_is_counted_and_can_be_dropped(tmp_path, shared, other):
    problems = [("Question  number 3.", 3), ("question number 30", 30), ("something else altogether", 1)]
    jsonl(other, [{"question": question, "gold": gold} for question, gold in problems])
    task = replace(TASK, train=Part("train", SHARED), benchmarks={"other": Part("Other", OTHER)})
    local = {"train": shared, "other": other}
    manifest = prepare(task, Preparation(out=tmp_path / "out", local=local))
    assert manifest["overlap"]["benchmarks"] == {"other": {"same": 1}}
    assert lines(tmp_path / "out" / "overlap.jsonl") == [{"train": "train-4", "test": "other-1"}]
    assert len(lines(tmp_path / "out" / "train.jsonl")) == 30
    for out in ("out", "at_once"):
        dropped = prepare(task, Preparation(out=tmp_path / out, local=local, drop_overlap=True))
        assert dropped["overlap"]["benchmarks"] == {"other": {"same": 0}}
        assert dropped["parts"]["train"]["rejected"] == {"in a benchmark": 1}
        assert dropped["parts"]["other"]["rejected"] == {}
        assert list(dropped["parts"]) == ["other", "train"]  # in one call: the benchmarks come first
    train_only = Preparation(out=tmp_path / "alone", local={"train": shared}, parts=("train",), drop_overlap=True)
    with pytest.raises(ConfigError, match=r"--overlap is drop, and other is not prepared in .*alone"):
        prepare(task, train_only)


def test_generated_problems(tmp_path):
    manifest = prepare(TASK, Preparation(out=tmp_path, generator="counting", limits={"train": 7}))
    written = {part: entry["written"] for part, entry in manifest["parts"].items()}
    assert written == {"held_out": 4, "other": 3, "train": 7}
    assert manifest["parts"]["train"]["origin"] == {"from": "generator counting"}
    assert prepare(TASK, Preparation(out=tmp_path, generator="counting", limits={"train": 7})) == manifest
    with pytest.raises(ConfigError, match="train: there are 100 problems, not 101"):
        prepare(TASK, Preparation(out=tmp_path, generator="counting", limits={"train": 101}))


def test_images_are_written_beside_the_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    png, jpg = b"\x89PNG rest", b"\xff\xd8 rest"
    task = replace(TASK, problem=lambda row: Problem(row["question"], "1", row["question"], (png, jpg)))
    path = jsonl(tmp_path / "rows.jsonl", [{"question": "a", "gold": 1}])
    prepare_other(Path("out"), path, task=task)
    (row,) = lines(tmp_path / "out" / "other.jsonl")
    first, second = map(Path, row["images"])
    assert first.is_absolute() and first.name == "other-1-0.png" and first.read_bytes() == png
    assert second.name == "other-1-1.jpg" and second.read_bytes() == jpg
    second.unlink()
    prepare_other(Path("out"), path, task=task)
    assert second.read_bytes() == jpg
    Path("out").rename("moved")
    prepare_other(Path("moved"), path, task=task)
    (row,) = lines(tmp_path / "moved" / "other.jsonl")
    assert [Path(image).parent for image in row["images"]] == [tmp_path / "moved" / "images"] * 2


@pytest.mark.parametrize(("changes", "says"), [
    ({"parts": ("aime",)}, "part is 'aime'; toy has held_out, other, train"),
    ({"style": "quiet"}, "prompt is 'quiet'; toy has plain, loud"),
    ({"generator": "magic", "local": {}}, "generator is 'magic'; toy has counting"),
    ({"generator": "counting"}, "generator is 'counting' and there are local copies"),
    ({"limits": {"test": 1}}, "part is 'test'"),
    ({"generator": "few", "parts": ("other",), "local": {}}, "part is 'other'; generator few has train, .*other=N"),
])  # fmt: skip
def test_unknown_names(prepare_all, changes, says):
    with pytest.raises(ConfigError, match=says):
        prepare_all(**changes)


def test_a_task_without_published_data_needs_a_generator(tmp_path):
    with pytest.raises(ConfigError, match="generator is None; toy has counting, few, and no published data"):
        prepare(replace(TASK, problem=None), Preparation(out=tmp_path))


@pytest.mark.parametrize(("name", "content", "says"), [
    ("none.jsonl", None, "other: local copy is .*none.jsonl"),
    ("rows.xlsx", b"", "it must be a folder or a file of .jsonl, .json, .parquet"),
    ("rows.json", b"{", "rows.json cannot be read"),
    ("rows.json", b"{}", "it is a dict"),
    ("rows.parquet", b"PAR1", "rows.parquet cannot be read"),
    ("rows.jsonl", b'{"prompt": "a", "gold": 1}', "has the columns prompt, gold; it must have question, gold"),
])  # fmt: skip
def test_files_that_cannot_be_read(tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        prepare_other(tmp_path / "out", tmp_path / name)


def test_hub_that_cannot_be_reached(tmp_path, monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("Couldn't reach it")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(source_rows, "_answers", lambda endpoint: True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "off")  # huggingface_hub takes it as it takes 0
    request = Preparation(out=tmp_path / "out", parts=("other", "train"))  # the fault may be of this data set only
    with pytest.raises(ConfigError, match=r"someone/other .*hub: .*Couldn't reach it.*--local other=PATH .*gold\)$"):
        prepare(TASK, request)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        prepare_other(tmp_path / "out")


def test_hub_that_does_not_answer(tmp_path, monkeypatch, shared):
    """One error names all parts that are missing. The libraries are not asked to use the network."""
    offline = []

    def load_dataset(*args, **kwargs):
        offline.append((datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE))
        raise ConnectionError("Couldn't reach it")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(source_rows, "getproxies", dict)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError) as error:
            prepare(TASK, Preparation(out=tmp_path / "out", local={"train": shared}))
    assert offline == [(True, True)] and before == (datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE)
    parts = ("held_out: someone/shared ", "it does not answer", "--local held_out=PATH", "--local other=PATH")
    assert all(part in str(error.value) for part in parts)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert source_rows._answers(f"http://127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize(("address", "port"), [("http://one", 80), ("https://one", 443), ("http://one:8080", 8080)])
def test_the_port_of_a_hub_is_that_of_its_address(address, port, monkeypatch):
    asked = []
    monkeypatch.setattr(source_rows, "getproxies", dict)
    monkeypatch.setattr(socket, "create_connection", lambda place, timeout: asked.append(place) or socket.socket())
    assert source_rows._answers(address) and asked == [("one", port)]


def test_hub_rows_and_commit_until_a_copy_takes_their_place(tmp_path, other, monkeypatch):
    data = datasets.Dataset.from_list([{"question": f"number {i}", "gold": i} for i in range(5)])
    commit = "0123456789abcdef0123456789abcdef01234567"
    data.info.download_checksums = {f"hf://datasets/someone/other@{commit}/data.parquet": {}}
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or data)
    for _ in range(2):  # it is kept, without asking the hub again
        manifest = prepare_other(tmp_path / "out")
        assert asked == [(("someone/other", None), {"split": "test"})]
    origin = {"from": "someone/other", "config": None, "split": "test", "commit": commit}
    assert manifest["parts"]["other"]["origin"] == origin and len(lines(tmp_path / "out" / "other.jsonl")) == 5
    assert prepare_other(tmp_path / "out", other)["parts"]["other"]["origin"]["from"] == str(other)
    assert len(lines(tmp_path / "out" / "other.jsonl")) == 4


@pytest.mark.parametrize(("text", "says"), [('{"format": 1, "task": "math"}', "has task math"), ("{", "is not JSON")])
def test_manifest_of_another_task(tmp_path, text, says):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_manifest(tmp_path, "toy")


def test_command(tmp_path, capsys):
    """The task is in a file of its own: the beginning of this one."""
    task = tmp_path / "toy_task.py"
    source = Path(__file__).read_text().split("def jsonl(")[0]
    task.write_text(source.replace("import pytest\n", "").replace("from bapo_openrlhf.cli.main import run\n", ""))
    rows = [{"question": f"question number {i}", "gold": i} for i in range(30)]
    shared, out = jsonl(tmp_path / "shared.jsonl", [*rows, rows[3]]), tmp_path / "out[" / "v2]"  # rich's markup
    words = ["prepare", str(task), "--out", str(out), "--parts", "held_out, train"]
    local = ["--local", f"train={shared}", "--local", f"held_out={shared}", "--size", "train=4"]
    assert run([*words, *local]) == 0
    printed = capsys.readouterr().out
    assert "toy in" in printed and "out[/v2]" in "".join(printed.split())
    assert "1 duplicate" in printed and "no problem of held_out" in printed and len(lines(out / "train.jsonl")) == 4
    (out / "train.rejected.jsonl").unlink()
    assert run([*words, *local]) == 0 and not (out / "train.rejected.jsonl").exists()
    other = jsonl(tmp_path / "other.jsonl", [rows[3]])
    words[-1] = "other,train"
    local = ["--local", f"train={shared}", "--local", f"other={other}", "--seed", "3"]
    assert run([*words, *local, "--overlap", "drop"]) == 0
    assert all(row["label"] != "3" for row in lines(out / "train.jsonl"))
    capsys.readouterr()
    for bad, says in (
        ([*words, "--local", "train"], "--local is 'train'; it must be PART=PATH"),
        ([*words, "--local", "train=no.jsonl"], "--local is 'train=no.jsonl'"),
        ([*words, "--size", "train=0"], "--size is 'train=0'; it must be PART=N"),
        (["prepare", "chess"], "task is 'chess'; it must be one of math, countdown, geometry"),
        (["prepare", str(tmp_path / "no.py")], "there is no such file"),
    ):
        assert run(bad) == 2 and says in capsys.readouterr().err


def test_tokens_are_those_of_the_chat(tmp_path):
    tokenizer = user_file.load("base model", BASE_MODEL).make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "plain")
    tokenizer.chat_template = "{% for message in messages %}(({{ message['content'] }})){% endfor %}"
    tokenizer.save_pretrained(tmp_path / "chat")
    assert _token_counter(str(tmp_path / "plain"))("1+2=") == 4 and _token_counter(str(tmp_path / "chat"))("1+2=") == 8
    with pytest.raises(ConfigError, match=r"--tokenizer is .*none; it cannot be loaded"):
        _token_counter(str(tmp_path / "none"))


def test_text_key_keeps_what_tells_problems_apart():
    assert text_key(r"Find $ \dfrac{1}{2} \, x $.") == text_key(r"find \frac{1}{2}x")
    assert text_key("Find 2 - 3") != text_key("Find 2 + 3")
    assert text_key(r"$\left(1, 2\right)$") == text_key("(1,2)") != text_key("[1,2)")
    assert text_key(r"\leftarrow") != text_key("arrow")
