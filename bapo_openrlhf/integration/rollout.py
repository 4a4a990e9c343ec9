"""Generation: fresh samples with behaviour log-probs, and hard prompts generated again."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import ray
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from tqdm import tqdm

from bapo_openrlhf.adapt.group import Prompt


def checked_reward(response: dict[str, Any]) -> None:
    """Raise ValueError unless the reward function gave one finite reward for this response."""
    reward, prompt = response.get("reward"), response["prompt"]
    if reward is None:
        raise ValueError(
            f"the reward function gave no reward for prompt {prompt!r}: it failed or returned nothing; "
            "its error is in the log of the rollout engine"
        )
    values = torch.as_tensor(reward, dtype=torch.float64).flatten().tolist()
    if len(values) != 1:
        raise ValueError(f"the reward function returned {len(values)} rewards for one response to prompt {prompt!r}")
    if not math.isfinite(values[0]):
        raise ValueError(f"the reward function returned {values[0]} for prompt {prompt!r}; rewards must be finite")


class AdaptedSamplesGenerator(SamplesGenerator):
    """OpenRLHF's generator, which keeps behaviour log-probs and can generate given prompts again."""

    def __init__(self, *, strategy: Any, **kwargs: Any) -> None:
        super().__init__(strategy=strategy, **kwargs)
        # OpenRLHF asks vLLM for log-probs when its IS correction is on: so it is, in this object's own view alone.
        self.args = copy.deepcopy(strategy.args)
        self.args.algo.advantage.is_correction_level = "token"
        self._dispatched: dict[str, int] = {}

    def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list, **kwargs: Any) -> list:
        for prompt in prompts:
            self._dispatched.setdefault(prompt, len(self._dispatched))
        return super()._dispatch_prompts_to_vllm(prompts, labels, **kwargs)

    def _process_response_into_experience(self, response: dict[str, Any], **kwargs: Any) -> Experience:
        checked_reward(response)
        return super()._process_response_into_experience(response, **kwargs)

    @torch.no_grad()
    def generate_samples(self, **kwargs: Any) -> tuple[list[Experience], float | None, int, bool]:
        """As OpenRLHF's, with the groups in the order of their prompts instead of that in which they were finished."""
        self._dispatched = {}
        samples, *rest = super().generate_samples(**kwargs)
        samples.sort(key=lambda sample: self._dispatched.get(sample.prompts[0], -1))
        return samples, *rest

    @torch.no_grad()
    def generate_again(self, prompts: Sequence[Prompt], **kwargs: Any) -> list[Experience]:
        """Samples of the given prompts with the weights the engines hold now: G each, in order."""
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "wake_up")
        refs = self._dispatch_prompts_to_vllm(
            [prompt.text for prompt in prompts],
            [prompt.label for prompt in prompts],
            images=[prompt.images for prompt in prompts],
            **kwargs,
        )
        samples = [
            self._process_response_into_experience(response, **kwargs)
            for ref in tqdm(refs, desc="Re-evaluate hard prompts")
            for response in ray.get(ref)
        ]
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "sleep")
        return samples
