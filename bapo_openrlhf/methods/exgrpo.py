"""ExGRPO: half of a batch are prompts that were solved before, each with a stored success (arXiv 2510.02245).

Paper: "ExGRPO: Learning to Reason from Experience". Details are those of its authors' code (ElliottYan/LUFFY, folder
ExGRPO, read at commit 01f4ae0).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from bapo_openrlhf.adapt.batch import Batch, fresh_alone
from bapo_openrlhf.adapt.filters import has_signal, make_filter
from bapo_openrlhf.adapt.group import Group, Prompt, Response, as_fraction
from bapo_openrlhf.adapt.schedule import due
from bapo_openrlhf.adapt.state import group_from_state, group_state
from bapo_openrlhf.methods.base import Method, require_state

STATE_VERSION = 1
RIGHT = 1  # a response is right where its reward is at least this


@dataclass(frozen=True)
class Experience:
    """What is stored of a prompt.

    Attributes:
        solved: k, how many responses of its last group with a right one were right; 1 to G - 1.
        group: the group of its success of lowest entropy, with that response alone.
    """

    solved: int
    group: Group


class ExGRPO(Method):
    """GRPO on fresh groups, and on prompts of an experience store, generated again with one stored success among them.

    A prompt of whose G responses 1 to G - 1 are right is stored with its right response of lowest entropy, in the
    bucket of k, the number of right ones. A newer group moves it to another bucket; one without a right response leaves
    it where it is; one with G right responses retires the prompt for good. In each step that re-evaluates, prompts are
    drawn without replacement: a bucket with weight N(k; G/2, 1), whatever its size, then one of its prompts uniformly.
    They are generated again with today's policy, and the first of the G new responses gives way to the stored success,
    which keeps the log-probs and the `policy_step` of the policy that generated it. So exchanged, the groups are X2 and
    update the store like fresh ones. X2 keeps its places in the batch; fresh groups beyond them are cut.

    All this begins after the first step in which more than `start_above` of the fresh responses are right (Pass@1).

    The paper's setting: `--adapt.reevaluate_every 1`, `--adapt.rollout_delay 1`, and `--rollout.batch_size` 1 -
    `experience_share` of `--adapt.batch_size`, or fresh groups are generated and cut. In the first steps, while too few
    prompts are stored, batches are then smaller, where the authors fill them with fresh groups.

    Deviations. Entropy is the mean of -log alpha over the response's tokens, from the stored log-probs; the authors
    have today's policy compute its entropies anew for all stored successes of the drawn prompts. As it never changes
    here, only the success of lowest entropy is stored; an old one stays until there is one of lower entropy. G
    responses are generated, where the authors generate the other G - 1. Their loss shapes the ratio w of the stored
    responses as w / (w + 0.1) and does not clip; here they are in the loss as all others, with the ratio that
    `--adapt.ratio` says. They leave retired prompts out of the data; here these still come as fresh ones, and are
    filtered while all is right. X2 has no limit of distance (`--adapt.max_tv_fresh` speaks of X1).

    Args:
        capacity: B, groups a batch holds at most.
        group_size: G.
        seed: of the generator behind the draws.
        filter, gaussian_mean, gaussian_std, uniform_fraction: the fresh filter, as the --adapt flags.
        reevaluate_every, max_reevaluated_prompts: how often prompts of the store are generated again, and how many at
            most, as the --adapt flags.
        experience_share: rho, share of the batch that these are, within [0, 1].
        start_above: Pass@1, within [0, 1], after which experience is stored and used; 0: after the first right one.

    Raises:
        ValueError: an option that is out of its range.
    """

    def __init__(
        self,
        *,
        capacity: int,
        group_size: int,
        seed: int = 0,
        filter: str = "range",
        gaussian_mean: float = 0.5,
        gaussian_std: float = 0.2,
        uniform_fraction: float = 0.6,
        reevaluate_every: int = 1,
        max_reevaluated_prompts: int = 128,
        experience_share: Fraction = Fraction(1, 2),
        start_above: Fraction = Fraction(7, 20),
    ) -> None:
        for name, value in (("experience_share", experience_share), ("start_above", start_above)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; it must be within [0, 1]")
        self.capacity = capacity
        self.group_size = group_size
        self.every = reevaluate_every
        self.places = min(math.floor(as_fraction(experience_share) * self.capacity), max_reevaluated_prompts)
        self.start_above = as_fraction(start_above)
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.fresh_filter = make_filter(filter, mean=gaussian_mean, std=gaussian_std, fraction=uniform_fraction)
        self.started = False
        self.store: dict[str, Experience] = {}  # by prompt id
        self.nbytes = 0  # of what is in it, counted as it comes and goes: it may have all prompts of the data
        self.retired: set[str] = set()  # prompt ids
        self._metrics: dict[str, float] = {}

    def begin_step(self, step: int) -> list[Prompt]:
        """Prompts of the store, drawn; none before the start, or in a step that does not re-evaluate."""
        return self.draw(self.places) if due(step, self.every) else []

    def draw(self, count: int) -> list[Prompt]:
        """Up to `count` stored prompts: one after another, a bucket by its weight, then one of what is left in it."""
        buckets: dict[int, list[Prompt]] = {}
        for experience in self.store.values():
            buckets.setdefault(experience.solved, []).append(experience.group.prompt)
        drawn = []
        for _ in range(min(count, len(self.store))):
            left = sorted(k for k in buckets if buckets[k])
            exponents = -((np.array(left) - self.group_size / 2) ** 2) / 2
            weights = np.exp(exponents - exponents.max())  # or, in large groups, all could be rounded to 0
            bucket = buckets[int(self.rng.choice(left, p=weights / weights.sum()))]
            drawn.append(bucket.pop(int(self.rng.integers(len(bucket)))))
        return drawn

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """X1: fresh groups that the filter keeps. X2: groups of stored prompts, each with its stored success."""
        stored = [self.store[group.prompt.id].group for group in reevaluated]
        mixed = [
            group.exchange(0, past.standalone(past.responses[0]))
            for group, past in zip(reevaluated, stored, strict=True)
        ]
        x2 = [group for group in mixed if has_signal(group)]

        batch = fresh_alone(fresh, self.fresh_filter(fresh, self.rng), self.capacity - len(x2))
        batch.reevaluated = x2
        batch.solved = [group for group in mixed if not has_signal(group)]

        right = sum(len(right_responses(group)) for group in fresh)
        pass_rate = Fraction(right, sum(group.size for group in fresh)) if fresh else Fraction(0)
        if self.started:
            for group in (*fresh, *mixed):
                self.learn(group)
        self.started = self.started or pass_rate > self.start_above
        self._metrics = {
            "groups/capacity": self.capacity,
            "groups/reevaluation_attempts": len(reevaluated),
            "experience/started": float(self.started),
            "experience/prompts": len(self.store),
            "experience/retired": len(self.retired),
            "experience/bytes": self.nbytes,
        }
        if fresh:
            self._metrics["experience/pass_rate"] = float(pass_rate)
        if stored:
            ages = [step - past.policy_step for past in stored]
            self._metrics["exchange/age_mean"] = float(np.mean(ages))
        return batch

    def learn(self, group: Group) -> None:
        """Enter a group of this step into the store."""
        name, right = group.prompt.id, right_responses(group)
        if len(right) == group.size:
            self.retired.add(name)
            self.keep(name, None)
        elif right and name not in self.retired:
            best = min(right, key=entropy)
            held = self.store.get(name)
            if held and entropy(held.group.responses[0]) <= entropy(best):  # so it is where `best` is the stored one
                self.keep(name, replace(held, solved=len(right)))
            else:
                self.keep(name, Experience(len(right), replace(group, responses=(best,))))

    def keep(self, name: str, experience: Experience | None) -> None:
        """Put it into the store, in the place of the prompt's former one; None takes that one out."""
        held = self.store.get(name)
        self.nbytes -= held.group.sampled_nbytes if held else 0
        if experience:
            self.store[name] = experience
            self.nbytes += experience.group.sampled_nbytes
        elif held:
            del self.store[name]

    def metrics(self) -> dict[str, float]:
        """After the last batch.

        - groups/capacity: groups that a batch holds at most
        - groups/reevaluation_attempts: prompts of the store that were generated again
        - exchange/age_mean: trainer steps between the weights that generated their stored successes and today's, mean;
          where there is one
        - experience/started: 1 once Pass@1 was high enough
        - experience/pass_rate: Pass@1, share of the fresh responses that are right; where there are fresh groups
        - experience/prompts, experience/bytes: stored prompts; bytes of their successes' tokens and sampled
          log-probs
        - experience/retired: prompts of which all responses were right, so far
        """
        return dict(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """Store, retired prompts and generator state."""
        store = [{"solved": item.solved, "group": group_state(item.group)} for item in self.store.values()]
        return {
            "method": "exgrpo",
            "version": STATE_VERSION,
            "rng": self.rng.bit_generator.state,
            "started": self.started,
            "store": store,
            "retired": sorted(self.retired),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`.

        Raises:
            ValueError: the state is of another method or format version.
        """
        require_state(state, "exgrpo", STATE_VERSION)
        self.rng.bit_generator.state = state["rng"]
        self.started, self.retired = state["started"], set(state["retired"])
        self.store, self.nbytes = {}, 0
        for item in state["store"]:
            group = group_from_state(item["group"])
            self.keep(group.prompt.id, Experience(item["solved"], group))


def right_responses(group: Group) -> list[Response]:
    """The responses that are right."""
    return [response for response, reward in zip(group.responses, group.rewards, strict=True) if reward >= RIGHT]


def entropy(response: Response) -> float:
    """Estimate of the entropy per token of the policy that generated it, from its own tokens: mean of -log alpha."""
    return float(-np.mean(response.log_probs, dtype=np.float64)) if len(response.log_probs) else 0.0
