"""What `init` writes passes `check`, its own tests and the preset it stands for."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bapo_openrlhf.cli import arguments, main
from bapo_openrlhf.flags import config
from bapo_openrlhf.launch.start import ON_THE_CPU
from bapo_openrlhf.workbench import first_run

ROOT = Path(__file__).parents[3]
PRESET = ROOT / "configs" / "math_one_gpu.yaml"
# What a task of one's own changes.
OWN = {"config", "reward.remote_url", "data.prompt_dataset", "eval.dataset", "eval.steps", "run.name", "run.dir",
       "ckpt.output_dir", "ckpt.path", "logger.tensorboard_dir", "logger.wandb.run_name", "actor.adam.lr",
       "rollout.batch_size", "rollout.vllm_generate_batch_size", "train.batch_size", "train.num_episodes",
       "adapt.buffer_size"}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("here") / "my tasks" / "first"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parents[1])
        assert main.run(["init", "my tasks/first"]) == 0
    return path


def own_tests(folder):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_its_next_commands_can_be_copied(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.run(["init", "my task"]) == 0
    assert "pytest 'my task'; bapo-openrlhf check --config 'my task/config.yaml'; " in capsys.readouterr().out


def test_a_local_model_that_is_not_there_yet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.run(["init", "mine", "--model", "./mine/model"]) == 0
    assert f'model_name_or_path: "{tmp_path}/mine/model" #' in (tmp_path / "mine" / "config.yaml").read_text()


def test_check_accepts_it_from_another_folder(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.run(["check", "--config", str(folder / "config.yaml")]) == 0
    out = capsys.readouterr().out
    assert out.endswith("configuration is valid\n") and "64 prompts = 8 trainer steps; 13 epochs" in out


def test_it_is_the_one_gpu_preset_on_other_data(folder):
    written, preset = (config.flags_of(arguments.parse(["--config", str(p)])) for p in (folder / "config.yaml", PRESET))
    assert {name for name in written if written[name] != preset[name]} <= OWN


def test_its_own_tests_pass(folder):
    status, out = own_tests(folder)
    rows = [line for name in ("train", "eval") for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    assert status == 0 and len(rows) == 68 and f"{8 + 1 + len(rows)} passed" in out


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("reward.py", "zip(responses, labels", "zip(queries, labels"),
        pytest.param("reward.py", "numbers[-1]", "numbers[0]", marks=pytest.mark.slow),
        pytest.param("reward.py", "float(given) == float(label)", "given == label", marks=pytest.mark.slow),
        pytest.param("train.jsonl", '"label": "85"', '"label": "eighty-five"', marks=pytest.mark.slow),
        pytest.param("config.yaml", 'label_key: "label"', "label_key: answer", marks=pytest.mark.slow),
    ],
)
def test_its_own_tests_see_a_fault(folder, tmp_path, file, old, new):
    copy = shutil.copytree(folder, tmp_path / "copy")
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    assert own_tests(copy)[0] == 1


def test_its_own_tests_name_a_column_that_is_missing(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    first, *others = (copy / "eval.jsonl").read_text().splitlines()
    (copy / "eval.jsonl").write_text("\n".join([first.replace('"input"', '"question"'), *others]))
    status, out = own_tests(copy)
    assert status == 1 and "KeyError: 'input'" in out and "[eval.jsonl, line 1]" in out and "1 failed" in out


def flags_of(folder):
    return config.flags_of(arguments.parse(["--config", str(folder / "config.yaml")]))


class TestOwnProblems:
    """`--data`, with columns of other names."""

    def write(self, tmp_path, count):
        rows = [{"id": n, "question": f"{n} + 1?", "answer": n + 1} for n in range(count)]
        path = tmp_path / "mine.jsonl"
        twice = rows[9:10]  # one of those that are held out
        path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *twice]))
        return path, rows

    @pytest.mark.parametrize(("rows", "gpus"), [(20, 8), (300, 1), (1500, 2), (20_000, 4)])
    def test_a_run_has_a_hundred_steps_and_no_prompt_is_in_both(self, tmp_path, capsys, rows, gpus):
        path, all_rows = self.write(tmp_path, rows)
        assert main.run(["init", str(tmp_path / "task"), "--data", str(path), "--gpus", str(gpus)]) == 0
        read = {name: (tmp_path / "task" / f"{name}.jsonl").read_text().splitlines() for name in ("train", "eval")}
        train, held_out = ([json.loads(line) for line in lines] for lines in read.values())
        wanted = [{"question": row["question"], "answer": row["answer"]} for row in all_rows]
        assert sorted([*train, *held_out], key=lambda row: row["answer"]) == wanted
        assert 1 <= len(held_out) <= 100 and len(held_out) == min(rows // 10, 100)
        flags = flags_of(tmp_path / "task")
        steps = -(-len(train) // flags["rollout.batch_size"]) * flags["train.num_episodes"]
        assert steps >= 100 > steps - -(-len(train) // flags["rollout.batch_size"])  # and no pass more
        assert flags["rollout.batch_size"] == {20: 8, 300: 16, 1500: 64, 20_000: 64}[rows]
        assert main.run(["check", "--config", str(tmp_path / "task" / "config.yaml")]) == 0
        assert "eval.dataset is never" not in capsys.readouterr().err

    def test_a_parquet_file_is_the_same(self, tmp_path):
        import pandas

        path, _ = self.write(tmp_path, 40)
        pandas.read_json(path, lines=True).to_parquet(tmp_path / "mine.parquet")
        assert first_run.problems_in(tmp_path / "mine.parquet") == first_run.problems_in(path)

    def test_what_is_refused(self, tmp_path, capsys):
        few, _ = self.write(tmp_path, 5)
        (tmp_path / "other.jsonl").write_text('{"a": 1, "label": 2}\n' * 30)
        for given, says in ((few, "it has 5 rows"), (tmp_path / "other.jsonl", "its columns are a, label"),
                            (tmp_path / "none.csv", "no such file"), (tmp_path, "no such file")):  # fmt: skip
            assert main.run(["init", str(tmp_path / "task"), "--data", str(given)]) == 2
            assert f"error: data is {given}" in (err := capsys.readouterr().err) and says in err
        assert not (tmp_path / "task").exists()


def test_without_a_gpu_it_has_the_flags_that_are_needed(tmp_path, capsys):
    """The model is one that a command makes, which is said."""
    assert main.run(["init", str(tmp_path / "task"), "--cpu"]) == 0
    model = tmp_path / "task" / "model"
    assert f"next: bapo-openrlhf model smollm2 {model}; " in capsys.readouterr().out
    flags = flags_of(tmp_path / "task")
    assert {name: flags[name] for name in ON_THE_CPU} == ON_THE_CPU and not flags["train.colocate_all"]
    assert flags["actor.model_name_or_path"] == str(model)


@pytest.mark.parametrize("chat", [True, False])
def test_a_model_that_is_here_is_looked_at(tmp_path, chat):
    """Its positions limit the lengths, a base model gets no chat template, and the header has its size."""
    model = tmp_path / "small"
    model.mkdir()
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    (model / "config.json").write_text(
        json.dumps(sizes | {"model_type": "llama", "vocab_size": 1000, "max_position_embeddings": 300})
    )
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"} if chat else {}))
    assert main.run(["init", str(tmp_path / "task"), "--model", str(model), "--gpus", "2"]) == 0
    flags = flags_of(tmp_path / "task")
    assert flags["data.apply_chat_template"] == chat
    assert (flags["data.max_len"], flags["rollout.max_new_tokens"]) == (300, 150)
    header = (tmp_path / "task" / "config.yaml").read_text().split("algorithm:")[0]
    # 2 layers of 4 x 64 x 64 + 3 x 64 x 128 + 2 x 64, 2 embeddings of 1000 x 64, and the last norm
    assert 2 * (4 * 64**2 + 3 * 64 * 128 + 128) + 2 * 64_000 + 64 == 210_240
    assert str(model) in header and "0.21 million parameters" in header and "2 GPUs" in header and "24 GB" in header


@pytest.mark.parametrize(
    ("parameters", "rate"),
    [(None, 1e-6), (8e9, 1e-6), (3e9, 1e-6), (0.6e9, 3e-6), (134_515_008, 1e-5), (210_000, 5e-4)],
)
def test_a_smaller_model_has_a_higher_rate(parameters, rate):
    assert float(first_run.rate_for(parameters)) == rate


def test_labels_are_right(folder):
    """Worked out here again, where that is short."""
    rows = {}
    for name in ("train", "eval"):
        for line in (folder / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            rows[row["input"].split(" Think")[0]] = float(row["label"])
    numbers = {
        "What is 38 + 47?": 38 + 47,
        "What is 17 x 6 - 20?": 17 * 6 - 20,
        "A box has 12 rows of 8 eggs. 5 eggs are broken. How many eggs are whole?": 12 * 8 - 5,
        "A train leaves at 9:40 and arrives at 12:15. How many minutes does it travel?": 12 * 60 + 15 - 9 * 60 - 40,
        "Mia reads 24 pages a day. Her book has 312 pages. After how many days has she read the whole book?": 312 / 24,
        "The sum of three whole numbers in a row is 96. What is the greatest of them?": 96 / 3 + 1,
        "How many whole numbers from 1 to 200 can be divided by 6 but not by 4?": 200 // 6 - 200 // 12,
        "What is the remainder of 7 to the power of 20 divided by 13?": 7**20 % 13,
        "In how many different orders can the letters of the word LEVEL be written?": 120 / (2 * 2),
        "What is 56 + 29?": 56 + 29,
        "A garden is 14 meters long and 9 meters wide. How many meters of fence go around it?": 2 * (14 + 9),
        "A shop sells pens in packs of 6. A school needs 250 pens. How many packs must it buy?": -(-250 // 6),
        "How many whole numbers from 1 to 100 have a digit 7?": sum("7" in str(n) for n in range(1, 101)),
    }
    shirt = [question for question in rows if question.startswith("A shirt costs 40 euros.")]
    others = {question: answer(question) for question in rows.keys() - numbers.keys() - set(shirt)}
    assert len(others) == 54 and rows == numbers | others | {shirt[0]: pytest.approx(40 * 0.85 * 1.1)}


def answer(question):
    """The answer to one of the questions of which there are several with other numbers."""
    numbers = [int(word) for word in re.findall(r"\d+", question)]
    kinds = {
        r"What is \d+ \+ \d+\?": lambda a, b: a + b,
        r"What is \d+ - \d+\?": lambda a, b: a - b,
        r"What is \d+ x \d+ - \d+\?": lambda a, b, c: a * b - c,
        r"A box has .* apples are bad. How many apples are good\?": lambda a, b, c: a * b - c,
        r"Tom writes \d+ lines a day. His letter has \d+ lines. .*": lambda a, b: b / a,
        r"What is the remainder of \d+ divided by \d+\?": lambda a, b: a % b,
        r"How many whole numbers from 1 to \d+ can be divided by \d+\?": lambda _, n, k: len(range(k, n + 1, k)),
        r"The sum of three whole numbers in a row is \d+. What is the smallest of them\?": lambda n: (n - 3) / 3,
        r"A film begins at .* How many minutes does it last\?": lambda a, b, c, d: 60 * (c - a) + d - b,
    }
    (kind,) = (solve for pattern, solve in kinds.items() if re.fullmatch(pattern, question))
    return kind(*numbers)


def test_what_is_there_is_kept(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name, says in (("mine", "it has files in it"), ("file", "it must be a folder"), ("a@b", "must not have @")):
        assert main.run(["init", str(tmp_path / name)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"error: DIR is {tmp_path / name}; ") and says in err
        assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "mine", "notes"]
