"""A record that is damaged: every command that reads it says so in one line, or reads the rest.

The files are cut, changed and garbled at random places. What is written by hand below is small, and of every kind.
"""

import contextlib
import io
import json
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bapo_openrlhf.cli import main as cli
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.resume import Start, products_by_step
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.workbench.evaluation import store

FILES = (record.RUN, record.SUMMARY, *record.BY_STEP)
VALUE = re.compile(rb': ("[^"]*"|-?[0-9.e-]+|null|true|false)')
OTHERS = [b"null", b'"x"', b"[1]", b"{}", b"-1", b"1e999", b"true", b"9" * 400, b"NaN", b"0.5"]
damages = st.tuples(st.sampled_from(["cut", "byte", "drop", "copy", "value", "folder", "empty"]), st.integers(0, 2**32))


def write_record(folder: Path) -> None:
    """A run of six steps that was resumed once and has ended."""
    metadata = {
        "name": "mine", "algorithm": "bapo_grpo", "seed": 1, "started": "2026-01-01", "total_steps": 6, "commit": None,
        "command": "train", "versions": {"python": "3.11"}, "bf16_products": {"1": "direct"},
        "config": {"adapt.method": "bapo", "adapt.c1": "1/8", "train.max_epochs": 1, "actor.adam.lr": 1e-6},
        "inputs": {"data.prompt_dataset": "8 rows, blake2b 01"},
    }  # fmt: skip
    record.begin_run(folder, metadata)
    for step in range(1, 7):
        record.append_rows(folder, record.METRICS, step, [{
            "reward/fresh_mean": step / 8, "rollouts/total": 32 * step, "groups/fresh": 4, "groups/replayed": 2,
            "groups/reevaluated": 0, "groups/capacity": 8, "tokens/generated": 200, "tokens/trained_total": 100 * step,
            "tokens/generated_total": 200 * step, "timing/generation": 2.0, "timing/step_total": 3.0, "tv/fresh": 0.1,
            "shift/fresh": 1e-5, "entropy_loss": 0.5, "response_length": 7.0, "threshold/c2": 0.2, "threshold/c3": 0.4,
            "buffer/hard": step, "buffer/replay": step, "theory/bound": -0.1, "groups/failed": 0,
        }])  # fmt: skip
        groups = [{"uid": 4 * step + n, "prompt": f"p{n}", "source": "fresh", "state": "fresh", "mean": n / 4,
                   "responses": 4, "tokens": 9} for n in range(4)]  # fmt: skip
        record.append_rows(folder, record.GROUPS, step, groups)
    answer = {"prompt": "p0", "kind": "failed", "text": "1+1=", "label": "2", "response": "3", "reward": 0.0}
    record.append_rows(folder, record.ANSWERS, 2, [answer])
    record.append_rows(folder, record.ANSWERS, 4, [answer | {"kind": "solved", "response": "2", "reward": 1.0}])
    record.append_rows(folder, record.EVALUATIONS, 3, [{"eval_a_pass1": 0.5}])
    record.append_rows(folder, record.PROBES, 3, [{"uid": 1, "source": "fresh", "age": 0, "tv": 0.1, "cosine": 0.5}])
    record.append_rows(folder, record.WARNINGS, 5, [{"kind": "k", "text": "a warning"}])
    changed = [{"at": "2026-01-02", "step": 4, "flag": "train.num_episodes", "before": 1, "now": 2}]
    record.begin_run(folder, metadata | {"started": "2026-01-02", "changed": changed}, resumes=True)
    record.write_summary(folder, record.summarise(record.read_metrics(folder)) | {"started": "2026-01-02"})


def write_evaluation(folder: Path) -> None:
    header = {"name": folder.name, "model": {"path": "m", "files": "f"}, "chat_template": True, "limit": None}
    sampling = {"runs": 4, "temperature": 1.0, "seed": 42}
    benchmarks = {"own": {"file": "f", "sha256": "a", "reward_sha256": "b", "reward_range": [0, 1]}}
    store.write_settings(folder, {**header, "sampling": sampling, "benchmarks": benchmarks})
    for n in range(5):
        scores = [float(k < n) for k in range(4)]
        row = {"id": f"q{n}", "input": f"about {n}", "prompt": "x", "label": "7", "scores": scores}
        store.append_row(folder, "own", row)


