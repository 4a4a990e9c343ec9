"""The rules of five published methods, as plainly as they can be written.

The functions are slow on purpose: they enumerate, or loop as the definition does. They were written from the papers and
from their authors' code, not from this package, so that tests can compare the two. Where a source leaves a choice open,
the choice is an argument.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

# --- PODS ------------------------------------------------------------------------------------------------------------


def exact_variance(rewards: Sequence[float]) -> Fraction:
    """The variance of some rewards, divided by their number, without rounding: so that equal variances are equal."""
    exact = [Fraction(reward) for reward in rewards]
    mean = sum(exact, Fraction(0)) / len(exact)
    return sum(((reward - mean) ** 2 for reward in exact), Fraction(0)) / len(exact)


def pods_subset(rewards: Sequence[float], m: int) -> tuple[float, list[tuple[int, ...]]]:
    """PODS trains on the m of n responses whose rewards have the largest variance: that variance, and every best set.

    All subsets are enumerated. Source: arXiv 2504.13818, max-variance down-sampling. Dividing by m - 1, as the authors'
    code does, has the same best sets.
    """
    sets = list(itertools.combinations(range(len(rewards)), m))
    variances = [exact_variance([rewards[i] for i in chosen]) for chosen in sets]
    best = max(variances)
    return float(best), [chosen for chosen, variance in zip(sets, variances, strict=True) if variance == best]


def pods_scan(rewards: Sequence[float], m: int) -> tuple[float, ...]:
    """PODS as the authors scan: the rewards kept, descending. Of equal variances the first tried stays.

    They try the m highest, then i highest with m - i lowest for i = 0, 1, ..., m - 1. Source: YixuanEvenXu/pods,
    trainer/maxvargrpo_trainer.py, lines 515-525, commit 187f43b. Which of several equal rewards is kept is left open.
    """
    ordered = sorted(rewards, reverse=True)
    tried = [ordered[:m]] + [ordered[:i] + ordered[len(ordered) - (m - i) :] for i in range(m)]
    return tuple(max(tried, key=exact_variance))  # of equal ones, max returns the first


def group_relative(
    kept: Sequence[float], baseline: Sequence[float] | None = None, *, eps: float = 1e-4, ddof: int = 1
) -> list[float]:
    """Advantages (r - mean) / (std + eps) of the kept rewards, with mean and std over `baseline`, or over the kept.

    PODS takes both over the kept responses, with ddof 1 and eps 1e-4. Source: YixuanEvenXu/pods,
    trainer/maxvargrpo_trainer.py, lines 527-533, commit 187f43b; GRPO over all that were generated.
    """
    over = kept if baseline is None else baseline
    mean = sum(over) / len(over)
    squares = sum((reward - mean) ** 2 for reward in over)
    std = math.sqrt(squares / (len(over) - ddof)) if len(over) > ddof else 0.0
    return [(reward - mean) / (std + eps) for reward in kept]


# --- Rollout-level prioritised replay --------------------------------------------------------------------------------


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights as probabilities."""
    total = sum(weights)
    return [weight / total for weight in weights] if total > 0 else [0.0 for _ in weights]


def rollout_priorities(
    advantages: Sequence[float], ages: Sequence[int], max_age: int, *, alpha: float = 0.5, eps: float = 1e-6
) -> list[float]:
    """The probability of each stored response: (abs(A) + eps) ** alpha, normalised over those with age <= max_age.

    An older response has been removed, so its probability is 0. Source: arXiv 2606.04560, abstract (priority by the
    magnitude of the advantage, removal by age); the exponent and the defaults are second-hand, from
    ugadiarov-la-phystech-edu/custom_vcpo, recipe/fully_async_policy/rollout_replay.py, commit 6b06e59.
    """
    return normalized(
        [(abs(a) + eps) ** alpha if age <= max_age else 0.0 for a, age in zip(advantages, ages, strict=True)]
    )


def rollout_draw_size(fresh: int, available: int, *, ratio: float = 0.5, step: int, warmup: int = 20) -> int:
    """How many stored responses join `fresh` new ones: round(ratio * fresh), at most what there is; 0 in the warm-up.

    Source: as of `rollout_priorities`, second-hand. Steps count from 0.
    """
    return 0 if step < warmup else min(round(ratio * fresh), available)


def draws_without_replacement(probabilities: Sequence[float], k: int) -> dict[frozenset[int], float]:
    """The probability of each set of k items if they are drawn one after another, each with its share of what is left.

    Every order of drawing is enumerated.
    """
    result: dict[frozenset[int], float] = {}
    for order in itertools.permutations(range(len(probabilities)), k):
        chance, left = 1.0, sum(probabilities)
        for item in order:
            chance *= probabilities[item] / left if left > 0 else 0.0
            left -= probabilities[item]
        result[frozenset(order)] = result.get(frozenset(order), 0.0) + chance
    return result


