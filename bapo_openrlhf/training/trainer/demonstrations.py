"""Demonstrations on their way to the actor: the tokens of worked solutions, as samples, and the loss of these tokens.

A demonstration joins the batch after everything was computed that knows a behaviour policy: log-probs, the review,
advantages and metrics. Its sample has nan in the place of behaviour log-probs. This marks its tokens, and any number
that were computed from them by mistake would be nan.
"""

from collections.abc import Iterable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import ray
import torch
from openrlhf.datasets.utils import blending_datasets
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.adapt.advantage import relative_rewards
from bapo_openrlhf.adapt.batch import Batch, Demonstration
from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.flags.sizes import fits_solution
from bapo_openrlhf.training.trainer.experience import BatchExperience
from bapo_openrlhf.training.trainer.run_state import RunState


class Solutions(dict[str, np.ndarray]):
    """The worked solutions of the data: token ids, int32, by the id of the prompt.

    A solution ends with the tokenizer's end token. One that a response could not hold is left out. Of several solutions
    of one prompt, the first that fits counts.
    """

    def __init__(self, pairs: Iterable[tuple[Prompt, str | None]], tokenizer: Any, args: SimpleNamespace) -> None:
        if hasattr(tokenizer, "image_processor"):  # the processor of a model that takes images
            tokenizer = tokenizer.tokenizer
        super().__init__()
        self._prompts: dict[str, np.ndarray] = {}  # their token ids
        for prompt, solution in pairs:
            if not solution or prompt.id in self:
                continue
            start, end = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt.text, solution))
            if end[-1:] != [tokenizer.eos_token_id]:
                end = [*end, tokenizer.eos_token_id]
            if fits_solution(args, len(start), len(end)):
                self._prompts[prompt.id], self[prompt.id] = np.array(start, np.int32), np.array(end, np.int32)

    @classmethod
    def of(cls, args: SimpleNamespace, strategy: Any, dataset: Any, tokenizer: Any) -> Self:
        """The worked solutions of a run's data (`--data.solution_key`); none without the flag.

        OpenRLHF's data set of prompts has dropped the column, and row n of the data is its prompt n.
        """
        data = args.data
        if not data.solution_key:
            return cls([], tokenizer, args)
        rows = blending_datasets(
            data.prompt_dataset, data.prompt_probs, strategy, args.train.seed, max_count=data.max_samples,
            dataset_split=data.prompt_split,
        )  # fmt: skip
        prompts = [Prompt(text, label) for text, label in zip(dataset.prompts, dataset.labels, strict=True)]
        column = rows.select(range(len(prompts)))[data.solution_key]
        return cls(zip(prompts, column, strict=True), tokenizer, args)

    def sample(self, prompt: Prompt, advantage: float = 0.0, *, like: Experience | None = None) -> Experience:
        """The demonstration of a prompt as a sample with a batch dimension of 1. Cross-entropy reads no advantage.

        It has the fields and the `info` keys of `like`, a sample of the batch that it joins, and 0 for numbers that it
        lacks. Without `like`, it has all fields.
        """
        ids = np.concatenate([self._prompts[prompt.id], self[prompt.id]])
        mask = torch.arange(1, len(ids)).unsqueeze(0) >= len(self._prompts[prompt.id])
        zeros = {
            field.name: torch.zeros(mask.shape if Experience.is_step_tensor_field(field.name) else 1)
            for field in fields(Experience)
            if "tensor_role" in field.metadata and (like is None or getattr(like, field.name) is not None)
        }
        tensors = {
            "sequences": torch.from_numpy(ids).unsqueeze(0),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
            "action_mask": mask,
            "rollout_log_probs": torch.zeros(mask.shape).masked_fill(mask, torch.nan),
            "advantages": advantage * mask.float(),
            "response_length": torch.tensor([len(self[prompt.id])]),
            "truncated": torch.tensor([False]),
            "total_length": torch.tensor([float(len(ids))]),
        }
        texts = {"prompts": [prompt.text], "labels": [prompt.label], "images": [None], "mm_train_inputs": [None]}
        info = {} if like is None else {key: torch.zeros_like(value) for key, value in like.info.items()}
        return Experience(**zeros | tensors | texts, info=info)


class Demonstrations:
    """What the trainer does with the worked solutions of a batch, once the batch was reviewed."""

    def __init__(self, args: SimpleNamespace, *, state: RunState, actor: Any, solutions: Solutions) -> None:
        self.args, self.state, self.actor, self.solutions = args, state, actor, solutions

    def beside(self, batch: Batch, experience: BatchExperience | None) -> list[Experience]:
        """X4 as samples that go to the actor after those of the experience. They have no KL penalty."""
        like = experience.samples[0] if experience else None
        return [
            self.solutions.sample(each.prompt, advantage_of(each, self.args), like=like)
            for each in batch.demonstrations
        ]

    def fine_tune(self, batch: Batch) -> dict[str, float]:
        """Fine-tune the actor on the solutions of the prompts for which the batch asks. Returns the metrics."""
        if not batch.fine_tuned:
            return {}
        self.state.phase = "training"
        ray.get(self.actor.take(list(map(self.solutions.sample, batch.fine_tuned))))
        status = ray.get(self.actor.async_run_method(method_name="fine_tune"))[0]
        return {
            "demonstrations/cross_entropy": status["policy_loss"],
            "demonstrations/grad_norm": status["actor_grad_norm"],
        }

    def metrics(self, batch: Batch) -> dict[str, float]:
        """How many worked solutions the batch trains on, and their tokens; nothing in a run without solutions."""
        prompts = [each.prompt for each in batch.demonstrations] + batch.fine_tuned
        counts = {
            "demonstrations/trained": len(prompts),
            "demonstrations/tokens": sum(len(self.solutions[prompt.id]) for prompt in prompts),
        }
        return counts if self.solutions else {}


def advantage_of(demonstration: Demonstration, args: SimpleNamespace) -> float:
    """The advantage of a demonstration: what the estimator makes of its reward (Eq. 2), clipped as for a response."""
    rewards = np.array(demonstration.rewards)
    reward = rewards[-1:]  # the greatest reward of the task
    advantage = relative_rewards(args.algo.advantage.estimator, reward, rewards, args.adapt.eps, ends=reward)[0]
    return float(np.clip(advantage, *args.reward.clip_range))
