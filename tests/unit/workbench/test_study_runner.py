"""The runs of a study: started several at a time, counted, and continued. A short script stands for the training."""

import json
import shutil
import time
from pathlib import Path

import pandas
import pytest

from bapo_openrlhf.cli import arguments, study
from bapo_openrlhf.cli import main as cli
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.settings import settings_of
from bapo_openrlhf.record.run_record import EVALUATIONS, METRICS, append_rows, begin_run, cut_rows, write_summary
from bapo_openrlhf.workbench.report.runs import Run
from bapo_openrlhf.workbench.study import runner
from bapo_openrlhf.workbench.study.data import Results, StudyRun, write_table
from bapo_openrlhf.workbench.study.definition import Arm, Study, read_study
from bapo_openrlhf.workbench.study.runner import on_terminal, plan, run_all

pytestmark = pytest.mark.usefixtures("without_models")

ARMS = (Arm("plain", "group", "GRPO", {"adapt.method": "none"}), Arm("bapo", "critic", "BA-PPO"))
STUDY = Study("tiny", ARMS, seeds=(3, 1), flags={"eval.steps": 4})
# Writes when it began and ended, and a summary, into the folder that its flags name. FAIL names a run that fails.
SCRIPT = """
import json, os, sys, time
from pathlib import Path
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
folder = Path(flags["run.dir"]) / flags["run.name"]
began = time.time()
time.sleep(float(os.environ["SECONDS"]))
(folder / "times").write_text(json.dumps([began, time.time()]))
if os.environ.get("FAIL") == folder.name:
    sys.exit("broken")
seconds = {"whole_run": 1.0}
(folder / "summary.json").write_text(json.dumps({"reward_start": 0.25, "reward_end": 0.5, "seconds": seconds}))
sys.exit(int(os.environ.get("STATUS", 0)))
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(runner, "POLL", 0.01)
    monkeypatch.setattr(runner, "TRAIN", ("-c", SCRIPT))


def go(planned, parallel=2, until=None, **environment):
    environment = {"SECONDS": "0"} | environment
    return run_all(planned, parallel=parallel, environment=environment, until=until)


def test_the_plan_goes_seed_by_seed(tmp_path):
    planned = plan(STUDY, tmp_path)
    assert [run.name for run in planned] == ["plain-group-s3", "bapo-critic-s3", "plain-group-s1", "bapo-critic-s1"]
    run = planned[1]
    assert run.folder == tmp_path / "runs" / "bapo-critic-s3"
    assert run.words == (
        *("--algorithm", "ba_ppo", "--run.faster", "all", "--eval.steps=4", "--train.seed", "3"),
        *(f"--run.dir={tmp_path}/runs", "--run.name=bapo-critic-s3", "--run.logs=progress"),
        *(f"--ckpt.path={run.folder}/checkpoints", f"--ckpt.output_dir={run.folder}/model", "--ckpt.load_enable"),
    )


def test_all_are_run_and_none_twice(tmp_path):
    planned = plan(STUDY, tmp_path)
    outcome = go(planned)
    assert (outcome.done, outcome.failed, outcome.left) == (4, [], 0)
    before = [(run.folder / "times").read_text() for run in planned]
    assert go(planned).done == 4 and [(run.folder / "times").read_text() for run in planned] == before


@pytest.mark.parametrize("parallel", [1, 3])
def test_so_many_at_a_time(tmp_path, parallel):
    planned, most = plan(STUDY, tmp_path), []
    run_all(planned, parallel=parallel, environment={"SECONDS": "0.2"}, until=None,
            callback=lambda running, ended: most.append(len(running)))  # fmt: skip
    times = [json.loads((run.folder / "times").read_text()) for run in planned]
    assert max(sum(a <= start < b for a, b in times) for start, _ in times) <= parallel and max(most) == parallel
    assert parallel > 1 or times == sorted(times)  # one at a time: in the plan's order


def test_a_run_that_fails_is_named_and_tried_again(tmp_path):
    """A run has failed if its status is not 0, also if it wrote a summary."""
    planned = plan(STUDY, tmp_path)
    assert go(plan(STUDY, tmp_path / "other")[:1], STATUS="1").failed == ["plain-group-s3"]
    outcome = go(planned, FAIL="bapo-critic-s3")
    assert (outcome.done, outcome.failed, outcome.left) == (3, ["bapo-critic-s3"], 0)
    assert "broken" in (planned[1].folder / "output.log").read_text()
    assert go(planned).done == 4


def test_time_runs_out(tmp_path):
    planned = plan(STUDY, tmp_path)
    outcome = go(planned, until=time.monotonic() - 1)
    assert (outcome.done, outcome.left) == (0, 4)
    until = time.monotonic() + 0.3  # a run that goes on then is not stopped
    outcome = go(planned, parallel=1, until=until, SECONDS="0.5")
    assert (outcome.done, outcome.left) == (1, 3)


def test_what_was_started_is_stopped_with_the_study(tmp_path, monkeypatch):
    started, start = [], runner._start
    monkeypatch.setattr(runner, "_start", lambda *words: started.append(start(*words)) or started[-1])

    def interrupt(running, ended):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(plan(STUDY, tmp_path), parallel=1, environment={"SECONDS": "60"}, until=None, callback=interrupt)
    assert started[0].returncode is not None


def test_time_left_is_that_of_the_steps_so_far(tmp_path, monkeypatch, capsys):
    planned = plan(STUDY, tmp_path)
    write_summary(planned[0].folder, {"seconds": {"whole_run": 1}})
    for run, count in ((planned[1], 5), (planned[3], 10)):  # earlier calls were interrupted
        run.folder.mkdir(parents=True)
        for step in range(count):
            append_rows(run.folder, METRICS, step, [{}])
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with on_terminal("tiny", {run.name: 50 for run in planned}, planned) as seen:
        seen([planned[1]], [planned[2]])  # all 65 steps were made before
        cut_rows(planned[1].folder, 2)  # its checkpoint has two steps
        seen([planned[1]], [planned[2]])
        for step in range(2, 10):
            append_rows(planned[1].folder, METRICS, step, [{}])
        clock[0] += 96  # 8 steps in 96 s: 130 more in 26 minutes
        seen([planned[1]], [planned[2]])
        clock[0] += 864  # 8 in 960 s: 130 in 260 minutes
        seen([planned[1]], [planned[2]])
    lines, unknown = capsys.readouterr().err.splitlines(), "time left: not known yet"
    for line, left in zip(lines, (unknown, unknown, "26 min left", "4 h 20 min left"), strict=True):
        assert line.startswith(f"tiny: 1/4 runs, {left}; plain-group-s1: failed; its output is in {planned[2].folder}")


@pytest.mark.parametrize(
    ("summary", "says"),
    [
        ({"reward_start": 0.25, "reward_end": None, "seconds": {"step_total": 61.6, "whole_run": 99.0}},
         "reward 0.250 to 0.000; its steps took 1 min 2 s"),
        ({"seconds": {"whole_run": 99.0}}, "reward 0.000 to 0.000"),
        ({}, "reward 0.000 to 0.000"),
        ({"seconds": "long"}, "/summary.json is damaged"),
    ],
)  # fmt: skip
def test_a_line_for_a_run_that_has_ended_well(tmp_path, capsys, summary, says):
    planned = plan(STUDY, tmp_path)
    with on_terminal("tiny", {run.name: 2 for run in planned}, planned) as seen:
        write_summary(planned[0].folder, summary)
        seen([], [planned[0]])
    line = capsys.readouterr().err.strip()
    assert "; plain-group-s3: " in line and says in line and "steps took" not in line.replace(says, "")


def test_a_row_a_step_with_the_evaluation_after_it(tmp_path):
    runs = []
    for number, arm in enumerate(ARMS):
        rows = [{"step": step, "reward/fresh_mean": step / 4 + number, "rollouts/total": 8 * step} for step in (1, 2)]
        evaluations = [{"step": 2, "eval_cd4_pass1": 0.125}] if number == 0 else []
        summary = {} if number else {"steps": 2}
        runs.append(StudyRun(arm, 3, Run(arm.name, rows, summary=summary, evaluations=evaluations)))
    paths = write_table(Results(STUDY, runs).table, tmp_path)
    assert [path.name for path in paths] == ["table.parquet", "table.csv"]
    columns = ["method", "path", "label", "seed", "step", "done"]
    for table in (pandas.read_parquet(paths[0]), pandas.read_csv(paths[1])):
        assert list(table.columns)[:6] == columns
        assert table.iloc[:, :6].to_numpy().tolist() == [
            *(["plain", "group", "GRPO", 3, step, True] for step in (1, 2)),
            *(["bapo", "critic", "BA-PPO", 3, step, False] for step in (1, 2)),
        ]
        assert table["reward/fresh_mean"].tolist() == [0.25, 0.5, 1.25, 1.5]
        assert table["eval_cd4_pass1"].dropna().to_dict() == {1: 0.125}
    assert list(Results(STUDY, []).table.columns) == columns


def test_what_is_no_number_is_not_in_the_table(tmp_path):
    """A reward function may return a text, and a damaged record may have a number that no column holds."""
    rows = [{"step": 1, "note": "a text", "length": 3}, {"step": 2, "note": 1.5, "length": 10**20}]
    evaluations = [{"step": 2, "eval_cd4_pass1": 10**400}]
    table = Results(STUDY, [StudyRun(ARMS[0], 3, Run(ARMS[0].name, rows, evaluations=evaluations))]).table
    write_table(table, tmp_path)
    assert table[["length", "note"]].isna().to_numpy().tolist() == [[False, True], [True, False]]
    assert "eval_cd4_pass1" not in table or table["eval_cd4_pass1"].isna().all()


@pytest.mark.parametrize(("flag", "value"), [("--max-hours", "nan"), ("--max-hours", "-1.0"), ("--parallel", "0")])
def test_numbers_out_of_range(flag, value):
    with pytest.raises(ConfigError, match=f"^{flag} is {value}"):
        study.main(["--config", "x.yaml", flag, value])


def test_only_report_writes_all_files_from_the_records(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    content = {"name": "tiny", "seeds": [1], "evaluations": ["b"], "methods": {"plain": {"arms": {"group": "GRPO"}}}}
    (tmp_path / "tiny.yaml").write_text(json.dumps(content))  # JSON is YAML
    command = ["--config", "tiny.yaml", "--only-report"]
    with pytest.raises(ConfigError, match="no run in runs/studies/tiny/runs has made a step yet"):
        study.main(command)
    out = tmp_path / "runs" / "studies" / "tiny"
    folder = out / "runs" / "plain-group-s1"
    folder.mkdir(parents=True)
    append_rows(folder, METRICS, 1, [{"reward/fresh_mean": 0.5, "rollouts/total": 8}])
    append_rows(folder, EVALUATIONS, 1, [{"eval_b_pass1": 0.25}])
    assert study.main(command) == 0
    assert "| GRPO | group | 1 of 1 | 25.0" in " ".join((out / "summary.md").read_text().split())
    assert "1 of 1 runs are there." in (out / "report.html").read_text()
    assert (out / "table.csv").exists() and "report.html: " in capsys.readouterr().out
    content["seeds"] = {"group": [1, 2], "critic": [3]}
    content["methods"]["bapo"] = {"arms": {"critic": "BA-PPO"}, "flags": {"adapt.bufer_size": 3}}
    (tmp_path / "tiny.yaml").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"study, bapo-critic: unknown flag --adapt.bufer_size"):
        study.main(command)


class TestContent:
    """A study compares what its files hold, also with runs that are done."""

    @pytest.fixture
    def study(self, tmp_path, monkeypatch, capsys):
        """study() runs the command in a folder whose two runs are done, and returns its status and its error."""
        monkeypatch.setenv("BAPO_OPENRLHF_CPU", "1")
        monkeypatch.setattr(study, "_write", lambda *_: None)  # the page
        monkeypatch.chdir(tmp_path)
        files = {
            "model/config.json": '{"model_type": "qwen2"}',
            "model/pytorch_model.bin": "",
            "rows.jsonl": 12 * '{"input": "1+1=", "label": "2"}\n',
            "reward.py": "def reward_func(queries, prompts, labels):\n    return {'rewards': [1.0]}\n",
            "method.yaml": "adapt: {buffer_size: 8}\n",
            "base.yaml": "actor: {model_name_or_path: model, num_gpus_per_node: 1, adam: {lr: 1.0e-4}}\n"
            "data: {prompt_dataset: rows.jsonl, input_key: input, label_key: label, max_len: 48}\n"
            "rollout: {batch_size: 4, n_samples_per_prompt: 4, max_new_tokens: 16}\n"
            "train: {batch_size: 16, micro_batch_size: 4}\nds: {attn_implementation: eager}\n"
            "vllm: {num_engines: 1, enforce_eager: true, sync_backend: gloo}\n",
            "study.yaml": "name: s\nconfig: base.yaml\nseeds: [1, 2]\n"
            "flags: {eval.steps: -1, reward.remote_url: reward.py, adapt.reward_range: [0, 1]}\n"
            "methods:\n  bapo: {arms: {group: BAPO}, config: method.yaml}\n",
        }
        Path("model").mkdir()
        for name, text in files.items():
            Path(name).write_text(text)
        for run in plan(read_study(Path("study.yaml")), Path("out")):
            begin_run(run.folder, {"started": "now", **settings_of(arguments.parse(run.words), 12)})
            write_summary(run.folder, {"steps": 3})

        def go(*words):
            status = cli.run(["study", "--config", "study.yaml", "--output", "out", *words])
            out, err = capsys.readouterr()
            if "--check" in words:
                return status, out.splitlines()
            assert ("2 of 2 runs are done" in out) is (status == 0)
            return status, [line for line in err.splitlines() if not line.startswith("warning: ")]

        return go

    @pytest.mark.parametrize(("file", "old", "new", "run", "says"), [
        ("base.yaml", "lr: 1.0e-4", "lr: 1.0e-6", "s1", "actor.adam.lr 0.0001 (now 1e-06)"),
        ("reward.py", "1.0", "0.0", "s1", "reward.remote_url blake2b "),
        (
            "out/runs/bapo-group-s2/run.json",
            '"data.max_len": 48',
            '"data.max_len": 40',
            "s2",
            "data.max_len 40 (now 48)",
        ),
        ("study.yaml", "[0, 1]", "[0, 2]", "s1", "adapt.reward_range ['0', '1'] (now ['0', '2'])"),
        ("study.yaml", "eval.steps: -1", "run.faster: [none]", "s1", "run.faster ['all'] (now ['none'])"),
    ])  # fmt: skip
    def test_an_edited_file_is_refused(self, study, file, old, new, run, says):
        """Every run is compared."""
        assert study() == (0, [])
        Path(file).write_text(Path(file).read_text().replace(old, new))
        status, [error] = study()
        assert status == 2
        assert error.startswith(f"error: study: run bapo-group-{run} in {Path.cwd()}/out/runs was started with {says}")
        assert "; its files are base.yaml, method.yaml; give another --output" in error

    def test_a_study_may_be_moved_and_a_flag_written_otherwise(self, study, tmp_path, monkeypatch):
        Path("base.yaml").write_text(Path("base.yaml").read_text().replace("1.0e-4", "0.0001"))
        shutil.copytree(tmp_path, tmp_path / "moved")
        monkeypatch.chdir(tmp_path / "moved")
        assert study() == (0, [])

    def test_a_check_says_what_would_run_and_runs_nothing(self, study):
        assert study("--check") == (0, ["2 runs of 1 arms, each of 3 to 3 steps; 2 are done"])
        shutil.rmtree("out")
        assert study("--check") == (0, ["2 runs of 1 arms, each of 3 to 3 steps; 0 are done"])
        assert not Path("out").exists()
        Path("method.yaml").write_text("adapt: {buffer_size: 0}\n")
        assert study("--check")[0] == 2

    def test_a_run_without_a_record_of_its_steps_is_refused(self, study):
        """OpenRLHF's own asynchronous trainer."""
        file, words = Path("study.yaml"), "arms: {group: GRPO}, flags: {adapt.method: none, train.async_enable: "
        rest = file.read_text().partition("methods:")[0]
        for switch, status in (("false", 0), ("true", 2)):
            file.write_text(f"{rest}methods: {{plain: {{{words}{switch}}}}}}}\n")
            assert study("--check")[0] == status
