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


def test_a_dollar_in_a_path_stands_for_itself(tmp_path, monkeypatch, capsys):
    """The next commands can be copied."""
    monkeypatch.chdir(tmp_path)
    assert main.run(["init", "my$task", "--model", "a$model/$fits"]) == 0
    assert "pytest 'my$task'; bapo-openrlhf check --config 'my$task/config.yaml'; " in capsys.readouterr().out
    text = (tmp_path / "my$task" / "config.yaml").read_text()
    assert "/a$model/$fits on 1 GPU" in text and "\n# $fits\n" not in text
    args = arguments.parse(["--config", "my$task/config.yaml"])
    assert args.actor.model_name_or_path == f"{tmp_path}/a$model/$fits" and args.run.dir == f"{tmp_path}/my$task/runs"


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
    assert status == 0 and len(set(rows)) == 68 and f"{8 + 1 + len(rows)} passed" in out


def slow(*row):
    return pytest.param(*row, marks=pytest.mark.slow)


@pytest.mark.parametrize(("file", "old", "new", "says"), [
    ("eval.jsonl", '"input"', '"question"', ["KeyError: 'input'", "[eval.jsonl, line 1]", "1 failed"]),
    ("reward.py", "zip(responses, labels", "zip(queries, labels", []),
    slow("reward.py", "numbers[-1]", "numbers[0]", []),
    slow("reward.py", "float(given) == float(label)", "given == label", []),
    slow("train.jsonl", '"label": "85"', '"label": "eighty-five"', []),
    slow("config.yaml", 'label_key: "label"', "label_key: answer", []),
])  # fmt: skip
def test_its_own_tests_see_a_fault(folder, tmp_path, file, old, new, says):
    copy = shutil.copytree(folder, tmp_path / "copy")
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new, 1))
    status, out = own_tests(copy)
    assert status == 1 and all(words in out for words in says)


def flags_of(folder):
    return config.flags_of(arguments.parse(["--config", str(folder / "config.yaml")]))


class TestOwnProblems:
    """`--data`, with columns of other names."""

    def write(self, tmp_path, count):
        rows = [{"id": n, "question": f"{n} + 1?", "answer": n + 1} for n in range(count)]
        path = tmp_path / "mine.jsonl"  # one of the rows that are held out is there twice
        path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows[9:10]]))
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

    @pytest.mark.parametrize("copies", [1, 10])
    def test_a_column_with_equal_prompts_is_left_for_another(self, tmp_path, copies):
        """Each prompt may be there so often that the rows of the evaluation have all of them."""
        path = tmp_path / "mine.jsonl"
        rows = [{"input": "", "question": f"{n} + 1?", "answer": n + 1} for n in range(20)] * copies
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        problems = first_run.problems_in(path)
        assert (problems.input_key, len(problems.train), len(problems.held_out)) == ("question", 18 * copies, 2)

    def test_what_is_refused(self, tmp_path, capsys):
        self.write(tmp_path, 5)
        (tmp_path / "equal.jsonl").write_text('{"input": "", "answer": 2}\n' * 30)
        (tmp_path / "other.jsonl").write_text('{"a": 1, "label": 2}\n' * 30)
        cases = {
            "mine.jsonl": "has 5 rows",
            "other.jsonl": "columns are a, label",
            "equal.jsonl": "has 30 rows with 1 different prompts (column input), and must have at least 20",
            "none.csv": "no such",
            "": "no such",
        }
        for name, says in cases.items():
            assert main.run(["init", str(tmp_path / "task"), "--data", str(tmp_path / name)]) == 2
            error = capsys.readouterr().err
            assert f"error: data is {tmp_path / name}" in error and says in error
        assert not (tmp_path / "task").exists()


