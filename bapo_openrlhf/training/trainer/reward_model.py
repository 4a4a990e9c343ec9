"""OpenRLHF's reward model, which scores responses as soon as they are generated.

OpenRLHF asks it when a batch becomes experience. Filters, thresholds and buffers need the rewards earlier. So here the
generator hands over what it generated, while the engines sleep if they share GPUs.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from bapo_openrlhf.training.trainer.dealing import DealtBatch
from bapo_openrlhf.training.trainer.run_state import RunState
from bapo_openrlhf.training.trainer.samples import Answers, reward_of, sample_of

INPUTS = ("sequences", "attention_mask")  # of its forward pass


class RewardModel:
    """Gives samples their rewards, if the run has a reward model. Otherwise they have them already."""

    def __init__(self, args: SimpleNamespace, workers: Any, *, state: RunState, pad: int) -> None:
        self.args, self.workers, self.state, self._pad = args, workers, state, pad
        self._alone = args.train.colocate_all or args.train.colocate_critic_reward
        self._seconds = 0.0

    @torch.no_grad()
    def score(self, answers: Sequence[Answers]) -> None:
        """Set the reward of each response, as OpenRLHF does. One that is not a finite number is left out.

        Equal responses to a prompt are scored once: in bfloat16, padding changes scores a little, which would be a
        signal.
        """
        if self.workers is None or not answers:
            return
        self.state.phase, start = "scoring responses", time.perf_counter()
        different = {
            response.token_ids.tobytes(): sample_of(each.prompt, response)
            for each in answers
            for response in each.responses
        }
        places = {key: place for place, key in enumerate(different)}
        dealt = DealtBatch(list(different.values()), self.args, self._pad)
        scores = dealt.ask(self.workers, inputs=INPUTS, alone=self._alone)()
        for each in answers:
            for number, response in enumerate(each.responses):
                reward = reward_of(scores[places[response.token_ids.tobytes()]])
                if reward is not None:
                    response.extras["info"]["reward"] = reward
                    each.responses[number] = replace(response, reward=reward)
        self._seconds += time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Its time since it was last asked for it; nothing without a reward model."""
        seconds, self._seconds = self._seconds, 0.0
        return {} if self.workers is None else {"reward/model_seconds": seconds}
