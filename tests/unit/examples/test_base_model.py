"""The quickstart's base model, tested with a few steps of a very small model."""

import hashlib
import itertools
import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bapo_openrlhf import user_file
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.tasks import countdown, reasoning_gym

ROOT = Path(__file__).parents[3]
base_model = user_file.load("base model", ROOT / "examples" / "quickstart" / "base_model.py")
BaseModelSettings, build = base_model.BaseModelSettings, base_model.build

TINY = BaseModelSettings(
    steps=3, batch_size=4, hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate_size=32, threads=1
)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_tokenizer_is_one_token_a_character_and_round_trips():
    tokenizer = base_model.make_tokenizer()
    puzzles = countdown.make_puzzles("small", "train", 50, 0)
    texts = [countdown.short_prompt(puzzle.problem) + puzzle.solution for puzzle in puzzles]
    for text in [base_model.CHARACTERS, *texts]:
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text) and tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer("3\nx")["input_ids"][1:] == [tokenizer.unk_token_id] * 2


def judge(pairs):
    """The level (by the count of numbers) of each (prompt, solution), and whether the solution is right."""
    for solution, numbers, target in parsed(pairs):
        yield len(numbers), countdown.value_over(solution, numbers) == target


def parsed(pairs):
    for prompt, solution in pairs:
        yield solution, *countdown.parse_problem(prompt.removesuffix("="))


def test_first_phase_is_right_and_second_errs_as_often_as_set():
    mix, wrong = {"easy": 1, "medium": 1, "hard": 1}, {"easy": 0.0, "medium": 0.5, "hard": 1.0}
    settings = BaseModelSettings(steps=100, batch_size=60, clean=0.42, mix=mix, wrong=wrong)  # not at a pool's end
    batches = list(base_model.solutions(settings))
    assert [len(batch) for batch in batches] == [60] * 100
    assert all(right for _, right in judge(itertools.chain(*batches[:42])))
    second = list(judge(itertools.chain(*batches[42:])))
    shares = {size: [right for level, right in second if level == size] for size in (2, 3, 4)}
    assert set(shares[2]) == {1.0} and set(shares[4]) == {0.0}
    # About 1160 draws of probability 1/2: five standard deviations are 0.07.
    assert sum(shares[3]) / len(shares[3]) == pytest.approx(0.5, abs=0.07)
    assert all(len(share) == pytest.approx(1160, abs=150) for share in shares.values())


def test_wrong_solutions_are_well_formed():
    settings = BaseModelSettings(steps=10, batch_size=20, clean=0.0, wrong={"easy": 1.0, "medium": 1.0, "hard": 1.0})
    for solution, numbers, target in parsed(itertools.chain(*base_model.solutions(settings))):
        value, used = countdown.evaluate(solution)
        assert sorted(used) == numbers and value != target


def test_nothing_of_the_test_split_is_taught():
    taught = {pair for batch in base_model.solutions(replace(TINY, steps=300)) for pair in batch}
    assert len(taught) > 500
    for _, numbers, target in parsed(taught):
        assert countdown.Puzzle(tuple(numbers), target, "").split == "train"


def test_what_is_taught_stays_the_same():
    """A different digest is a different base model: increase FORMAT, measure the README's numbers, then edit this."""
    batches = list(base_model.solutions(BaseModelSettings(steps=20)))  # both phases
    assert hashlib.sha256(json.dumps(batches).encode()).hexdigest()[:16] == "86ccf2a0c59362b7"


def test_labels_cover_the_solution_and_its_end_only():
    tokens, labels = base_model._batch([("1 2:3=", "2+1"), ("10 12:22=", "12+10")])
    tokenizer = base_model.make_tokenizer()
    assert tokens.shape == labels.shape == (2, 15) and tokenizer.decode(tokens[0]) == "1 2:3=2+1<eos>" + "<pad>" * 5
    assert tokenizer.decode(tokens[1]) == "10 12:22=12+10<eos>"
    assert labels[0].tolist() == [-100] * 6 + tokens[0, 6:10].tolist() + [-100] * 5
    assert labels[1].tolist() == [-100] * 9 + tokens[1, 9:].tolist()


