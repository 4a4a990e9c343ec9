"""Rows of groups.jsonl and answers.jsonl, and numbers of a step."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_stack import answer
from fake_stack import generated_rows as rows

from bapo_openrlhf.record.run_record import PromptStates, read_metrics, read_warnings
from bapo_openrlhf.training.trainer.plain_trainer import filter_reasons
from bapo_openrlhf.training.trainer.recorder import StepRecorder, answers_of, explained_variance, signals


@pytest.fixture
def tokenizer():
    def decode(tokens, skip_special_tokens):
        assert skip_special_tokens
        return " ".join(map(str, tokens))

    return SimpleNamespace(decode=decode)


def test_a_response_of_several_turns_and_an_empty_one(tokenizer):
    turns, empty = answer("p", 0.0, [0, 1, 0, 0, 1, 0]), answer("q", 0.0, [0, 0])
    one, two = answers_of(rows([turns, empty], 1), PromptStates(), tokenizer, 100)
    assert (one["response"], two["response"]) == ("102 103 104 105", "")


def test_a_group_that_failed_says_nothing_of_its_prompt(tokenizer):
    states = PromptStates()
    assert answers_of(rows([answer("p", None, [1]), answer("p", 0.0, [1])], 2), states, tokenizer, 9) == []
    assert len(answers_of(rows([answer("p", 0.0, [1])], 1), states, tokenizer, 9)) == 1


@pytest.mark.parametrize(
    ("high", "rewards", "wanted"),
    [(1, (1.0, 1 - 2.0**-24, 0.0, 1.0), 1), (1000, (0.0, 6.1e-5, 1000.0, 1000.0), 0), (1, (0.0, 6.1e-5, 1.0, 1.0), 1)],
)
def test_rewards_that_differ_only_by_rounding_are_no_signal(high, rewards, wanted):
    """Rounding has the size of the greatest reward of the task."""
    ends = Fraction(0), Fraction(high)
    groups = rows([answer("p", reward, [1]) for reward in rewards], 2, reward_range=ends)
    assert signals(groups) == {"groups/with_signal": wanted}
    reasons = filter_reasons(groups)
    assert (reasons["filtered/by_draw"], reasons["filtered/all_right"]) == (wanted, 1)


def test_explained_variance_by_numpy():
    """Pooled over the generated tokens of all parts. Tokens that the mask leaves out would change every number."""
    rng = np.random.default_rng(0)
    parts = []
    for shape in ((2, 3), (1, 5)):
        mask = torch.from_numpy(rng.integers(0, 2, shape))
        returns, values = (torch.from_numpy(rng.normal(size=shape)).float() for _ in range(2))
        parts.append(SimpleNamespace(returns=returns, values=values, action_mask=mask))
    returns, values = (
        np.concatenate([getattr(part, name).double().numpy()[part.action_mask.numpy() == 1] for part in parts])
        for name in ("returns", "values")
    )
    wanted = 1 - np.var(returns - values) / np.var(returns)
    assert explained_variance(parts)["value/explained_variance"] == pytest.approx(wanted, rel=1e-5)


def test_explained_variance_needs_returns_that_differ():
    part = SimpleNamespace(returns=torch.ones(2, 3), values=torch.rand(2, 3), action_mask=torch.ones(2, 3))
    assert explained_variance([part]) == {}


@pytest.fixture
def recorder(tmp_path):
    """recorder(steps): that of a run that has made these steps."""

    def of(*steps: int) -> StepRecorder:
        result = StepRecorder(folder=tmp_path, tokenizer=None, answer_chars=0)
        for step in steps:
            result.add_metrics(step, {"tokens/generated_total": 10 * step})
        return result

    return of


@pytest.mark.parametrize(
    ("steps", "missing"), [((1, 2, 3, 4, 5), 5), ((), 10), ((*range(1, 5), *range(6, 12)), 1), (range(1, 13), 0)]
)
def test_a_resume_says_which_steps_are_missing(recorder, tmp_path, steps, missing):
    """A power cut may take rows of steps that a checkpoint has."""
    recorder(*steps)
    for _ in range(2):
        recorder().resume(10)
        said = [(row["step"], row["kind"]) for row in read_warnings(tmp_path)]
        assert said == [(11, "missing steps")] * (missing > 0)
        assert all(f" {missing} of the 10 steps" in row["text"] for row in read_warnings(tmp_path))


def test_any_real_number_is_a_metric(recorder, tmp_path):
    """Such as those of a user's method."""
    numbers = {"a": np.float32(0.5), "b": np.int64(3), "c": Fraction(1, 4), "d": 2.0, "e": 7}
    recorder().add_metrics(1, numbers | {"generated_samples": ["text", 1.0]})
    assert read_metrics(tmp_path) == [{"step": 1, "a": 0.5, "b": 3, "c": 0.25, "d": 2.0, "e": 7}]


def test_a_step_and_an_evaluation_are_durable_at_their_end(recorder, tmp_path, monkeypatch):
    """A checkpoint of the step is written after that."""
    sizes, whole = [], recorder()
    files = lambda folder: sorted(path.name for path in folder.iterdir())  # noqa: E731
    sync = "bapo_openrlhf.training.trainer.recorder.sync_rows"
    monkeypatch.setattr(sync, lambda folder: sizes.append(files(folder)))
    whole.add_metrics(1, {})
    whole.add_evaluation(1, {})
    assert sizes == [["metrics.jsonl"], ["evaluations.jsonl", "metrics.jsonl"]]
