"""BAPO and BA-PPO: batch adaptation after Algorithm 1 of "Buffer Matters" (arXiv 2602.20722).

The same construction feeds group-relative advantages (BAPO-GRPO) and critic-based GAE (BA-PPO): nothing here knows how
advantages are made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

import numpy as np

from bapo_openrlhf.adapt.batch import Batch, cut_to, replay_room
from bapo_openrlhf.adapt.buffers import HardBuffer, ReplayBuffer
from bapo_openrlhf.adapt.filters import has_signal, make_filter
from bapo_openrlhf.adapt.group import Group, Prompt, mean_reward
from bapo_openrlhf.adapt.schedule import due
from bapo_openrlhf.adapt.theory import k1, k2, k3
from bapo_openrlhf.adapt.thresholds import AdaptiveThresholds, Interval
from bapo_openrlhf.methods.base import Method, require_state

STATE_VERSION = 1
C2 = Interval(Fraction(1, 8), Fraction(4, 8))  # where c2 and c3 move, Table 3
C3 = Interval(Fraction(2, 8), Fraction(5, 8))


@dataclass(frozen=True)
class BAPOConfig:
    """Numbers of the method; symbols and defaults of Table 3.

    The mini-test of Sec. 5.2 is c1 = 0, c2 = c3 = 1/2: the same algorithm without thresholds to tune.
    """

    capacity: int  # B, groups a batch holds at most
    group_size: int  # G
    filter: str = "range"
    gaussian_mean: float = 0.5
    gaussian_std: float = 0.2
    uniform_fraction: float = 0.6
    c1: Fraction = Fraction(1, 8)
    c2: Interval = C2
    c3: Interval = C3
    threshold_direction: str = "eq8"
    reward_ema: float = 0.0
    buffer_size: int = 256
    replay_buffer_size: int = 256
    replay_steps: int = 3  # 0 turns X3 off
    reevaluate_every: int = 5  # m; 0 turns X2 off
    max_reevaluated_prompts: int = 128
    min_tv_reevaluated: float | None = None  # beyond the paper
    eps: float = 1e-6


class BAPO(Method):
    """Algorithm 1, lines 8-17. Sampling, weights and updates (lines 3-7, 18) are the trainer's."""

    def __init__(self, config: BAPOConfig, seed: int = 0) -> None:
        self.config = config
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.fresh_filter = make_filter(
            config.filter, mean=config.gaussian_mean, std=config.gaussian_std, fraction=config.uniform_fraction
        )
        self.thresholds = AdaptiveThresholds(
            config.c2, config.c3, direction=config.threshold_direction, ema=config.reward_ema
        )
        self.hard = HardBuffer(config.buffer_size)
        self.replay = ReplayBuffer(config.replay_buffer_size, config.replay_steps)
        self._named: list[Prompt] = []  # to be generated again in this step
        self.moved = 0.0  # distance that the policy went since hard prompts were last generated again
        self._metrics: dict[str, float] = {}

    @classmethod
    def parameters(cls) -> Mapping[str, inspect.Parameter]:
        """The fields of `BAPOConfig`, which are named as the --adapt flags."""
        return inspect.signature(BAPOConfig).parameters

    @classmethod
    def build(cls, given: Mapping[str, Any], options: Mapping[str, Any]) -> Self:
        """See `Method.build`."""
        return cls(BAPOConfig(**{name: given[name] for name in cls.parameters()}, **options), seed=given["seed"])

    def begin_step(self, step: int) -> list[Prompt]:
        """Lines 13-14: every m steps, up to `max_reevaluated_prompts` hard prompts of earlier steps, oldest first.

        Beyond the paper, with `min_tv_reevaluated`: not before the policy has gone that far since the last time.
        """
        self.replay.expire(step)
        again = due(step, self.config.reevaluate_every) and self.moved >= (self.config.min_tv_reevaluated or 0.0)
        self._named = self.draw_hard(self.config.max_reevaluated_prompts if again else 0)
        if self._named:
            self.moved = 0.0
        return list(self._named)

    def policy_moved(self, distance: float) -> None:
        """Add up the distances."""
        self.moved += distance

    def draw_hard(self, count: int) -> list[Prompt]:
        """Up to `count` hard prompts to generate again: the oldest."""
        return [entry.prompt for entry in self.hard.oldest(count)]

    def draw_replay(self, count: int, accept: Callable[[Group], bool]) -> list[Group]:
        """Up to `count` stored groups that are accepted: at random, each as likely (Eq. 7)."""
        return self.replay.sample(count, self.rng, accept)

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """Lines 8-9, 11 and 14-17."""
        config = self.config
        self.thresholds.update(mean_reward(fresh))  # Eq. 8
        c1, c2, c3 = config.c1, self.thresholds.c2, self.thresholds.c3

        # X1, filtered fresh groups (Eq. 5, first term)
        keep = self.fresh_filter(fresh, self.rng)
        x1 = [group for group, kept in zip(fresh, keep, strict=True) if kept]
        filtered = [group for group, kept in zip(fresh, keep, strict=True) if not kept]

        # X2, improved hard prompts (Eq. 6): c1 < mean < 1
        x2: list[Group] = []
        unimproved: list[Group] = []
        solved: list[Group] = []
        for group in reevaluated:
            if group.mean <= c1:
                self.hard.add(group)  # still too hard: the newer failure replaces the older
                unimproved.append(group)
                continue
            self.hard.remove(group.prompt)
            (x2 if has_signal(group) else solved).append(group)
        answered = {group.prompt.id for group in reevaluated}
        for prompt in self._named:
            if prompt.id not in answered:
                self.hard.postpone(prompt)  # its verifier failed: not for ever the first in the queue

        # X3, informative groups of earlier steps, to fill what is left (Eq. 7)
        def replayable(group: Group) -> bool:
            return c2 <= group.mean <= c3

        batch = cut_to(config.capacity, x1, x2)
        batch.filtered, batch.unimproved, batch.solved = filtered, unimproved, solved
        available = sum(map(replayable, self.replay))
        batch.replayed = self.draw_replay(replay_room(config.capacity, len(batch), available), replayable)

        # Stored last: a step's own groups are neither re-evaluated nor replayed in that same step.
        for group in fresh:
            if group.mean <= c1:
                self.hard.add(group)
            if config.replay_steps and replayable(group):
                self.replay.add(group)

        self.hard.check()
        self.replay.check()
        self._metrics = {
            "groups/reevaluation_attempts": len(reevaluated),
            "groups/capacity": config.capacity,
            "buffer/hard": len(self.hard),
            "buffer/replay": len(self.replay),
            "buffer/replay_bytes": self.replay.nbytes,
            "buffer/replay_added": self.replay.counts["added"],
            "buffer/replay_evicted": self.replay.counts["evicted"],
            "buffer/replay_expired": self.replay.counts["expired"],
            "threshold/average_reward": float(self.thresholds.average_reward or 0),
            "threshold/c2": float(c2),
            "threshold/c3": float(c3),
        }
        for name, buffer in (("hard", self.hard), ("replay", self.replay)):
            if len(buffer):
                self._metrics[f"buffer/{name}_age_mean"] = float(np.mean(buffer.ages(step)))
        return batch

    def constants(self) -> tuple[float, float, float]:
        """K1, K2, K3 of Theorem 3.2 with today's thresholds (Eq. 11-13)."""
        c, eps = self.config, self.config.eps
        return (
            k1(c.group_size, eps),
            k2(float(c.c1), eps),
            k3(float(self.thresholds.c2), float(self.thresholds.c3), eps),
        )

    def metrics(self) -> dict[str, float]:
        """Buffers and thresholds after the last batch."""
        return dict(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """Buffers, thresholds and generator state."""
        return {
            "method": "bapo",
            "version": STATE_VERSION,
            "rng": self.rng.bit_generator.state,
            "thresholds": self.thresholds.state_dict(),
            "hard": self.hard.state_dict(),
            "replay": self.replay.state_dict(),
            "moved": self.moved,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`.

        Raises:
            ValueError: the state is of another method or format version.
        """
        require_state(state, "bapo", STATE_VERSION)
        self.rng.bit_generator.state = state["rng"]
        self.thresholds.load_state_dict(state["thresholds"])
        self.hard.load_state_dict(state["hard"])
        self.replay.load_state_dict(state["replay"])
        self.moved = state.get("moved", 0.0)  # not in states of before