@dataclass
class RolloutReplay:
    """Rollout-level replay, step by step.

    A step drops groups of equal rewards, removes what is older than max_age, draws from what was stored in EARLIER
    steps, and then stores the step's own responses, with the advantages that they have in their own group. Those are
    never computed again, and drawing removes nothing. Source: arXiv 2606.04560, abstract; the order is second-hand, as
    of `rollout_priorities`.
    """

    max_age: int = 10
    ratio: float = 0.5
    warmup: int = 20
    alpha: float = 0.5
    eps: float = 1e-6
    capacity: int = 30_000
    stored: list[tuple[Hashable, float, int]] = field(default_factory=list)  # name, advantage, step of birth

    def step(
        self, step: int, groups: Mapping[Hashable, Sequence[float]], draw: Callable[[list[float], int], Sequence[int]]
    ) -> tuple[list[Hashable], list[Hashable]]:
        """The step's responses and the replayed ones, by name; `draw` gets probabilities and how many to draw.

        The i-th response of group g is named (g, step, i).
        """
        fresh = [
            ((name, step, i), advantage)
            for name, rewards in groups.items()
            if len(set(rewards)) > 1
            for i, advantage in enumerate(group_relative(rewards))
        ]
        self.stored = [entry for entry in self.stored if step - entry[2] <= self.max_age]
        size = rollout_draw_size(len(fresh), len(self.stored), ratio=self.ratio, step=step, warmup=self.warmup)
        ages = [step - born for _, _, born in self.stored]
        chances = rollout_priorities([a for _, a, _ in self.stored], ages, self.max_age, alpha=self.alpha, eps=self.eps)
        replayed = [self.stored[i][0] for i in draw(chances, size)] if size else []
        self.stored += [(name, advantage, step) for name, advantage in fresh]
        self.stored = self.stored[max(0, len(self.stored) - self.capacity) :]
        return [name for name, _ in fresh], replayed


# --- AR3PO -----------------------------------------------------------------------------------------------------------


def ar3po_stages(outcomes: Mapping[Hashable, Sequence[float]], k: int, stages: int, *, success: float = 1.0) -> dict:
    """Rewards of the responses that adaptive rollout generates, by prompt.

    `outcomes` holds the rewards that a prompt's responses would have, in the order of generation. Every prompt still in
    the pool gets k responses in a stage, and leaves the pool as soon as one of its responses is right. Source: arXiv
    2509.25808, by a summary of its method; the values of k and of the number of stages are not known.
    """
    pool, result = set(outcomes), {prompt: [] for prompt in outcomes}
    for stage in range(stages):
        for prompt in sorted(pool, key=list(outcomes).index):
            result[prompt] += list(outcomes[prompt][stage * k : (stage + 1) * k])
        pool = {prompt for prompt in pool if max(result[prompt]) < success}
    return result


@dataclass
class ReusedGroup:
    """A prompt's group as AR3PO trains on it."""

    rewards: list[float]
    place: int | None = None  # where a stored response stands
    name: Hashable = None  # which stored response

    def trained(self, *, stop_gradient: bool) -> list[bool]:
        """Whether each response has a gradient: with option II of the paper the stored one has none."""
        return [not (stop_gradient and i == self.place) for i in range(len(self.rewards))]


@dataclass
class ResponseReuse:
    """AR3PO's adaptive rollout and reuse of responses, step by step.

    If no response of a prompt is right after all the stages and right ones of the same prompt are stored, then a stored
    one takes the place of one wrong response, so the size of the group stays. Right responses of a step are stored
    after the groups were made. Source: arXiv 2509.25808, by a summary of its method. The stored one is drawn uniformly;
    which wrong one gives way is not known; both are arguments here. A bound of the store is not known: there is none.
    """

    k: int
    stages: int
    success: float = 1.0
    stored: dict[Hashable, list[Hashable]] = field(default_factory=dict)

    def step(
        self,
        step: int,
        outcomes: Mapping[Hashable, Sequence[float]],
        pick: Callable[[list[Hashable]], Hashable],
        place: Callable[[list[int]], int],
    ) -> dict[Hashable, ReusedGroup]:
        """Groups by prompt. The i-th response of a prompt is named (prompt, step, i) in the store."""
        groups = {}
        generated = ar3po_stages(outcomes, self.k, self.stages, success=self.success)
        for prompt, rewards in generated.items():
            groups[prompt] = ReusedGroup(list(rewards))
            if max(rewards) < self.success and self.stored.get(prompt):
                at = place(list(range(len(rewards))))
                groups[prompt] = ReusedGroup(list(rewards), at, pick(self.stored[prompt]))
                groups[prompt].rewards[at] = self.success
        for prompt, rewards in generated.items():
            right = [(prompt, step, i) for i, reward in enumerate(rewards) if reward >= self.success]
            self.stored.setdefault(prompt, []).extend(right)
        return groups


# --- Freshness-aware prioritised replay ------------------------------------------------------------------------------


