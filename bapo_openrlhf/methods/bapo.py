"""BAPO and BA-PPO: batch adaptation after Algorithm 1 of "Buffer Matters" (arXiv 2602.20722).

The same construction feeds group-relative advantages (BAPO-GRPO) and critic-based GAE (BA-PPO): nothing here knows how
advantages are made.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from bapo_openrlhf.adapt.batch import Batch, fill
from bapo_openrlhf.adapt.buffers import HardBuffer, ReplayBuffer
from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.adapt.group import Group, Prompt, mean_reward
from bapo_openrlhf.adapt.metric import ATTEMPTS
from bapo_openrlhf.adapt.prefixes import Prefixes, by_prefix
from bapo_openrlhf.adapt.schedule import due
from bapo_openrlhf.adapt.theory import k1, k2, k3
from bapo_openrlhf.adapt.thresholds import AdaptiveThresholds, Interval
from bapo_openrlhf.methods.base import FilteredMethod, option

C2 = Interval(Fraction(1, 8), Fraction(4, 8))  # where c2 and c3 move, Table 3
C3 = Interval(Fraction(2, 8), Fraction(5, 8))


@dataclass(eq=False, kw_only=True)
class BAPO(FilteredMethod):
    """Keeps groups with signal, generates again for hard prompts, and replays groups of medium difficulty.

    It is Algorithm 1, lines 8-17. Sampling, weights and updates (lines 3-7, 18) are the trainer's. The fields have the
    symbols and defaults of Table 3, and the names of the --adapt flags. The mini-test of Sec. 5.2 sets c1 = 0 and c2 =
    c3 = 1/2: the same algorithm without thresholds to tune.

    With `prefix_share` above 0, a re-evaluation generates from a prefix for up to half of `max_reevaluated_prompts`, as
    `prefix_sampling` does it. A hard prompt without a right response begins with its worked solution, if the data has
    one. A group with a prefix takes no prompt out of the hard buffer, moves no threshold, and is not replayed. In our
    toy setting prefixes did not help: docs/results.md.

    Args:
        prefix_share: First share of a stored response that is a prefix. 0 means that there are no prefixes.
    """

    USE = "Use it to reproduce the paper: the other methods are compared with it."
    SOURCE = "arXiv 2602.20722"
    STATE: ClassVar[tuple[str, ...]] = ("rng", "thresholds", "hard", "replay", "prefixes")
    METRICS = (
        ATTEMPTS, *HardBuffer.METRICS, *ReplayBuffer.METRICS, *AdaptiveThresholds.METRICS, *Prefixes.METRICS
    )  # fmt: skip

    c1: Fraction = Fraction(1, 8)
    c2: Interval = C2
    c3: Interval = C3
    threshold_direction: str = "eq8"
    buffer_size: int = 256
    replay_steps: int = 3  # 0 turns X3 off
    reevaluate_every: int = 5  # m; 0 turns X2 off
    max_reevaluated_prompts: int = 128
    eps: float = 1e-6
    prefix_share: Fraction = option(Fraction(0), "in [0, 1)")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.thresholds = AdaptiveThresholds(self.c2, self.c3, direction=self.threshold_direction)
        self.hard = HardBuffer(self.buffer_size)
        self.replay = ReplayBuffer(self.buffer_size, self.replay_steps)
        self.prefixes, self.prefixed = Prefixes(self.buffer_size, self.prefix_share), self.prefix_share > 0
        self._unanswered: Sequence[Prompt] = ()

    def wanted(self, step: int, prompts: int) -> int:
        """B less what X3 could replay by the c2 and c3 of the step before, because Eq. 8 needs this step's rewards."""
        self.replay.expire(step)
        return self.capacity - sum(map(self.replayable, self.replay))

    def begin_step(self, step: int) -> list[Prompt]:
        """Lines 13-14: every m steps, up to `max_reevaluated_prompts` hard prompts of earlier steps, oldest first.

        Prompts with a prefix come last, and are at most half of `max_reevaluated_prompts`.
        """
        self.replay.expire(step)
        count = self.max_reevaluated_prompts if due(step, self.reevaluate_every) else 0
        hard, half = self.hard.oldest(count), count // 2 if self.prefixed else 0
        never_right = [entry.prompt for entry in hard[: count - half] if not entry.mean]
        prefix_prompts = self.prefixes.take(half, never_right, self.solutions)
        prompts = [entry.prompt for entry in hard[: count - len(prefix_prompts)]]
        self.hard.send(prompts)
        return [*prompts, *prefix_prompts]

    def draw_replay(self, count: int, accept: Callable[[Group], bool]) -> list[Group]:
        """Up to `count` of the stored groups that are accepted, drawn uniformly (Eq. 7)."""
        return self.replay.sample(count, self.rng, accept)

    def improved(self, group: Group) -> bool:
        """Eq. 6: whether a hard prompt that was generated again has improved and goes into X2, c1 < mean < 1.

        For rewards other than 0 and 1, `has_signal` stands for mean < 1: the rewards differ.
        """
        return group.mean > self.c1 and has_signal(group)

    def replayable(self, group: Group) -> bool:
        """Whether a group is stored and replayed: c2 <= mean <= c3 (Eq. 5, third term)."""
        return self.thresholds.c2 <= group.mean <= self.thresholds.c3

    def room(self) -> int:
        """Most responses of X1, X2 and X3 together."""
        return self.max_responses

    def unanswered(self, prompts: Sequence[Prompt]) -> None:
        """Note hard prompts that `build_batch` puts last."""
        self._unanswered = prompts

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """Lines 8-9, 11 and 14-17."""
        self.step = step
        self.thresholds.update(mean_reward(fresh))  # Eq. 8
        plain_groups, prefix_groups = by_prefix(reevaluated)
        x2, unimproved, solved = self._review(plain_groups)
        prefixed, unsteered = self.prefixes.review(prefix_groups)

        # X1: filtered fresh groups (Eq. 5, first term). X3: informative groups of earlier steps (Eq. 7), but no prompt
        # of X2, which was asked again in this step.
        prompts = {group.prompt.id for group in x2}
        batch = fill(self.room(), fresh, self.keeps(fresh), x2, prefixed=prefixed, replay=lambda free: self.draw_replay(
            free // self.group_size, lambda group: self.replayable(group) and group.prompt.id not in prompts
        ))  # fmt: skip
        batch.unimproved, batch.solved, batch.unsteered = unimproved, solved, unsteered

        # Stored last: a step's own groups are neither re-evaluated nor replayed in that same step.
        for group in fresh:
            if group.mean <= self.c1:
                self.hard.add(group)
            if self.replay_steps and self.replayable(group):
                self.replay.add(group)
        if self.prefixed:
            self.prefixes.store((*fresh, *plain_groups), self.rng)

        self.measured = {
            "groups/reevaluation_attempts": len(plain_groups),
            **self.hard.metrics(step),
            **self.replay.metrics(step),
            **self.thresholds.metrics(),
            **(self.prefixes.metrics() if self.prefixed else {}),
        }
        return batch

    def _review(self, reevaluated: Sequence[Group]) -> tuple[list[Group], list[Group], list[Group]]:
        x2: list[Group] = []
        unimproved: list[Group] = []
        solved: list[Group] = []
        for group in reevaluated:
            self.hard.back(group.prompt)
            easy = group.mean > self.c1
            if self.improved(group):
                x2.append(group)
            elif easy and not has_signal(group):
                solved.append(group)
            else:
                unimproved.append(group)
                easy = False
            if easy:
                self.hard.remove(group.prompt)
            else:
                self.hard.add(group)  # the newer failure replaces the older one
        for prompt in self._unanswered:
            if prompt.prefix:
                self.prefixes.back(prompt)
                continue
            self.hard.back(prompt)
            self.hard.postpone(prompt)  # otherwise one whose verifier always fails would stay first in the queue
        self._unanswered = ()
        return x2, unimproved, solved

    def constants(self) -> tuple[float, float, float]:
        """K1, K2, K3 of Theorem 3.2 with today's thresholds (Eq. 11-13)."""
        c2, c3 = float(self.thresholds.c2), float(self.thresholds.c3)
        return k1(self.group_size, self.eps), k2(float(self.c1), self.eps), k3(c2, c3, self.eps)
