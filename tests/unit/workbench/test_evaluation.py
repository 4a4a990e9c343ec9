"""An evaluation from the command line to its folder. vLLM is replaced; the judge's processes are real."""

import hashlib
import json
import os
import resource
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
import yaml
from PIL import Image

from bapo_openrlhf.cli import evaluate as cli
from bapo_openrlhf.errors import ConfigError, RunError
from bapo_openrlhf.flags.config import VerifierConfig
from bapo_openrlhf.record.owner import owned
from bapo_openrlhf.tasks import TASKS, get_task
from bapo_openrlhf.training.engine.pictures import pictures
from bapo_openrlhf.workbench.evaluation import generate, problems, run, store
from bapo_openrlhf.workbench.evaluation import results as results_file
from bapo_openrlhf.workbench.evaluation.generate import EncodedPrompt, SampledResponse
from bapo_openrlhf.workbench.evaluation.problems import Request, Sampling, check

REWARD = """
import os

def reward_func(queries, prompts, labels, **kwargs):
    assert len(queries) == 1
    response = queries[0].removeprefix(prompts[0])
    if "crash" in response:
        os._exit(1)
    if "raise" in response:
        raise ValueError("cannot judge")
    return {"rewards": [float(answer(response) == labels[0])], "scores": [0.5]}

def answer(response):
    return response.split()[-1] if response else None
"""


class FakePrompter:
    """Makes prompts with one token for each character."""

    longest = 60

    def __init__(self, model, *, chat, images):
        self.note = None

    def __call__(self, problem):
        text = f"<user>{problem.input}<assistant>"
        return EncodedPrompt(text, [0] * len(text), problem.images, len(text))


class FakeModel:
    """Says "it is N". N within 0..2 is a digest of seed, problem and run. `calls` holds the problems of each call."""

    def __init__(self, fail_after=None):
        self.calls, self.fail_after, self.longest = [], fail_after, None

    def __call__(self, request, asked, max_model_len):
        self.calls.append(list(asked))
        self.longest, sampling = max_model_len, request.sampling
        for number, ((benchmark, identity), prompt) in enumerate(asked.items()):
            if number == self.fail_after:
                raise RunError("the engine died")
            texts = [self.say(sampling.seed, benchmark, identity, i) for i in range(sampling.runs)]
            responses = [SampledResponse(prompt.text + t, t, len(t), i == 0) for i, t in enumerate(texts)]
            yield (benchmark, identity), responses

    def say(self, seed, benchmark, identity, sample):
        return f"it is {hashlib.sha256(f'{seed} {benchmark} {identity} {sample}'.encode()).digest()[0] % 3}"


def write_problems(path, count):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"id": f"p{i}", "input": f"What is {i} mod 3?", "label": str(i % 3)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def load(spec, data, **fields):
    sampling = Sampling(runs=1, temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=20, seed=42)
    return problems.load(spec, Request("model", "name", [spec], Path("out"), sampling, [1], data=data, **fields))


ORIGIN = results_file.provenance()


@pytest.fixture
def request_(tmp_path, monkeypatch):
    monkeypatch.setattr(results_file, "provenance", lambda: ORIGIN)  # once for all, because git is asked
    monkeypatch.setattr(run, "VerifierConfig", lambda: VerifierConfig(processes=2))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "model" / "pytorch_model.bin").touch()
    (tmp_path / "reward.py").write_text(REWARD)
    write_problems(tmp_path / "mods.jsonl", 8)
    write_problems(tmp_path / "more.jsonl", 3)
    return Request(
        model=str(tmp_path / "model"),
        name="a model",
        benchmarks=[f"mods={tmp_path / 'mods.jsonl'}"],
        out=tmp_path / "out",
        sampling=Sampling(runs=6, temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=20, seed=42),
        ks=[1, 3, 6],
        reward=tmp_path / "reward.py",
    )


def evaluate(request, model=None, prompter=FakePrompter):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "Prompter", prompter)
        patch.setattr(generate, "generate", model or FakeModel())
        return run.evaluate(request)


def test_one_folder_is_for_one_evaluation_at_a_time(request_):
    taken = {"field": f"--out is {request_.out}", "what": "evaluation", "instead": "give another --out"}
    with owned(request_.out, **taken), pytest.raises(ConfigError, match=r"--out is .*/out.*; .*give another --out"):
        evaluate(request_)
    evaluate(request_)