def test_training_learns():
    settings = replace(TINY, steps=40, batch_size=16, learning_rate=1e-2)
    model = base_model.make_model(settings, 64)
    losses = base_model.train(model, settings, base_model.Threads(1))
    assert len(losses) == 40 and sum(losses[-5:]) / 5 < 2.6
    assert losses[0] == pytest.approx(math.log(64), abs=0.3)  # it starts at chance


@pytest.fixture(scope="module")
def levels():
    pytest.importorskip("reasoning_gym")
    kinds = base_model.StepsModelSettings().kinds
    return {kind.name: reasoning_gym.problems(kind, "warmup", 30, seed=1) for kind in kinds}


def test_worked_solutions_round_trip_and_are_right(levels):
    tokenizer = base_model.make_tokenizer()
    for problem in itertools.chain(*levels.values()):
        pair = reasoning_gym.question_prompt(problem), problem.solution
        ids = [*tokenizer("".join(pair))["input_ids"], tokenizer.eos_token_id]
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        assert decoded == "".join(pair) + "<eos>" and tokenizer.unk_token_id not in ids
        (tokens,), _ = base_model._batch([pair])
        assert tokens.tolist() == ids
        assert reasoning_gym.reward_func([decoded], [problem.text], [problem.label])["rewards"] == 1


def test_levels_grow_in_length_and_fit_the_preset(levels):
    tokenizer = base_model.make_tokenizer()
    preset = yaml.safe_load((base_model.SUMS.parent / "train.yaml").read_text())
    asked = [max(len(tokenizer(one.text)["input_ids"]) for one in level) for level in levels.values()]
    written = [[len(tokenizer(one.solution)["input_ids"]) + 1 for one in level] for level in levels.values()]
    means = [sum(lengths) / len(lengths) for lengths in written]
    assert means == sorted(means) and 35 < means[1] < 45 and 70 < means[-1] < 85
    assert max(map(max, written)) <= preset["rollout"]["max_new_tokens"]
    assert max(asked) + preset["rollout"]["max_new_tokens"] <= preset["data"]["max_len"]


def test_sizes_and_levels_are_those_of_the_documentation(levels):
    settings = base_model.StepsModelSettings(steps=8, problems=200)
    models = [base_model.make_model(size, 64) for size in (BaseModelSettings(), settings)]
    small, large = (sum(parameter.numel() for parameter in model.parameters()) for model in models)
    assert 0.7e6 < small < 1.1e6 and 2e6 < large < 5e6
    prompts = [prompt for prompt, _ in itertools.chain(*base_model.solutions(settings))]
    assert {prompt.count("+") + prompt.count("-") for prompt in prompts} == {2, 3, 4, 5, 6}