def damage(path: Path, kind: str, seed: int) -> None:
    rng, data = random.Random(seed), path.read_bytes()
    at, length = rng.randrange(len(data)), rng.randrange(1, 60)
    if kind == "folder":
        path.unlink()
        path.mkdir()
        return
    value = rng.choice(list(VALUE.finditer(data)))
    byte, other = bytes([rng.choice([rng.randrange(256), *b'",:{}[]0.-e\n'])]), rng.choice(OTHERS)
    result = {
        "cut": data[:at],
        "byte": data[:at] + byte + data[at + 1 :],
        "drop": data[:at] + data[at + length :],
        "copy": data[:at] + data[rng.randrange(len(data)) :][:length] + data[at:],
        "value": data[: value.start(1)] + other + data[value.end(1) :],
        "empty": b"",
    }
    path.write_bytes(result[kind])


def said(*words: str) -> tuple[int, str, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        status = cli.run(words)
    return status, out.getvalue(), re.sub(r"\r[^\r\n]*", "", error.getvalue())


def run(*words: str) -> int:
    """The status of a command. An error is one line."""
    status, _, error = said(*words)
    assert (status == 0 and not error) or (error.startswith("error: ") and error.count("\n") == 1), error
    return status


def resume(folder: Path) -> None:
    """What `train` does with the record before anything loads, and the trainer after it."""
    args = SimpleNamespace(run=SimpleNamespace(dir=folder.parent, name=folder.name), ckpt=SimpleNamespace(path="none"))
    products_by_step(args, "float32", Start("global_step3"))
    record.begin_run(folder, {"started": "2026-01-03", "changed": []}, resumes=True)
    record.cut_rows(folder, 4)  # must not raise: everything has been loaded
    record.append_rows(folder, record.METRICS, 4, [{}])


@pytest.fixture(scope="module")
def record_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_record(folder / "run")
    for name in ("a", "b"):
        write_evaluation(folder / name)
    return folder


def damaged(record_folder: Path, folder: Path, file: str, *damage_to: tuple[str, int]) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(record_folder, folder)
    for kind, seed in damage_to:
        damage(folder / file, kind, seed)
    return folder


of_any = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
many = settings(of_any, max_examples=10 * settings.default.max_examples)


@many
@given(file=st.sampled_from(FILES), kind=damages)
@example(file=record.RUN, kind=("folder", 0))
def test_watch(record_folder, tmp_path, file, kind):
    folder = damaged(record_folder, tmp_path / "now", f"run/{file}", kind)
    assert run("watch", str(folder / "run"), "--once") in (0, 1)


@of_any
@given(file=st.sampled_from(FILES), kind=damages, others=st.booleans())
@example(file=record.METRICS, kind=("folder", 0), others=False)
def test_report(record_folder, tmp_path, undrawn, file, kind, others):
    folder = damaged(record_folder, tmp_path / "now", f"run/{file}", kind)
    runs = [str(record_folder / "run"), str(folder / "run")][not others :]
    assert run("report", *runs, "--output", str(folder / "page.html")) in (0, 2)


def study(record_folder: Path, folder: Path) -> int:
    (folder / "s.yaml").write_text("name: s\nseeds: [1, 2]\nevaluations: [a]\nmethods: {bapo: {arms: {group: BAPO}}}\n")
    (folder / "out/runs").mkdir(parents=True)
    (folder / "run").rename(folder / "out/runs/bapo-group-s2")
    shutil.copytree(record_folder / "run", folder / "out/runs/bapo-group-s1")
    return run("study", "--config", str(folder / "s.yaml"), "--output", str(folder / "out"), "--only-report")


@of_any
@given(file=st.sampled_from(FILES), kind=damages)
def test_study(record_folder, tmp_path, undrawn, file, kind):
    assert study(record_folder, damaged(record_folder, tmp_path / "now", f"run/{file}", kind)) in (0, 2)


@many
@given(file=st.sampled_from([record.RUN, *record.BY_STEP]), kind=damages)
def test_resume(record_folder, tmp_path, file, kind):
    folder = damaged(record_folder, tmp_path / "now", f"run/{file}", kind)
    before = (folder / "run" / record.RUN).read_bytes() if (folder / "run" / record.RUN).is_file() else None
    try:
        resume(folder / "run")
    except ConfigError as error:
        assert f"{folder}/run/{file}" in str(error) and "\n" not in str(error)
        assert before is None or (folder / "run" / record.RUN).read_bytes() == before


@many
@given(file=st.sampled_from(["settings.json", "own.jsonl"]), kind=damages)
def test_compare(record_folder, tmp_path, file, kind):
    folder = damaged(record_folder, tmp_path / "now", f"a/{file}", kind)
    assert run("compare", str(folder / "a"), str(folder / "b"), "--out", str(folder / "out")) in (0, 2)


def test_without_damage(record_folder, tmp_path, undrawn):
    """So that the properties are about damage."""
    folder = damaged(record_folder, tmp_path / "now", "run/run.json")
    assert run("watch", str(folder / "run"), "--once") == 0
    assert run("report", str(folder / "run")) == 0
    assert run("compare", str(folder / "a"), str(folder / "b"), "--out", str(folder / "out")) == 0
    resume(folder / "run")
    assert [row["step"] for row in record.read_metrics(folder / "run")] == [1, 2, 3, 4]
    assert study(record_folder, folder) == 0


GROUP = '{"step": 7, "prompt": "p", "source": "fresh", "state": "fresh", "mean": 1.0}'  # without responses
# Fields, and lines at the end, of another kind.
WRONG: dict[str, list] = {
    record.RUN: [
        ("name", 1), ("total_steps", "6"), ("versions", []), ("config", None), ("resumed", [1]), ("changed", [{}]),
        ("bf16_products", {"one": "direct"}), ("inputs", {"data.prompt_dataset": 1}),
    ],
    record.SUMMARY: [("steps", 6.5), ("seconds", {"whole_run": "long"}), ("groups", 3), ("reward_end", "high")],
    record.METRICS: [
        '{"step": 3}', '{"step": 7, "reward/fresh_mean": "0.5"}', '{"step": 7.5}', '{"step": 7, "tv/fresh": 1e999}',
    ],
    record.GROUPS: [GROUP, '{"step": 7, "mean": []}'],
    record.ANSWERS: ['{"step": 7, "prompt": 1}', '{"step": 7, "prompt": "p", "kind": "failed", "text": "t"}'],
    record.EVALUATIONS: [f'{{"step": 7, "eval_a_pass1": {score}}}' for score in ('"x"', "[1]", "{}")],
}  # fmt: skip


@pytest.mark.parametrize(("file", "wrong"), [(file, one) for file, many in WRONG.items() for one in many])
def test_what_is_of_another_kind(record_folder, tmp_path, undrawn, file, wrong):
    """`report` refuses the file by name. `watch` shows the rest, and says which file is left out."""
    folder = damaged(record_folder, tmp_path / "now", "run/run.json") / "run"
    path, text = folder / file, (folder / file).read_text()
    by_step = file in record.BY_STEP
    path.write_text(f"{text}{wrong}\n" if by_step else json.dumps(json.loads(text) | dict([wrong])))
    line = f", line {text.count(chr(10)) + 1}," if by_step else ""
    status, shown, _ = said("watch", str(folder), "--once")
    assert status == 0
    assert by_step or f"{file} is damaged, so what it says is left out" in " ".join(shown.split())
    status, _, error = said("report", str(folder))
    assert status == 2 and f"{path}{line} is damaged" in error


def test_what_a_reward_function_returns_may_be_anything(record_folder, tmp_path, undrawn):
    folder = damaged(record_folder, tmp_path / "now", "run/run.json") / "run"
    row = '{"step": 7, "entropy_loss": "x", "response_length": [1], "actor_grad_norm": {}, "mine": "text"}'
    (folder / record.METRICS).write_text((folder / record.METRICS).read_text() + row + "\n")
    assert run("watch", str(folder), "--once") == run("report", str(folder)) == 0