def test_a_row_that_the_disk_cannot_hold_leaves_nothing(tmp_path):
    """A later row may fit, and would stand behind the torn one."""
    store.append_row(tmp_path, "b", {"id": "1"})
    before, limits = (tmp_path / "b.jsonl").read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            store.append_row(tmp_path, "b", {"id": "x" * 100_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "b.jsonl").read_bytes() == before


def lines(request):
    return [json.loads(line) for line in (request.out / "mods.jsonl").read_text().splitlines()]


def test_each_problem_is_a_line_with_all_that_was_said(request_):
    evaluate(request_)
    model, rows = FakeModel(), lines(request_)
    assert [row["id"] for row in rows] == [f"p{i}" for i in range(8)]
    for i, row in enumerate(rows):
        said = [model.say(42, "mods", f"p{i}", sample) for sample in range(6)]
        assert row == {
            "id": f"p{i}", "input": f"What is {i} mod 3?", "prompt": f"<user>What is {i} mod 3?<assistant>",
            "label": str(i % 3), "responses": said, "scores": [float(text[-1] == str(i % 3)) for text in said],
            "failures": [None] * 6, "answers": [text[-1] for text in said], "tokens": [7] * 6,
            "truncated": [True] + [False] * 5,
        }  # fmt: skip


def test_a_problem_that_is_a_conversation_is_judged_and_kept_with_a_chat_template(request_, tmp_path):
    chat = [{"role": "user", "content": "1?"}]
    (tmp_path / "mods.jsonl").write_text(json.dumps({"id": "p0", "input": chat, "label": "1"}) + "\n")
    with pytest.raises(ConfigError, match=r"row 1: input is .*data.apply_chat_template"):
        evaluate(replace(request_, chat_template=False))
    evaluate(replace(request_, chat_template=True, max_model_len=99))
    assert store.read_rows(request_.out, "mods")["p0"]["input"] == chat


def test_rewards_on_another_scale_are_solved_with_full_marks(request_, tmp_path):
    """From 0 to 100, wrong answers have 3, and right ones 100 less a rounding step of float32."""
    right = "answer(response) == labels[0]"
    unit = evaluate(request_)["benchmarks"]["mods"]["metrics"]
    request_.reward.write_text(REWARD.replace(f"float({right})", f"99.99999 if {right} else 3.0"))
    wide = replace(request_, reward_range=(Fraction(0), Fraction(100)), out=tmp_path / "wide")
    metrics = evaluate(wide)["benchmarks"]["mods"]["metrics"]
    assert metrics["avg@6"]["value"] == pytest.approx(3 + 0.97 * unit["avg@6"]["value"])
    assert metrics | {"avg@6": None} == unit | {"avg@6": None}
    assert json.loads((wide.out / "settings.json").read_text())["benchmarks"]["mods"]["reward_range"] == ["0", "100"]


def test_rewards_outside_of_the_range_are_counted_and_without_answer_there_are_no_votes(request_):
    rewards = "{'0': 0.25, '1': 2.0, '2': -1.0}"
    body = f"def reward_func(queries, prompts, labels):\n    return {{'rewards': {rewards}[labels[0]]}}\n"
    request_.reward.write_text(body)
    entry = evaluate(request_)["benchmarks"]["mods"]
    assert lines(request_)[0]["answers"] is None and entry["outside"] == 5 * 6
    metrics = {name: estimate["value"] for name, estimate in entry["metrics"].items()}
    assert list(metrics) == ["avg@6", "pass@1", "pass@3", "pass@6", "truncated", "tokens"]
    assert (metrics["avg@6"], metrics["pass@6"]) == (100 * (3 * 0.25 + 3 * 2 - 2) / 8, 100 * 3 / 8)
    assert "30 rewards are not in 0 to 1; --reward-range" in (request_.out / "results.md").read_text()


def test_the_answer_of_a_vote_is_that_of_the_judged_text(request_, tmp_path):
    """With the <think> with which the prompt ends."""

    class Thinking(FakePrompter):
        def __call__(self, problem):
            prompt = super().__call__(problem)
            return replace(prompt, text=f"{prompt.text}<think>")

    own = tmp_path / "own.py"
    own.write_text(f"{REWARD}\ndef answer(response):\n    return response[:7]\n")
    evaluate(replace(request_, reward=own), prompter=Thinking)
    assert set(lines(request_)[0]["answers"]) == {"<think>"}


def test_results_say_how_they_were_made(request_):
    results = evaluate(request_)
    assert json.loads((request_.out / "results.json").read_text()) == results
    settings = json.loads((request_.out / "settings.json").read_text())
    assert results["settings"] == settings and settings["sampling"] == vars(request_.sampling)
    digest = hashlib.sha256(Path(request_.benchmarks[0].partition("=")[2]).read_bytes()).hexdigest()
    assert settings["benchmarks"]["mods"]["sha256"] == digest
    assert results["k"] == [1, 3, 6] and {"commit", "command", "versions"} <= set(results)
    files = "settings.json mods.jsonl results.json results.csv results.md"
    assert {path.name for path in request_.out.iterdir()} == {*files.split()}


def test_failures_of_the_judge_are_wrong_counted_and_shown(request_):
    class Hostile(FakeModel):
        def say(self, seed, benchmark, identity, sample):
            return {("p1", 2): "crash 1", ("p1", 4): "raise 1"}.get((identity, sample), f"it is {int(identity[1]) % 3}")

    entry = evaluate(request_, Hostile())["benchmarks"]["mods"]
    row = lines(request_)[1]
    assert row["scores"] == [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    assert row["failures"] == [None, None, "crashed", None, "raised", None]
    assert entry["unjudged"] == 2 and entry["metrics"]["avg@6"]["value"] == pytest.approx(100 * 46 / 48)


@pytest.mark.parametrize(("body", "named"), [("1 / 0 if response else None", "ZeroDivisionError"), ("7", "returned 7")])
def test_an_answer_that_fails_ends_the_run_by_name(request_, tmp_path, body, named):
    own = tmp_path / f"of_{named.split()[-1]}.py"  # a process loads a file only once
    own.write_text(f"{REWARD}\ndef answer(response):\n    return {body}\n")
    with pytest.raises(RunError, match=rf"{own.name}: answer .*{named}"):
        evaluate(replace(request_, reward=own))


# ── resuming ──


def test_generation_waits_for_a_slow_judge(request_, monkeypatch):
    unjudged = []

    class Watched(FakeModel):
        def __call__(self, *words):
            for number, answer in enumerate(super().__call__(*words)):
                unjudged.append(number - len(store.read_rows(request_.out, "mods")))
                yield answer

    monkeypatch.setattr(run, "BACKLOG", 2)
    request_.reward.write_text(REWARD.replace("response = ", "__import__('time').sleep(0.05)\n    response = "))
    evaluate(request_, Watched())
    assert max(unjudged) == 2


def comparable(folder):
    return json.loads((folder / "results.json").read_text())["benchmarks"], (folder / "mods.jsonl").read_bytes()


@pytest.mark.parametrize(("done", "cut"), [(0, 0), (5, 0), (5, 1), (5, 30)])
def test_resumed_equals_uninterrupted(request_, done, cut):
    """Also if a crash left the last line incomplete, or only its line end is missing."""
    whole = replace(request_, out=request_.out.with_name("whole"))
    evaluate(whole)
    with pytest.raises(RunError, match="the engine died"):
        evaluate(request_, FakeModel(fail_after=done))
    assert len(store.read_rows(request_.out, "mods")) == done and not (request_.out / "results.json").exists()
    if cut:
        path, done = request_.out / "mods.jsonl", done - 1
        path.write_bytes(path.read_bytes()[:-cut])
    model = FakeModel()
    evaluate(request_, model)
    assert model.calls == [[("mods", f"p{i}") for i in range(done, 8)]]
    assert comparable(request_.out) == comparable(whole.out)


def with_value(request, name, value):
    """The request with another value of one of its fields, or of those of its sampling."""
    if hasattr(request.sampling, name):
        name, value = "sampling", replace(request.sampling, **{name: value})
    return replace(request, **{name: value})


def test_resume_with_another_setting_is_refused(request_):
    evaluate(request_)
    changes = {"runs": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_new_tokens": 21, "seed": 1,
               "chat_template": False, "limit": 7}  # fmt: skip
    for name, value in changes.items():
        with pytest.raises(ConfigError, match=rf"^{name} is .*settings\.json"):
            evaluate(with_value(request_, name, value))


def test_resume_with_another_file_is_refused(request_, tmp_path):
    evaluate(request_)
    files = {"model/config.json": "model", "mods.jsonl": "digest of mods's problems"}
    for file, what in (files | {"reward.py": "digest of mods's reward file"}).items():
        path = tmp_path / file
        content, time = path.read_bytes(), path.stat().st_mtime_ns
        path.write_bytes(content + b"\n")
        with pytest.raises(ConfigError, match=f"^{what} is "):
            evaluate(request_)
        path.write_bytes(content)
        os.utime(path, ns=(time, time))
        evaluate(request_)


def test_benchmarks_and_limit_may_grow_and_things_may_move(request_, tmp_path):
    evaluate(replace(request_, limit=2))
    more = [*request_.benchmarks, f"more={tmp_path / 'more.jsonl'}"]
    model = FakeModel()
    evaluate(replace(request_, limit=4, benchmarks=more), model)
    evaluate(replace(request_, benchmarks=more), model)
    assert model.calls == [
        [("mods", "p2"), ("mods", "p3"), ("more", "p0"), ("more", "p1"), ("more", "p2")],
        [("mods", f"p{i}") for i in range(4, 8)],
    ]
    with pytest.raises(ConfigError, match=r"has the benchmark more; name it too"):
        evaluate(request_)
    (tmp_path / "model").rename(tmp_path / "moved")
    moved, before = replace(request_, benchmarks=more, model=str(tmp_path / "moved"), name="new"), lines(request_)
    results = evaluate(replace(moved, ks=[2]), model, prompter=None)  # it is finished, so it asks nothing
    assert len(model.calls) == 2 and results["name"] == "new" and lines(request_) == before
    assert "pass@2" in results["benchmarks"]["mods"]["metrics"]


def test_settings_of_a_failed_start_bind_nobody(request_):
    with pytest.raises(RunError):
        evaluate(request_, FakeModel(fail_after=0))
    evaluate(replace(request_, sampling=replace(request_.sampling, seed=7)))


@pytest.fixture
def long_request(request_, tmp_path):
    with (tmp_path / "mods.jsonl").open("a") as file:
        file.writelines(json.dumps({"id": f"long{i}", "input": "x" * 40, "label": "0"}) + "\n" for i in range(2))
    return request_


def test_long_problems_are_refused_by_id_before_anything_is_asked(long_request):
    """A prompt has 57 tokens, and a response 20."""
    model = FakeModel()
    with pytest.raises(ConfigError, match=r"2 of 10 prompts, .* 57 .* 60 tokens .* 20: long0, long1\. .*--skip-long"):
        evaluate(long_request, model)
    with pytest.raises(ConfigError, match="in 76 tokens"):
        evaluate(replace(long_request, max_model_len=76), model)
    assert model.calls == [] and not long_request.out.exists()
    evaluate(replace(long_request, max_model_len=77))


def test_skipped_problems_are_named_and_shown(long_request):
    model = FakeModel()
    for _ in range(2):  # made again, it says the same
        entry = evaluate(replace(long_request, skip_long=True), model)["benchmarks"]["mods"]
        assert entry["left_out"] == ["long0", "long1"] and entry["problems"] == 8
    assert model.longest == len("<user>What is 7 mod 3?<assistant>") + 20  # the engine gets the length that is needed
    with pytest.raises(ConfigError, match="10 of 10 prompts"):
        evaluate(replace(long_request, skip_long=True, max_model_len=25, out=long_request.out.with_name("other")))


# ── bad input ──


NUMBERS = [
    ("runs", 0), ("temperature", -0.1), ("temperature", 0), ("top_p", 0), ("top_k", 0), ("max_new_tokens", 0),
    ("seed", -1), ("limit", 0), ("max_model_len", 0), ("max_num_seqs", 0), ("tensor_parallel_size", 0),
    ("gpu_memory_utilization", 1.5),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *((name, value, f"{name} is {value}") for name, value in NUMBERS),
        ("ks", [7], "k is 7"), ("ks", [0], "k is 0"), ("benchmarks", [], "benchmarks is empty"),
        ("benchmarks", ["a=x", "a=y"], "benchmark a is named twice"),
        ("benchmarks", ["aime24"], "reward is .*NAME=FILE"),
        ("benchmarks", ["gsm9k", "a=x"], "benchmark is 'gsm9k'; it must be one of aime24"),
        ("benchmarks", ["../a=x"], "benchmark is .*NAME=FILE"), ("benchmarks", ["aime24=x"], "name aime24"),
        ("benchmarks", ["settings=x"], "name settings"), ("benchmarks", ["gsm8k=x"], "name gsm8k"),
        ("benchmarks", ["a=~no_such_user/x"], "no file ~no_such_user/x"),
        ("model", "no/such/./model", "no such model folder"), ("reward", Path("none.py"), r"reward is .*none\.py"),
        ("reward", None, "needs --reward FILE"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(request_, name, value, message):
    model = FakeModel()
    with pytest.raises(ConfigError, match=message):
        evaluate(with_value(request_, name, value), model)
    assert model.calls == [] and not request_.out.exists()


@pytest.mark.parametrize(("line", "message"), [
    ("{", "line 2: "),
    ('{"input": "x"}', "row 2: label is null"),
    ('{"input": "x", "label": "x", "id": "p0"}', "row 2: the id 'p0'"),
    ('{"input": "x", "label": "x", "id": [1]}', r"id is \[1\]"),
    ('{"input": "x", "label": "x", "images": ["none.png"]}', "there are 1 images and 0 <image> tags"),
    ('{"input": "<image>x", "label": "x", "images": ["none.png"]}', "row 2: there is no image none.png"),
    ('{"input": "<image>x", "label": "x", "images": [1]}', "row 2: an image is of type int"),
])  # fmt: skip
def test_bad_rows_are_named(request_, tmp_path, line, message):
    first = (tmp_path / "mods.jsonl").read_bytes().splitlines(keepends=True)[0]
    (tmp_path / "mods.jsonl").write_bytes(first + line.encode("latin-1") + b"\n")
    with pytest.raises(ConfigError, match=message):
        evaluate(request_)


def test_images_that_are_no_files_are_taken_as_in_training(request_, tmp_path):
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
    given = [f"data:image/png;base64,{pixel}", "http://here/a.png", "https://here/a.png"]
    (tmp_path / "seen.jsonl").write_text(json.dumps({"input": "<image>" * 3, "label": "x", "images": given}) + "\n")
    (problem,) = load(f"mine={tmp_path / 'seen.jsonl'}", tmp_path, reward=request_.reward).problems
    assert problem.images == tuple(given)
    (image,) = pictures(list(problem.images[:1]))
    assert (image.size, image.getpixel((0, 0))) == ((1, 1), (255, 0, 0))


def test_a_tokenizer_with_code_of_its_own_is_loaded_as_in_training(tokenizer_folder, keep_environment, monkeypatch):
    """evalscope#792: nobody is asked whether that is right, as a run does not ask."""
    code = "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast):\n    theirs = True\n"
    (tokenizer_folder / "tokenization_own.py").write_text(code)
    file = tokenizer_folder / "tokenizer_config.json"
    fields = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "tokenization_own.Own"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    make = generate.Prompter(str(tokenizer_folder), chat=True, images=False)
    assert make._processor.theirs and make(problems.BenchmarkProblem("1", "1?", "2")).length > 0


@pytest.mark.parametrize("body", ["import nothing_like_this", "x = 1", "def reward_func(*a):\n    return 'good'"])
def test_a_reward_file_without_rewards_is_found_before_the_model_loads(request_, body):
    request_.reward.write_text(body)
    model = FakeModel()
    with pytest.raises(ConfigError, match=r"reward file gives no reward.*reward\.py"):
        evaluate(request_, model)
    assert model.calls == [] and not request_.out.exists()


@pytest.mark.parametrize("task", TASKS)
def test_benchmarks_of_a_task_are_read_from_its_folder(task, tmp_path):
    for name, part in get_task(task).benchmarks.items():
        with pytest.raises(ConfigError, match=rf"{task}/{name}\.jsonl; `bapo-openrlhf prepare {task}`"):
            load(name, tmp_path)
        write_problems(tmp_path / task / f"{name}.jsonl", 3)
        benchmark = load(name, tmp_path, limit=2)
        assert (benchmark.title, benchmark.size, len(benchmark.problems)) == (part.title, 3, 2)
        assert benchmark.reward == get_task(task).file.resolve()


def test_generated_problems_are_known_as_such(tmp_path):
    write_problems(tmp_path / "countdown" / "cd34.jsonl", 1)
    assert load("cd34", tmp_path).generator is None
    parts = {"cd34": {"asked": {"generator": "small"}}, "cd4": {"asked": {"generator": "other"}}}
    manifest = tmp_path / "countdown" / "manifest.json"
    manifest.write_text(json.dumps({"format": 1, "task": "countdown", "parts": parts}))
    assert load("cd34", tmp_path).generator == "small"
    manifest.write_text(manifest.read_text()[:-9])
    with pytest.raises(ConfigError, match=r"manifest\.json is not JSON"):
        load("cd34", tmp_path)


def test_columns_are_those_of_the_configuration_and_ids_are_made_where_there_are_none(tmp_path, parse_words):
    """For files of one's own; those of tasks have the same columns always."""
    rows = '{"question": "1+1", "answer": 2, "input": "no", "label": "no"}\n\n{"question": "y", "answer": 3, "id": 9}\n'
    (tmp_path / "mine.jsonl").write_text(rows)
    (tmp_path / "reward.py").touch()
    config = tmp_path / "mine.yaml"
    config.write_text(
        "algorithm: grpo\nrollout: {n_samples_per_prompt: 2}\nactor: {model_name_or_path: m}\n"
        "reward: {remote_url: r.py}\n"
        "data: {prompt_dataset: d.jsonl, input_key: question, label_key: answer, image_key: pictures}\n"
    )
    columns = parse_words("--config", str(config)).columns
    assert (columns, parse_words().columns) == (("question", "answer", "pictures"), ("input", "label", "images"))
    mine = load(f"a={tmp_path / 'mine.jsonl'}", tmp_path, reward=tmp_path / "reward.py", columns=columns)
    assert [(one.id, one.input, one.label) for one in mine.problems] == [("a-1", "1+1", 2), ("9", "y", 3)]
    write_problems(tmp_path / "countdown" / "cd34.jsonl", 1)
    assert load("cd34", tmp_path, columns=columns).problems[0].input == "What is 0 mod 3?"


def test_another_model_in_the_same_place_is_noticed(tmp_path):
    """In its weights, in their sizes, in a file that is new. What is no part of the model does not matter."""
    for name in ("config.json", "pytorch_model.bin"):
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (1, 1))
    seen = [store.files_of(str(tmp_path))]
    (tmp_path / "optimizer.log").write_text("no part of the model")
    assert store.files_of(str(tmp_path)) == seen[0]
    for name, content, time in (("config.json", "{}", 2), ("config.json", "{ }", 2), ("tokenizer.json", "", 1)):
        (tmp_path / name).write_text(content)
        os.utime(tmp_path / name, (time, time))
        seen.append(store.files_of(str(tmp_path)))
    assert len(set(seen)) == 4 and store.files_of("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"


def test_prompts_are_those_of_training(tokenizer_folder, keep_environment):
    from openrlhf.datasets.prompts_dataset import preprocess_data

    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    make = generate.Prompter(str(tokenizer_folder), chat=True, images=False)
    assert make.longest == 77 and make.note is None
    for text in ("What is 1 + 1?", "  é \n", "<image>Find x.", "a <image> b<image>", "<image>"):
        expected, _ = preprocess_data({"input": text}, None, "input", None, tokenizer.apply_chat_template)
        prompt = make(problems.BenchmarkProblem("1", text, "2"))
        assert prompt.text == expected
        # As OpenRLHF's executor: no special tokens beyond the template's.
        assert prompt.token_ids == tokenizer(expected, add_special_tokens=False)["input_ids"]
        assert prompt.length == len(expected.encode())
    assert tokenizer("x")["input_ids"][0] == 0  # it would have added one
    config = tokenizer_folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 0}))
    assert generate.Prompter(str(tokenizer_folder), chat=True, images=False).longest is None


def test_without_a_template_the_text_is_asked_as_it_is(tokenizer_folder, keep_environment):
    problem = problems.BenchmarkProblem("1", "1 + 1?", "2")
    chosen = generate.Prompter(str(tokenizer_folder), chat=False, images=False)
    assert (chosen(problem).text, chosen.note) == ("1 + 1?", None)
    (tokenizer_folder / "chat_template.jinja").unlink()
    forced = generate.Prompter(str(tokenizer_folder), chat=True, images=False)
    assert forced(problem).text == "1 + 1?" and "no chat template" in forced.note


def test_a_model_that_cannot_be_asked_is_refused(tokenizer_folder, keep_environment):
    with pytest.raises(ConfigError, match="it takes no images, and the problems have some"):
        generate.Prompter(str(tokenizer_folder), chat=True, images=True)
    (tokenizer_folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="its tokenizer cannot be loaded"):
        generate.Prompter(str(tokenizer_folder), chat=True, images=False)


def test_images_take_their_tokens_and_go_to_the_processor(tokenizer_folder, keep_environment, tmp_path, monkeypatch):
    """The processor of a vision model is replaced. It gives each image as many tokens as the image is wide."""
    seen = []

    class Processor:
        image_processor, chat_template = object(), "yes"
        tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)

        def apply_chat_template(self, messages, tokenize, add_generation_prompt):
            seen.append(messages)
            assert not tokenize and add_generation_prompt
            return "".join("#" if part["type"] == "image" else part["text"] for part in messages[0]["content"])

        def __call__(self, text, images, add_special_tokens):
            assert not add_special_tokens and all(image.mode == "RGB" for image in images)
            if any(image.height < 3 for image in images):
                raise KeyError("too small")
            return {"input_ids": [[0] * (len(text[0]) - len(images) + sum(image.width for image in images))]}

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda model, **_: Processor())
    paths = (str(tmp_path / "a.png"), str(tmp_path / "b.png"))
    Image.new("L", (5, 3)).save(paths[0])
    Image.new("RGBA", (7, 3)).save(paths[1])
    make = generate.Prompter(str(tokenizer_folder), chat=True, images=True)
    prompt = make(problem := problems.BenchmarkProblem("1", "<image> Find x <image>", "2", paths))
    image, text = {"type": "image"}, {"type": "text", "text": "Find x"}
    assert seen == [[{"role": "user", "content": [image, text, image]}]]
    assert (prompt.text, len(prompt.token_ids), prompt.length, prompt.images) == ("#Find x#", 8, 6 + 5 + 7, paths)
    with pytest.raises(ConfigError, match="a prompt with images needs a chat template, and none is used"):
        generate.Prompter(str(tokenizer_folder), chat=False, images=True)
    (tmp_path / "a.png").write_bytes(b"no image")
    with pytest.raises(ConfigError, match=r"problem 1: ValueError: image .*a\.png' does not open"):
        make(problem)
    Image.new("L", (5, 2)).save(paths[0])
    with pytest.raises(ConfigError, match=r"problem 1: KeyError: .*too small"):
        make(problem)


