"""Whole runs with worked solutions on the fake stack: what reaches the actor, in which order, and what is counted."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from fake_stack import STATES

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.methods.bapo_demonstrations import DemonstratingBAPO
from bapo_openrlhf.training.trainer.demonstrations import Solutions
from bapo_openrlhf.training.wire.packing import is_demonstration


class Letters:
    """A tokenizer: a token for each letter, 0 at the end."""

    eos_token_id = 0

    def __call__(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.fixture
def taught(fitted, monkeypatch):
    """`taught(method, ...)`: a run with a worked solution for each prompt but the first."""

    def of(args, strategy, dataset, tokenizer):
        pairs = [(Prompt(text, label), text[7:] if label != "0" else None) for _, text, label, _ in dataset]
        limits = SimpleNamespace(rollout=SimpleNamespace(max_new_tokens=8), data=SimpleNamespace(max_len=64))
        return Solutions(pairs, Letters(), limits)

    monkeypatch.setattr(Solutions, "of", of)

    def run(method, *, hard=False, **words):
        words = {"adapt.method": method, "adapt.rollout_delay": 1, "adapt.reevaluate_every": 1} | words
        made = fitted(reward=(lambda *_: 0.0) if hard else None, **words)
        for row in made.metrics():
            assert row["groups/generated"] == sum(row[f"groups/{state}"] for state in STATES)
        return made

    return run


def divided(experiences):
    """The samples of an update: the responses as (prompt, reward, advantage), and the demonstrations."""
    own = [e for e in experiences if not is_demonstration(e)]
    responses = [(e.prompts[0], e.rewards.item(), float(e.advantages[e.action_mask.bool()][0])) for e in own]
    return responses, [e for e in experiences if is_demonstration(e)]


def test_luffy_trains_on_mixed_groups(taught):
    """Advantages of both kinds by hand. Demonstrations have the last places of the batch."""
    run = taught("luffy")
    mixed = 0
    for (_, experiences), row in zip(run.trained, run.metrics(), strict=True):
        responses, shown = divided(experiences)
        assert list(map(is_demonstration, experiences)) == [False] * len(responses) + [True] * len(shown)
        by_prompt = {prompt: [numbers for of, *numbers in responses if of == prompt] for prompt, *_ in responses}
        assert {len(numbers) for numbers in by_prompt.values()} == {3}
        assert {e.prompts[0] for e in shown} == by_prompt.keys() - {"prompt 0"}
        for e in shown:
            rewards, advantages = np.array(by_prompt[e.prompts[0]]).T
            of_group = np.array([*rewards, 1.0])
            wanted = (of_group - of_group.mean()) / np.sqrt(of_group.var() + 1e-6)
            assert advantages == pytest.approx(wanted[:3], rel=1e-5, abs=1e-6)
            assert e.advantages[e.action_mask].tolist() == pytest.approx([wanted[3]] * int(e.action_mask.sum()))
            mixed += 0 < sum(rewards) < 3
        assert row["groups/capacity_used"] == (len(responses) + len(shown)) / 16
        assert row["demonstrations/trained"] == len(shown) and row["rollout/num_samples"] == len(responses)
        assert row["demonstrations/tokens"] == sum(len(e.prompts[0][7:]) + 1 for e in shown)
    assert mixed > 3


def test_a_batch_of_demonstrations_alone_is_trained_on(taught):
    words = {"adapt.options": "failures=1", "adapt.max_reevaluated_prompts": 3}
    run = taught("bapo_demonstrations", hard=True, **words)
    first, *others = run.metrics()
    assert first["skipped_update"] == 1 and first["demonstrations/trained"] == 0
    seconds = {"timing/make_experience", "timing/ppo_train"}  # of steps with an update
    assert not seconds & first.keys() and all(seconds < row.keys() for row in others)
    assert all("timing/broadcast" in row for row in run.metrics())
    assert run.updates["actor"] == len(run.trained) == len(others) == 7
    for (step, experiences), row in zip(run.trained, others, strict=True):
        responses, shown = divided(experiences)
        assert row["step"] == step + 1 and responses == [] and "skipped_update" not in row
        assert len(shown) == row["groups/demonstration"] == row["demonstrations/trained"] in (2, 3)
        wanted = (1 - 1 / 5) / math.sqrt(4 / 25 + 1e-6)  # four wrong responses, and itself
        for e in shown:
            assert e.advantages[e.action_mask].tolist() == pytest.approx([wanted] * int(e.action_mask.sum()))


def test_more_demonstrations_than_places_end_the_run(taught, monkeypatch):
    monkeypatch.setattr(DemonstratingBAPO, "_count", lambda self, again: {group.uid for group in again})
    with pytest.raises(RuntimeError, match="made a batch of 6 responses; it may hold at most 4"):
        taught("bapo_demonstrations", hard=True, **{"adapt.batch_size": 1, "adapt.max_reevaluated_prompts": 6})


def test_relift_fine_tunes_after_the_update_and_before_the_sync(taught):
    run = taught("relift", **{"adapt.options": "finetune_batch=2"})
    names = [name for name, _ in run.events if name in ("fit", "fine-tune", "sync")]
    tuned = run.noted("fine-tune")
    assert tuned
    for step, row in enumerate(run.metrics()):
        updates = [name for name in ("fit",) if "skipped_update" not in row and row["responses/trained"]]
        updates += ["fine-tune", "fit"] * (step in tuned)
        assert names[: len(updates) + 1] == [*updates, "sync"]
        del names[: len(updates) + 1]
        assert ("demonstrations/cross_entropy" in row) == (step in tuned) == (row["demonstrations/trained"] == 2)
        assert row["demonstrations/waiting"] < 2 or step in tuned
    for step, experiences in run.trained:
        responses, shown = divided(experiences)
        assert bool(responses) != bool(shown)
        assert not shown or (step in tuned and [e.prompts[0] == "prompt 0" for e in shown] == [False, False])
    assert sum(row["groups/demonstration"] for row in run.metrics()) >= 2 * len(tuned)


def test_fine_tuning_needs_no_batch(taught):
    run = taught("relift", hard=True, **{"adapt.options": "finetune_batch=5"})
    tuned, skipped = run.noted("fine-tune"), [bool(row.get("skipped_update")) for row in run.metrics()]
    assert tuned and skipped == [step not in tuned for step in range(8)]
