"""Any flags at all: `check` calls them valid, or refuses them in one line that names a flag and its value."""

import json
import random
import re

import pytest
from drawn_flags import NOT_DRAWN, OTHERS, WITHIN, drawn, kept_out, ranges, table, words_of

from bapo_openrlhf.cli import arguments, main
from bapo_openrlhf.errors import ALLOWED

pytestmark = pytest.mark.usefixtures("without_models")

BASE = {
    "actor.model_name_or_path": "model", "actor.num_gpus_per_node": "1", "critic.num_gpus_per_node": "1",
    "ref.num_gpus_per_node": "1", "reward.remote_url": "reward.py", "data.prompt_dataset": "train.jsonl",
    "data.max_len": "32", "rollout.max_new_tokens": "8", "rollout.batch_size": "8", "rollout.n_samples_per_prompt": "4",
    "rollout.micro_batch_size": "8", "train.batch_size": "16", "train.micro_batch_size": "4", "vllm.num_engines": "1",
}  # fmt: skip
WRONG = ("-1", "0", "nan", "inf", "1e9", "-1e-9", "1.5")  # of these, some are wrong for each number
TABLE = table()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": 64}))
    (tmp_path / "model" / "pytorch_model.bin").touch()
    (tmp_path / "train.jsonl").write_text('{"input": "1+1"}\n' * 16)
    (tmp_path / "reward.py").write_text("def reward_func(*given):\n    return {'rewards': [1.0]}\n")
    monkeypatch.chdir(tmp_path)


class TestTable:
    def test_every_flag_is_drawn_or_has_a_reason_not_to_be(self):
        flags = {action.dest for action in arguments.build_parser("")._actions} - {"==SUPPRESS=="}
        assert kept_out() <= flags and TABLE.keys() == flags - kept_out()
        assert sum(map(len, map(str.split, NOT_DRAWN.values()))) == len(kept_out())  # none has two reasons
        assert len(TABLE) > 100 and OTHERS.keys() <= TABLE.keys()

    @pytest.mark.parametrize("words", WITHIN)
    def test_values_are_within_their_ranges(self, words):
        assert all(ALLOWED[words](float(value)) for value in WITHIN[words].split())


def flags_in_message(line: str, flags: dict) -> list[str]:
    """The flags that a message names together with their values, as the message writes them."""
    result = []
    for flag, value in flags.items():
        values = [value] if isinstance(value, str) else [*value]
        numbers = [str(float(word)) for word in values if re.fullmatch(r"-?[\d.]+(e-?\d+)?|nan|inf", word)]
        written = [*values, *numbers, *(f"{float(word):g}" for word in numbers), *(word.title() for word in values)]
        if re.search(rf"(?<![\w.]){re.escape(flag)}(?![\w.])", line) and any(word in line for word in written):
            result.append(flag)
    return result


@pytest.mark.parametrize("wild", [False, True], ids=["within the ranges", "one beyond"])
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 6))])
def test_any_flags_are_valid_or_refused_by_name(capsys, part, wild):
    valid = 0
    for seed in range(40 * part, 40 * part + 40):
        flags = BASE | drawn(seed, TABLE)
        if wild:
            rng = random.Random(seed)
            number = rng.choice(sorted(flag for flag in ranges().keys() & TABLE.keys() if len(TABLE[flag][0]) < 6))
            flags[number] = rng.choice(WRONG) if isinstance(TABLE[number][0], str) else (rng.choice(WRONG),) * 2
        status = main.run(["check", *words_of(flags)])
        out, err = capsys.readouterr()
        text = f"seed {seed}: {words_of(flags)}\n{err}"
        assert status in (0, 2) and (status == 0) == out.endswith("configuration is valid\n"), text
        lines = err.splitlines()
        assert all(line.startswith(("warning: ", "error: ")) for line in lines), text
        assert sum(line.startswith("error: ") for line in lines) == (status == 2), text
        assert all(flags_in_message(line, flags) for line in lines if line[0] == "e"), text
        valid += status == 0
    assert valid >= (1 if wild else 5)  # or nothing of the run itself is tried