# ── what vLLM is asked ──


class FakeVLLM:
    """vLLM's class and its engine in one, which finishes the second request first."""

    def __init__(self, **options):
        self.options, self.requests, self.steps, self.llm_engine = options, {}, None, self
        self.made.append(self)

    def get_tokenizer(self):
        names = {0: "<s>", 1: "</s>", 5: "a", 6: "b", 7: "yes", 8: "no"}
        return SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(names[i] for i in ids))

    def add_request(self, name, prompt, params):
        self.requests[name] = (prompt, params)

    def has_unfinished_requests(self):
        self.steps = self.steps if self.steps is not None else [["1"], [], list(set(self.requests) - {"1"})]
        return bool(self.steps)

    def step(self):
        part = SimpleNamespace(token_ids=(7, 1), finish_reason="stop")
        cut = SimpleNamespace(token_ids=(8,), finish_reason="length")
        finished = [
            SimpleNamespace(request_id=name, finished=True, outputs=[part, cut],
                            prompt_token_ids=self.requests[name][0]["prompt_token_ids"])
            for name in self.steps.pop(0)
        ]  # fmt: skip
        return [*finished, SimpleNamespace(request_id="0", finished=False, outputs=[])]


@pytest.fixture
def fake_vllm(monkeypatch, keep_environment):
    kinds = SimpleNamespace(FINAL_ONLY="final")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=FakeVLLM, SamplingParams=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", SimpleNamespace(RequestOutputKind=kinds))
    monkeypatch.setattr(generate.machine, "set_up", lambda: None)
    monkeypatch.setattr(FakeVLLM, "made", [], raising=False)
    return FakeVLLM.made