def freshness_priorities(
    magnitudes: Sequence[float], ages: Sequence[int], tau: float = 500.0, eps: float = 1e-6
) -> list[float]:
    """(abs(r) + eps) * exp(-age / tau), age being training steps since the response was stored, at least 0.

    Source: arXiv 2604.16918; Vision-CAIR/Freshness-Aware-PER, roll/agentic/replay_buffer/priority_functions.py,
    `reward_fresh_priority`, commit dbb91df.
    """
    return [(abs(r) + eps) * math.exp(-max(0, age) / tau) for r, age in zip(magnitudes, ages, strict=True)]


def freshness_probabilities(priorities: Sequence[float], alpha: float = 0.6) -> list[float]:
    """p ** alpha, normalised. The exponent is applied after the decay. Source: as above, trajectory_buffer.py."""
    return normalized([priority**alpha for priority in priorities])


@dataclass
class FreshnessStore:
    """Priorities of a store over time, as the authors' code keeps them: what it would sample by, before the exponent.

    A new entry stands at 1 until the refresh of all entries. Source: Vision-CAIR/Freshness-Aware-PER,
    roll/agentic/replay_buffer/trajectory_buffer.py, commit dbb91df.
    """

    tau: float = 500.0
    eps: float = 1e-6
    base: list[float] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    standing: list[float] = field(default_factory=list)

    def push(self, step: int, reward: float) -> None:
        """Store a response."""
        self.base.append(abs(reward) + self.eps)
        self.born.append(step)
        self.standing.append(1.0)

    def decayed(self, step: int, i: int) -> float:
        """The base priority of entry i, decayed by its age."""
        return self.base[i] * math.exp(-max(0, step - self.born[i]) / self.tau)

    def refresh(self, step: int) -> None:
        """Every entry gets its decayed priority, drawn or not."""
        self.standing = [max(self.decayed(step, i), 1e-8) for i in range(len(self.base))]


# --- Prompt Replay ---------------------------------------------------------------------------------------------------


@dataclass
class PromptReplay:
    """Prompts near a pass rate of 1/2 again: which, when, and how often.

    A prompt may come again at a step if its last pass rate is in the window and above 0, its last generation, new or
    replayed, is at least `cooldown` steps ago, and it was replayed fewer than `max_uses` times. The nearest to 1/2 come
    first; of equally near ones the lower rate, then fewer uses, then the smaller index. Replays fill at most
    floor(fraction * prompts) places of a step, and never more than `largest_share` of it; the rest are new prompts.
    Source: arXiv 2603.21177, abstract; baroian/GRPO_prompt_replay, open-instruct/open_instruct/grpo_fast.py, commit
    9e406c7 (there `largest_share` is 1/2; the paper's runs have a fraction of 0.75, second-hand, so it is an argument).
    """

    prompts: int
    fraction: float = 0.5
    cooldown: int = 5
    max_uses: int = 20
    window: tuple[float, float] = (0.25, 0.75)
    largest_share: float = 0.5
    rate: dict[int, float] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)
    under_way: set[int] = field(default_factory=set)

    def budget(self) -> int:
        """The most replays in a step."""
        return min(math.floor(self.prompts * self.fraction), math.floor(self.prompts * self.largest_share))

    def allowed(self, step: int, prompt: int) -> bool:
        """Whether a prompt may be replayed at a step. A max_uses of 0 or less means no limit."""
        rate, (low, high) = self.rate.get(prompt, 0.0), self.window
        return (
            rate > 0
            and low <= rate <= high
            and prompt not in self.under_way
            and step - self.last[prompt] >= self.cooldown
            and (self.max_uses <= 0 or self.uses.get(prompt, 0) < self.max_uses)
        )

    def choose(self, step: int, new: Iterator[int]) -> list[tuple[int, bool]]:
        """The step's prompts, replays first, each with whether it is a replay. `new` gives new prompts in their order.

        A new prompt that is replayed in the same step is passed over.
        """
        candidates = sorted(
            (prompt for prompt in self.rate if self.allowed(step, prompt)),
            key=lambda prompt: (abs(self.rate[prompt] - 0.5), self.rate[prompt], self.uses.get(prompt, 0), prompt),
        )
        replayed = candidates[: self.budget()]
        for prompt in replayed:
            self.uses[prompt] = self.uses.get(prompt, 0) + 1
            self.under_way.add(prompt)
        others = itertools.islice((prompt for prompt in new if prompt not in replayed), self.prompts - len(replayed))
        return [(prompt, True) for prompt in replayed] + [(prompt, False) for prompt in others]

    def record(self, step: int, rates: Iterable[tuple[int, float]]) -> None:
        """The pass rates of a step's prompts, new and replayed. They take the place of earlier ones."""
        for prompt, rate in rates:
            self.rate[prompt], self.last[prompt] = rate, step
            self.under_way.discard(prompt)
