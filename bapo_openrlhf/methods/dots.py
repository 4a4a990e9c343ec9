"""DOTS with rollout replay (arXiv 2506.05316): prompts of medium difficulty, and half of each batch from a buffer.

Paper: "Improving Data Efficiency for LLM Reinforcement Fine-tuning Through Difficulty-targeted Online Data Selection
and Rollout Replay". Details follow its authors' code (ASTRAL-Group/data-efficient-llm-rl, rl_training, read at commit
59df918).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapo_openrlhf.adapt.batch import Batch, fill
from bapo_openrlhf.adapt.buffers import ReplayBuffer
from bapo_openrlhf.adapt.difficulty import FORECAST_METRICS, SuccessCounts, forecast_metrics, successes
from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.methods.base import FilteredMethod, option

TARGET = 0.5  # success probability; alpha in the authors' code


class HistoryPredictor:
    """Predicts the success probability of a prompt from its own past groups. It does not read the prompt.

    The prediction is the mean of its groups' s / n, where the k-th last one has the weight lam^(k-1), with lam the
    `decay`, within [0, 1]. A prompt without a group gets the mean over all responses so far, or the target if there are
    none.
    """

    def __init__(self, decay: float) -> None:
        self.counts = SuccessCounts(decay, 0.0, 0.0)
        self.right, self.responses = 0.0, 0  # over all prompts

    def predict(self, prompts: Sequence[Prompt]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Success probabilities of the prompts, shape (P,), and whether each had a group, shape (P,)."""
        counts, has_history = self.counts.counts_of(prompts)
        forecasts = np.full(len(prompts), self.right / self.responses if self.responses else TARGET)
        forecasts[has_history] = counts[has_history, 0] / counts[has_history].sum(axis=1)
        return forecasts, has_history

    def update(self, groups: Sequence[Group]) -> None:
        """Learn from these groups, in their order."""
        self.counts.update(groups)
        self.right += float(sum(map(successes, groups)))
        self.responses += sum(group.size for group in groups)

    def state_dict(self) -> dict[str, Any]:
        """Counts of each prompt and over all prompts."""
        return {"counts": self.counts.state_dict(), "right": self.right, "responses": self.responses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.counts.load_state_dict(state["counts"])
        self.right, self.responses = state["right"], state["responses"]


class LatestGroups(ReplayBuffer):
    """The last group of each prompt if it is informative, first in, first out, without a limit of age."""

    def add(self, group: Group) -> None:
        """Store a group if it is informative. The older one of its prompt leaves in any case, and counts as evicted."""
        self.remove(stored for stored in self if stored.prompt.id == group.prompt.id)
        if has_signal(group):
            super().add(group)


@dataclass(eq=False, kw_only=True)
class DOTS(FilteredMethod):
    """Chooses prompts of medium difficulty, and fills half of the batch with stored groups.

    Of `candidates` times as many prompts as needed, some are drawn without replacement. Their probabilities are the
    softmax of -|p - 0.5| / temperature, where p is the predicted success probability. Their groups take `fresh_share`
    of the batch. Groups drawn uniformly from a buffer take the rest. The buffer has the last group of each prompt if it
    is informative, and a step's own groups enter it after the draw. While the buffer holds too few groups, fresh ones
    take their places, as in the authors' first steps. Fresh groups beyond their share are cut, so a run saves rollouts
    if `--rollout.batch_size` is `fresh_share` of `--adapt.batch_size`.

    Deviations: the paper predicts p by attention between the embedding of a prompt and those of 256 reference prompts,
    which the authors' code generates for at every second step. This layer has no embedding model, so p comes from a
    prompt's own past groups, and the choice has an effect only when prompts come again. All prompts without one are
    predicted alike, and nothing is generated for reference. The authors' code draws from the whole data set for two
    steps at once. Here each step draws from its own candidates. Their code clips pi / alpha within prox / alpha times
    (1 +- eps), with the actor's log-probs for alpha. `--adapt.ratio decoupled` does so, but truncates prox / alpha at
    5. p is the mean reward in both, but here each reward is first clipped to [0, 1].

    Args:
        candidates: Prompts drawn from the data for each prompt that is generated for. The authors' code has no such
            number.
        temperature: Temperature of the softmax, above 0. A small one almost takes the prompts nearest 0.5, a large one
            almost draws uniformly.
        fresh_share: Share of the batch that is fresh, above 0, at most 1. 1 means no replay.
        buffer_groups: Most groups stored. Beyond them, the oldest is evicted.
        decay: Decay of the predictor, within [0, 1]: each new group of a prompt multiplies the weight of the earlier
            ones by it.
    """

    USE = "Use it if generation takes most of the time and prompts come many times."
    SOURCE = "arXiv 2506.05316"
    STATE = ("rng", "predictor", "replay")
    METRICS = (*ReplayBuffer.METRICS, *FORECAST_METRICS)

    candidates: int = option(8, "at least 1")
    temperature: float = option(1e-3, "finite and above 0")
    fresh_share: Fraction = option(Fraction(1, 2), "in (0, 1]")
    buffer_groups: int = option(512, "at least 1")
    decay: float = option(0.5, "in [0, 1]")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.replay_places = math.floor((1 - self.fresh_share) * self.capacity)
        self.predictor = HistoryPredictor(self.decay)
        self.replay = LatestGroups(self.buffer_groups)

    def choose_prompts(self, step: int, candidates: Sequence[Prompt], count: int) -> list[int]:
        """`count` candidates drawn without replacement, in the order in which they were given."""
        forecasts, _ = self.predictor.predict(candidates)
        scores = -np.abs(forecasts - TARGET)
        # The largest values of score / temperature + Gumbel noise are a draw from the softmax without replacement
        # (arXiv 1903.06059). No probability is rounded to 0 this way.
        keys = scores / self.temperature + self.rng.gumbel(size=len(candidates))
        return sorted(int(position) for position in np.argsort(-keys, kind="stable")[:count])

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """X1: fresh groups that the filter keeps. X3: stored groups of earlier steps."""
        forecasts, has_history = self.predictor.predict([group.prompt for group in fresh])
        self.predictor.update(fresh)
        places = min(len(self.replay), self.replay_places)
        batch = fill(
            self.max_responses,
            fresh,
            self.keeps(fresh),
            most_fresh=(self.capacity - places) * self.group_size,
            replay=lambda free: self.replay.sample(places, self.rng),
        )
        for group in fresh:  # last: a step's own groups are not replayed in that same step
            self.replay.add(group)
        self.measured = {
            **self.replay.metrics(step),
            "prompts/known": len(self.predictor.counts),
            **forecast_metrics(fresh, forecasts, has_history),
        }
        return batch