def ask(asked, **changes):
    sampling = replace(Sampling(2, 0.7, 0.9, 40, 20, 42), **changes)
    request = Request("model", "name", ["m"], Path("out"), sampling, [1],
                      tensor_parallel_size=2, gpu_memory_utilization=0.8, max_num_seqs=16)  # fmt: skip
    return dict(generate.generate(request, asked, 100))


def test_every_prompt_is_asked_with_a_seed_of_its_own(fake_vllm):
    asked = {("m", str(i)): EncodedPrompt("sab", [0, 5, 6], (), 3) for i in range(3)}
    answered = ask(asked)
    assert list(answered) == [("m", "1"), *(key for key in answered if key != ("m", "1"))] and len(answered) == 3
    yes = SampledResponse(query="<s>abyes</s>", text="yes</s>", tokens=2, truncated=False)
    assert answered["m", "0"] == [yes, SampledResponse(query="<s>abno", text="no", tokens=1, truncated=True)]
    (llm,) = fake_vllm
    wanted = {
        "dtype": "bfloat16", "max_model_len": 100, "tensor_parallel_size": 2, "max_num_seqs": 16,
        "gpu_memory_utilization": 0.8, "trust_remote_code": True,  # as OpenRLHF's engines
    }  # fmt: skip
    assert wanted.items() <= llm.options.items() and "limit_mm_per_prompt" not in llm.options
    for (prompt, params), key in zip(llm.requests.values(), asked, strict=True):
        assert prompt == {"prompt_token_ids": [0, 5, 6]}
        assert vars(params) == {
            "n": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "max_tokens": 20, "min_tokens": 1,
            "skip_special_tokens": False, "seed": generate.problem_seed(42, *key), "output_kind": "final",
        }  # fmt: skip


