"""Demonstrations as samples. `test_updates.py` has the gradient of their loss."""

from types import SimpleNamespace

import torch
from datasets import Dataset
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch, split_experience_batch
from test_demonstrations_in_runs import Letters

from bapo_openrlhf.adapt.batch import Demonstration
from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.training.trainer import demonstrations
from bapo_openrlhf.training.trainer.demonstrations import Solutions, advantage_of
from bapo_openrlhf.training.wire.packing import demonstration_tokens, is_demonstration
from bapo_openrlhf.training.worker.loss_parts import demonstration_loss, without_demonstrations


def solutions(*pairs, max_new=4, max_len=8, tokenizer=None) -> Solutions:
    args = SimpleNamespace(rollout=SimpleNamespace(max_new_tokens=max_new), data=SimpleNamespace(max_len=max_len))
    return Solutions([(Prompt(text), worked) for text, worked in pairs], tokenizer or Letters(), args)


def test_which_solutions_can_be_used():
    known = solutions(
        ("a", "xyz"), ("b", None), ("c", ""), ("d", "wxyz"), ("efghij", "x\0"), ("efghijk", "x"), ("a", "z")
    )
    assert [text for text in ("a", "b", "c", "d", "efghij", "efghijk") if Prompt(text).id in known] == ["a", "efghij"]
    assert len(known) == 2
    assert len(known[Prompt("a").id]) == 4  # the first solution counts, with its end
    assert Prompt("a", "another label").id not in known


def test_a_model_that_takes_images_has_a_processor():
    """Its first argument is images. So it is its tokenizer that is called."""
    processor = SimpleNamespace(tokenizer=Letters(), image_processor=None, eos_token_id=0)
    assert solutions(("ab", "xy"), tokenizer=processor)[Prompt("ab").id].tolist() == [120, 121, 0]


def test_a_sample_by_hand():
    sample = solutions(("ab", "xy")).sample(Prompt("ab"), 2.5)
    assert sample.sequences.tolist() == [[97, 98, 120, 121, 0]]
    assert sample.action_mask.tolist() == [[False, True, True, True]]  # position i belongs to token i + 1
    assert sample.advantages.tolist() == [[0, 2.5, 2.5, 2.5]]
    assert sample.rollout_log_probs.isnan().tolist() == sample.action_mask.tolist()
    assert (sample.prompts, sample.response_length.tolist()) == (["ab"], [3])
    assert demonstration_tokens(sample) == 3 and is_demonstration(sample)
    rest = without_demonstrations(sample)
    assert not rest.action_mask.any() and not is_demonstration(rest)


def test_a_sample_has_the_form_of_those_that_it_joins():
    """So that OpenRLHF's functions can make one batch of them: the same fields, and the same entries of info."""
    like = Experience(
        sequences=torch.zeros(1, 6), attention_mask=torch.ones(1, 6), action_mask=torch.ones(1, 5),
        action_log_probs=torch.zeros(1, 5), rollout_log_probs=torch.zeros(1, 5), kl=torch.zeros(1, 5),
        advantages=torch.zeros(1, 5), rewards=torch.ones(1), response_length=torch.ones(1), truncated=torch.ones(1),
        total_length=torch.ones(1), info={"reward": torch.ones(1), "depth": torch.ones(1)},
    )  # fmt: skip
    sample = solutions(("ab", "xy")).sample(Prompt("ab"), 1.0, like=like)
    for name in ("values", "returns", "base_action_log_probs", "scores"):
        assert getattr(sample, name) is None
    assert {name: value.tolist() for name, value in sample.info.items()} == {"reward": [0], "depth": [0]}
    assert sample.kl.tolist() == [[0] * 4] and sample.rewards.tolist() == [0]
    whole = make_experience_batch(split_experience_batch(like) + split_experience_batch(sample))
    assert whole.sequences.shape == (2, 6) and whole.rollout_log_probs.isnan().sum() == 3


def test_the_advantage_is_that_of_the_mixed_group():
    args = SimpleNamespace(algo=SimpleNamespace(advantage=SimpleNamespace(estimator="dr_grpo")))
    args.adapt, args.reward = SimpleNamespace(eps=0.0), SimpleNamespace(clip_range=(-10.0, 10.0))
    shown = Demonstration(3, Prompt("ab"), (0.0, 0.0, 0.0, 1.0))
    assert advantage_of(shown, args) == 0.75
    args.reward.clip_range = (0.0, 0.5)
    assert advantage_of(shown, args) == 0.5


def test_row_n_of_the_data_is_prompt_n(monkeypatch):
    rows = Dataset.from_dict({"worked": ["xy", "z", "never"]})
    monkeypatch.setattr(demonstrations, "blending_datasets", lambda *_, **__: rows)
    names = {"prompt_dataset": "d", "prompt_probs": None, "max_samples": 2, "prompt_split": "train", "max_len": 8}
    args = SimpleNamespace(
        data=SimpleNamespace(**names, solution_key="worked"), train=SimpleNamespace(seed=1),
        rollout=SimpleNamespace(max_new_tokens=4),
    )  # fmt: skip
    known = Solutions.of(args, None, SimpleNamespace(prompts=["a", "b"], labels=["1", "2"]), Letters())
    assert [len(known[Prompt(text, label).id]) for text, label in (("a", "1"), ("b", "2"))] == [3, 2]
    assert len(known) == 2


def test_cross_entropy_is_the_mean_over_tokens_also_where_the_loss_counts_samples_alike():
    mask, log_probs = torch.tensor([[1, 1, 1], [1, 0, 0]]), torch.tensor([[-1.0, -2.0, -3.0], [-8.0, -9.0, -9.0]])
    batch = Experience(action_mask=mask, rollout_log_probs=log_probs * torch.nan, advantages=torch.zeros(2, 3))
    normalisers = {"dp_size": 1, "batch_num_tokens": 4.0, "global_batch_size": 2.0}
    assert demonstration_loss(log_probs, batch, normalisers, token_level=False, cross_entropy=True).item() == 14 / 4