@given(
    numbers=st.lists(st.integers(1, 30), min_size=2, max_size=8),
    signs=st.lists(st.sampled_from([1, -1]), min_size=8, max_size=8),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_slips_are_one_too_few_where_a_ten_is_crossed(numbers, signs, share, seed):
    def written(total, add):
        return f"{total} {'+' if add > 0 else '-'} {abs(add)} = {total + add}"

    added = [number * sign for number, sign in zip(numbers[1:], signs, strict=False)]
    totals = list(itertools.accumulate([numbers[0], *added]))
    solution = ". ".join(map(written, totals, added)) + f". <answer>{totals[-1]}</answer>"
    slipped = base_model.with_slips(solution, share, random.Random(seed))

    *steps, answer = slipped.split(". ")
    total, crossings, slips = numbers[0], 0, 0
    for step, add in zip(steps, added, strict=True):
        text, result = step.rsplit(" = ", 1)
        assert step == written(total, add) or step == f"{text} = {total + add - 1}"
        assert text == written(total, add).rsplit(" = ", 1)[0]  # it goes on from what it wrote
        crossing = any(ten % 10 == 0 for ten in range(min(total, total + add) + 1, max(total, total + add) + 1))
        slip = int(result) != total + add
        assert crossing or not slip
        crossings, slips, total = crossings + crossing, slips + slip, int(result)
    assert answer == f"<answer>{total}</answer>" and total == totals[-1] - slips  # no two slips cancel
    assert slips == crossings * share if share != 0.5 else slips <= crossings


def test_only_the_second_phase_of_the_larger_model_has_slips():
    pytest.importorskip("reasoning_gym")
    settings = base_model.StepsModelSettings(steps=20, batch_size=30, problems=200)
    right = dict(itertools.chain(*settings.worked.values()))
    batches = list(base_model.solutions(settings))
    first = round(settings.clean * 20)
    assert all(right[prompt] == solution for prompt, solution in itertools.chain(*batches[:first]))
    assert any(right[prompt] != solution for prompt, solution in itertools.chain(*batches[first:]))


def test_threads_that_wait_sleep(tmp_path):
    """OpenMP says itself what it found when torch was imported."""
    # the tokenizer comes after torch
    code = "import sys, base_model; base_model.make_tokenizer = sys.exit; base_model.build('model')"
    environment = {name: value for name, value in os.environ.items() if name not in base_model.WAIT_PASSIVELY}
    environment |= {"OMP_DISPLAY_ENV": "TRUE", "PYTHONPATH": f"{Path(base_model.__file__).parent}:{ROOT}"}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr


def test_saves_what_the_stack_loads(tmp_path):
    folder = tmp_path / "model"
    assert build(folder, TINY) == (folder, True) and names(tmp_path) == ["model"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.config.model_type == "qwen3" and not model.config.tie_word_embeddings
    assert (model.config.pad_token_id, model.config.bos_token_id, model.config.eos_token_id) == (0, 1, 2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer("3 5:8=")["input_ids"] == base_model.make_tokenizer()("3 5:8=")["input_ids"]
    assert tokenizer.eos_token == "<eos>" and tokenizer.pad_token == "<pad>"
    manifest = json.loads((folder / base_model.MANIFEST).read_text())
    assert manifest["hash"] == TINY.hash and manifest["settings"]["steps"] == 3


def test_same_settings_same_weights_and_other_seed_others(tmp_path):
    weights = []
    for i, settings in enumerate([TINY, TINY, replace(TINY, seed=1)]):
        torch.manual_seed(i)  # the caller's state is no part of it
        weights.append((build(tmp_path / str(i), settings)[0] / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_reused_with_the_same_settings_only(tmp_path, monkeypatch):
    assert build(tmp_path / "model", TINY)[1]
    with monkeypatch.context() as patch:
        patch.setattr(base_model, "train", lambda *_: pytest.fail("it is trained again"))
        assert not build(tmp_path / "model", TINY)[1]
    changed = replace(TINY, mix={"easy": 1.0})
    assert not base_model.is_current(tmp_path / "model", changed)
    assert build(tmp_path / "model", changed)[1]
    assert base_model.is_current(tmp_path / "model", changed) and names(tmp_path) == ["model"]


@pytest.mark.parametrize("file", ["model.safetensors", base_model.MANIFEST])
def test_damaged_folder_is_not_current(tmp_path, file):
    folder, _ = build(tmp_path / "model", TINY)
    whole = (folder / file).read_bytes()
    for content in (whole[:-20], whole):
        (folder / file).write_bytes(content)
        assert base_model.is_current(folder, TINY) == (content == whole)
    (folder / file).unlink()
    assert not base_model.is_current(folder, TINY)


def test_an_interrupted_build_leaves_nothing_or_the_old_model(tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    def interrupted_build(settings):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            # The model is saved by then, the tokenizer is not.
            patch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", interrupt)
            build(tmp_path / "model", settings)

    interrupted_build(TINY)
    assert names(tmp_path) == []
    build(tmp_path / "model", TINY)
    interrupted_build(replace(TINY, seed=1))
    assert names(tmp_path) == ["model"] and base_model.is_current(tmp_path / "model", TINY)


def test_somebody_elses_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    for place in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(ConfigError, match="new or empty"):
            build(place, TINY)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("change", [
    {"steps": 0},
    {"clean": 1.5},
    *({"mix": mix} for mix in ({"huge": 1.0}, {"easy": 0.0}, {"easy": -1.0, "hard": 2.0})),
    *({"wrong": wrong} for wrong in ({"easy": 0.1}, {"easy": 0.1, "medium": 2.0, "hard": 0.1})),
])  # fmt: skip
def test_bad_settings_are_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        BaseModelSettings(**change)
