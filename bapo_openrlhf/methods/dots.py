"""DOTS with rollout replay (arXiv 2506.05316): prompts of medium difficulty, and half of each batch from a buffer.

Paper: "Improving Data Efficiency for LLM Reinforcement Fine-tuning Through Difficulty-targeted Online Data Selection
and Rollout Replay". Details are those of its authors' code (ASTRAL-Group/data-efficient-llm-rl, rl_training, read at
commit 59df918).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapo_openrlhf.adapt.batch import Batch, fresh_alone
from bapo_openrlhf.adapt.buffers import ReplayBuffer
from bapo_openrlhf.adapt.difficulty import SuccessCounts, forecast_metrics, successes
from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.methods.base import Method, require_state

STATE_VERSION = 1
TARGET = 0.5  # success probability; alpha in the authors' code


class HistoryPredictor:
    """Predicts a prompt's success probability from its own past groups; knows nothing of what a prompt says.

    The mean of its groups' s / n, where the k-th last one weighs lam^(k-1). A prompt without a group gets the mean over
    all responses so far, or the target where there are none.

    Args:
        decay: lam, within [0, 1].
    """

    def __init__(self, decay: float) -> None:
        self.counts = SuccessCounts(decay, 0.0, 0.0)
        self.right, self.responses = 0.0, 0  # of all prompts

    def predict(self, prompts: Sequence[Prompt]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Success probabilities (P,) of the prompts, and (P,) whether there was a group of it."""
        counts, known = self.counts.of(prompts)
        predicted = np.full(len(prompts), self.right / self.responses if self.responses else TARGET)
        predicted[known] = counts[known, 0] / counts[known].sum(axis=1)
        return predicted, known

    def update(self, groups: Sequence[Group]) -> None:
        """Learn from these groups, in their order."""
        self.counts.update(groups)
        self.right += float(sum(map(successes, groups)))
        self.responses += sum(group.size for group in groups)

    def state_dict(self) -> dict[str, Any]:
        """Counts of each prompt and of all."""
        return {"counts": self.counts.state_dict(), "right": self.right, "responses": self.responses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.counts.load_state_dict(state["counts"])
        self.right, self.responses = state["right"], state["responses"]


# By the name in the option `predictor`. Another one is a class with these four methods, such as the paper's: attention
# over reference prompts, which needs their embeddings.
PREDICTORS = {"history": HistoryPredictor}


class LatestGroups(ReplayBuffer):
    """The last group of each prompt, where that one is informative; FIFO, without a limit of age.

    A newer group of a prompt takes the older one out; that counts as evicted.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, max_age=sys.maxsize)

    def add(self, group: Group) -> None:
        """Store a group, last, if it is informative; its prompt's older one goes in any case."""
        older = [stored for stored in self._groups if stored.prompt.id == group.prompt.id]
        for stored in older:
            self._groups.remove(stored)
            self.counts["evicted"] += 1
        if has_signal(group):
            super().add(group)


class DOTS(Method):
    """Generates for prompts that should be of medium difficulty, and fills the rest of the batch with stored groups.

    Of `candidates` times as many prompts as needed, some are drawn without replacement, with probabilities that are the
    softmax of -|p - 0.5| / temperature; p is the predicted success probability. Their groups take `fresh_share` of the
    batch, groups drawn uniformly from a FIFO the rest. The FIFO has the last group of each prompt, if it is
    informative, and a step's own groups enter it after the draw. While it has too few, fresh groups take its places, as
    in the authors' first steps. A run saves rollouts where `--rollout.batch_size` is `fresh_share` of
    `--adapt.batch_size`: fresh groups beyond their share are cut.

    Deviations. The paper predicts p by attention between a prompt's embedding and those of reference prompts, 256 of
    which the authors' code generates for at every second step. This layer has no embedding model: p comes from a
    prompt's own past groups, so all prompts without one are predicted alike, and nothing is generated for reference.
    Their code draws from the whole data set, for two steps at once; here from the candidates of each step. It trains on
    every fresh group; here those of equal rewards, which have no group-relative advantage, are left out. p is the
    mean reward in both; here each reward is first clipped to [0, 1].

    Args:
        capacity: B, groups a batch holds at most.
        seed: of the draws.
        candidates: prompts drawn from the data for each one that is generated for. The authors' code has no such
            number.
        temperature: of the softmax, above 0. Small ones come near taking those nearest 0.5, large ones near chance.
        fresh_share: of the batch, above 0, at most 1. 1 is without replay.
        buffer_groups: most groups stored; the oldest is evicted.
        predictor: where p comes from: history.
        decay: of the predictor, within [0, 1]: the weight of a prompt's earlier groups falls by this factor with each
            new one.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        *,
        capacity: int,
        seed: int = 0,
        candidates: int = 8,
        temperature: float = 1e-3,
        fresh_share: Fraction = Fraction(1, 2),
        buffer_groups: int = 512,
        predictor: str = "history",
        decay: float = 0.5,
    ) -> None:
        for name, count in (("candidates", candidates), ("buffer_groups", buffer_groups)):
            if count < 1:
                raise ValueError(f"{name} is {count}; it must be at least 1")
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(f"temperature is {temperature}; it must be a finite number above 0")
        if not 0 < fresh_share <= 1:
            raise ValueError(f"fresh_share is {fresh_share}; it must be above 0 and at most 1")
        if predictor not in PREDICTORS:
            raise ValueError(f"predictor is {predictor!r}; it must be one of {', '.join(PREDICTORS)}")
        if not 0 <= decay <= 1:
            raise ValueError(f"decay is {decay}; it must be within [0, 1]")
        self.capacity = capacity
        self.candidates = candidates
        self.temperature = temperature
        self.replay_places = math.floor((1 - fresh_share) * self.capacity)
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.predictor = PREDICTORS[predictor](decay)
        self.replay = LatestGroups(buffer_groups)
        self._metrics: dict[str, float] = {}

    def choose_prompts(self, step: int, candidates: Sequence[Prompt], count: int) -> list[int]:
        """`count` candidates drawn without replacement, in the order in which they were given."""
        predicted, _ = self.predictor.predict(candidates)
        scores = -np.abs(predicted - TARGET)
        # The largest of score / temperature + Gumbel noise are draws from the softmax without replacement
        # (arXiv 1903.06059), and no probability is ever rounded to 0.
        keys = scores / self.temperature + self.rng.gumbel(size=len(candidates))
        return sorted(int(position) for position in np.argsort(-keys, kind="stable")[:count])

    def begin_step(self, step: int) -> list[Prompt]:
        """Nothing is generated again."""
        return []

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """Informative fresh groups and replayed ones. `reevaluated` is empty."""
        predicted, known = self.predictor.predict([group.prompt for group in fresh])
        self.predictor.update(fresh)

        places = min(len(self.replay), self.replay_places)
        batch = fresh_alone(fresh, [has_signal(group) for group in fresh], self.capacity - places)
        batch.replayed = self.replay.sample(places, self.rng, lambda group: True)

        for group in fresh:  # last: a step's own groups are not replayed in that same step
            self.replay.add(group)
        self.replay.check()
        self._metrics = {
            "groups/capacity": self.capacity,
            "buffer/replay": len(self.replay),
            "buffer/replay_bytes": self.replay.nbytes,
            "buffer/replay_added": self.replay.counts["added"],
            "buffer/replay_evicted": self.replay.counts["evicted"],
            "prompts/known": len(self.predictor.counts),
            **forecast_metrics(fresh, predicted, known),
        }
        if len(self.replay):
            self._metrics["buffer/replay_age_mean"] = float(np.mean(self.replay.ages(step)))
        return batch

    def metrics(self) -> dict[str, float]:
        """The last step, and the buffer after it.

        groups/capacity.
        buffer/replay, buffer/replay_bytes: groups stored; bytes of their tokens and log-probs.
        buffer/replay_added, buffer/replay_evicted: groups that were stored, and that left, so far. A group leaves for
            want of room, or because there is a newer one of its prompt.
        buffer/replay_age_mean: trainer steps since the stored groups were generated.
        prompts/known: prompts that there was a group of.
        And see `forecast_metrics`.
        """
        return dict(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """Predictor, buffer and generator state."""
        return {
            "method": "dots",
            "version": STATE_VERSION,
            "rng": self.rng.bit_generator.state,
            "predictor": self.predictor.state_dict(),
            "replay": self.replay.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`.

        Raises:
            ValueError: the state is of another method or format version.
        """
        require_state(state, "dots", STATE_VERSION)
        self.rng.bit_generator.state = state["rng"]
        self.predictor.load_state_dict(state["predictor"])
        self.replay.load_state_dict(state["replay"])