def test_images_are_handed_over_opened(fake_vllm, tmp_path):
    Image.new("RGB", (5, 3)).save(tmp_path / "a.png")
    seen = EncodedPrompt("x", [5], (str(tmp_path / "a.png"),) * 2, 9)
    ask({("m", "0"): EncodedPrompt("x", [5], (), 1), ("m", "1"): seen})
    (llm,) = fake_vllm
    assert llm.options["limit_mm_per_prompt"] == {"image": 2}
    (text, _), (vision, _) = llm.requests.values()
    assert "multi_modal_data" not in text
    assert [image.size for image in vision["multi_modal_data"]["image"]] == [(5, 3)] * 2


def test_a_failing_engine_is_a_failed_run(fake_vllm, monkeypatch, capsys):
    monkeypatch.setattr(FakeVLLM, "step", lambda self: 1 / 0)
    with pytest.raises(RunError, match="vLLM failed with model: ZeroDivisionError"):
        ask({("m", "0"): EncodedPrompt("x", [5], (), 1)})
    assert "Traceback" in capsys.readouterr().err


def test_seeds_depend_on_seed_benchmark_and_problem_alone():
    asked = [(seed, b, p) for seed in (0, 1) for b in ("a", "b", "a/b") for p in ("1", "2", "b/1")]
    seeds = {generate.problem_seed(*key) for key in asked}
    # "a" + "b/1" and "a/b" + "1" are the one pair that reads the same; a benchmark's name has no slash.
    assert len(seeds) == len(asked) - 2 and all(0 <= seed < 2**62 for seed in seeds)
    assert generate.problem_seed(42, "aime24", "aime24-1") == 0x140037F8A615B42C  # in each process


