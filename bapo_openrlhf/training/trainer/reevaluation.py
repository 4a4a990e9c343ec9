"""Re-evaluation: hard prompts are generated again with today's weights (Algorithm 1, lines 12-15)."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.methods.base import Method
from bapo_openrlhf.training.trainer.generator import Generator
from bapo_openrlhf.training.trainer.rollout import Rollout
from bapo_openrlhf.training.trainer.rollout_weights import RolloutWeights
from bapo_openrlhf.training.trainer.run_state import RunState
from bapo_openrlhf.training.trainer.samples import Answers


class Reevaluation:
    """Generates the hard prompts of a step that no rollout takes along."""

    def __init__(
        self,
        *,
        state: RunState,
        method: Method,
        generator: Generator,
        rollout_weights: RolloutWeights,
        generate_kwargs: Mapping[str, Any],
        ahead: int,
    ) -> None:
        self.state, self.method, self.generator, self.rollout_weights = state, method, generator, rollout_weights
        self.generate_kwargs, self.ahead = generate_kwargs, ahead

    def prompts(self, rollout: Rollout) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
        """The hard prompts of this step to generate now, and those for the rollout that is asked for in it."""
        if not self.ahead:  # the generator has named them
            return rollout.hard_prompts_left, []
        prompts = self.method.begin_step(self.state.step)
        return ([], prompts) if self.rollout_weights.weights_version == self.state.step else (prompts, [])

    def generate(self, prompts: Sequence[Prompt]) -> tuple[list[Answers], dict[str, float]]:
        """Responses to these prompts from today's weights, and the time that they took. No prompts take none."""
        if not prompts:
            return [], {}
        self.state.phase, start = "generating hard prompts again", time.perf_counter()
        next_rollout = self.state.step if self.ahead else self.state.step + 1
        with self.rollout_weights.synced_to(self.state.step, next_rollout=next_rollout):
            answers = self.generator.generate("reevaluated", prompts, self.generate_kwargs)
        return answers, {"timing/reevaluation": time.perf_counter() - start}