def test_without_a_gpu_it_has_the_flags_that_are_needed(tmp_path, capsys):
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
    sizes |= {"model_type": "llama", "vocab_size": 1000, "max_position_embeddings": 300}
    (model / "config.json").write_text(json.dumps(sizes))
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"} if chat else {}))
    assert main.run(["init", str(tmp_path / "task"), "--model", str(model), "--gpus", "2"]) == 0
    flags = flags_of(tmp_path / "task")
    assert flags["data.apply_chat_template"] == chat
    assert (flags["data.max_len"], flags["rollout.max_new_tokens"]) == (300, 150)
    header = (tmp_path / "task" / "config.yaml").read_text().split("algorithm:")[0]
    assert str(model) in header and "0.21 million parameters" in header and "2 GPUs" in header and "24 GB" in header


def test_a_smaller_model_has_a_higher_rate():
    rates = {None: 1e-6, 8e9: 1e-6, 3e9: 1e-6, 0.6e9: 3e-6, 134_515_008: 1e-5, 210_000: 5e-4}
    assert {size: float(first_run.rate_for(size)) for size in rates} == rates


# The kinds of problems, and how each is solved with its numbers.
KINDS = {
    r"What is \d+ \+ \d+\?": lambda a, b: a + b,
    r"What is \d+ - \d+\?": lambda a, b: a - b,
    r"What is \d+ x \d+ - \d+\?": lambda a, b, c: a * b - c,
    r"A box has .* are (bad|broken)\. How many (apples|eggs) are (good|whole)\?": lambda a, b, c: a * b - c,
    r"(Tom writes|Mia reads) \d+ (lines|pages) a day\. .*": lambda a, b: b / a,
    r"What is the remainder of \d+ divided by \d+\?": lambda a, b: a % b,
    r"What is the remainder of \d+ to the power of \d+ divided by \d+\?": lambda a, b, c: a**b % c,
    r"How many whole numbers from 1 to \d+ can be divided by \d+\?": lambda _, n, k: len(range(k, n + 1, k)),
    r"How many whole numbers .* by 6 but not by 4\?": lambda _, n, a, b: n // a - n // 12,
    r"How many whole numbers .* have a digit 7\?": lambda _, n, digit: sum(str(digit) in str(m) for m in range(n + 1)),
    r"The sum of three whole numbers in a row is \d+. What is the smallest of them\?": lambda n: (n - 3) / 3,
    r"The sum of three whole numbers in a row is \d+. What is the greatest of them\?": lambda n: n / 3 + 1,
    r"A (film begins|train leaves) at .* How many minutes .*": lambda a, b, c, d: 60 * (c - a) + d - b,
    r"In how many different orders can the letters of the word LEVEL be written\?": lambda: 120 / (2 * 2),
    r"A garden is .* How many meters of fence go around it\?": lambda a, b: 2 * (a + b),
    r"A shop sells pens in packs .* How many packs must it buy\?": lambda a, b: -(-b // a),
    r"A shirt costs \d+ euros\..*": lambda price, less, more: price * (1 - less / 100) * (1 + more / 100),
}


def test_labels_are_right(folder):
    for name in ("train", "eval"):
        for line in (folder / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            question = row["input"].split(" Think")[0]
            (solve,) = (solve for pattern, solve in KINDS.items() if re.fullmatch(pattern, question))
            numbers = map(int, re.findall(r"\d+", question))
            assert float(row["label"]) == pytest.approx(solve(*numbers)), question


@pytest.mark.parametrize(("words", "says"), [
    (["mine"], "DIR is mine; it has files in it"),
    (["file"], "DIR is file; it must be a folder"),
    (["a@b"], "must not have @"),
    (["new", "--algorithm", "bapo"], "algorithm is 'bapo'"),
    (["new", "--gpus", "3"], "gpus is 3; it must be 1, 2, 4 or 8."),
])  # fmt: skip
def test_what_it_does_not_take_changes_nothing(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    (tmp_path / "file").write_text("mine")
    assert main.run(["init", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and says in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "mine", "notes"]