# ── the command line ──


@pytest.fixture
def parse_words(monkeypatch):
    """A function that returns the Request of a command's words."""
    seen = []

    def stop(request):
        seen.append(request)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "evaluate", stop)

    def parse(*words, model=("--model", "some/model-1B")):
        with pytest.raises(KeyboardInterrupt):
            cli.main([*model, "--benchmarks", "aime24, amc", *words])
        return seen.pop()

    return parse


def test_defaults_are_the_papers(parse_words):
    sampling = Sampling(runs=32, temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=8192, seed=42)
    out = Path("runs/eval/model-1B")
    assert parse_words() == Request("some/model-1B", "model-1B", ["aime24", "amc"], out, sampling, [1, 8, 32])
    assert parse_words("--model", "model").name == "model"
    for runs, ks in {1: [1], 4: [1, 4], 8: [1, 8], 20: [1, 8, 20]}.items():
        assert parse_words("--runs", str(runs)).ks == ks


def test_every_flag_reaches_the_request(parse_words):
    words = "--data d --reward r.py --limit 3 --runs 5 --k 5,2 --temperature 0.6 --top-p 0.95 --top-k 20 "
    words += "--max-new-tokens 99 --max-model-len 999 --skip-long --no-chat-template --seed 7 --name n --out o "
    words += "--tensor-parallel-size 2 --gpu-memory-utilization 0.5 --max-num-seqs 4 --reward-range -1 1/2"
    assert parse_words(*words.split()) == Request(
        model="some/model-1B", name="n", benchmarks=["aime24", "amc"], out=Path("o"),
        sampling=Sampling(5, 0.6, 0.95, 20, 99, 7), ks=[2, 5], data=Path("d"), reward=Path("r.py"), limit=3,
        chat_template=False, skip_long=True, max_model_len=999, tensor_parallel_size=2, gpu_memory_utilization=0.5,
        max_num_seqs=4, reward_range=(Fraction(-1), Fraction(1, 2)),
    )  # fmt: skip


def test_a_template_is_given_as_in_training(parse_words):
    for template in ("user\n{}\n", "user\\n{}"):  # in training, too, a shell's \\n stays two characters
        assert parse_words("--input-template", template).chat_template == template


CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_training_configuration_says_how_its_model_is_asked(parse_words, path):
    file = yaml.safe_load(path.read_text())
    request = parse_words("--config", str(path), model=())
    assert request.model == f"runs/{path.stem}/model" and request.name == Path(request.model).parent.name
    template = file["data"].get("input_template")
    assert request.chat_template == (file["data"].get("apply_chat_template") or template or False)
    sampling, rollout = request.sampling, file["rollout"]
    wanted = rollout["max_new_tokens"], rollout.get("temperature", 1.0), rollout.get("top_p", 1.0)
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == wanted
    assert request.reward is None  # the benchmarks' own tasks judge
    check(request)
    benchmarks = ("--benchmarks", f"mine={path}")
    assert parse_words("--config", str(path), *benchmarks, model=()).reward == Path(file["reward"]["remote_url"])


def test_rewards_are_those_of_the_training_and_other_flags_win(parse_words, tmp_path):
    """A reward server judges no evaluation."""
    (tmp_path / "more.yaml").write_text("{adapt: {reward_range: [0, 100]}, reward: {remote_url: 'http://here:9'}}")
    words = ("--config", str(CONFIGS / "countdown/train.yaml"), "--config", str(tmp_path / "more.yaml"))
    request = parse_words(*words, "--benchmarks", "mine=file", "--temperature", "0.6")
    assert (request.reward, request.reward_range) == (None, (0, 100))
    assert (request.model, request.sampling.temperature) == ("some/model-1B", 0.6)
    with pytest.raises(ConfigError, match=r"reward-range is \['1', '0'\]"):
        parse_words(*words, "--reward-range", "1", "0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "model is missing"), ("--model m --k 1;8", "k is '1;8'"), ("--model m --runs many", "runs is 'many'"),
        ("--model m --name a/b", "name is 'a/b'"), ("--model m --name ..", "name is '..'"),
        ("--model m --benchmark x", "unknown flag --benchmark; did you mean --benchmarks"),
        ("--model m --input-template user", "input-template is 'user'"),
    ],
)  # fmt: skip
def test_bad_words_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        cli.main(["--benchmarks", "aime24", *words.split()])
