"""The rules of published methods, as plainly as they can be written.

The functions are slow on purpose: they enumerate, or loop as the definition does. They were written from the papers and
from their authors' code, not from this package, so that tests can compare the two. Where a source leaves a choice open,
the choice is an argument.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction


def exact_mean(rewards: Iterable[float]) -> Fraction:
    """The mean of some rewards, without rounding."""
    exact = [Fraction(reward) for reward in rewards]
    return sum(exact, Fraction(0)) / len(exact)


def exact_variance(rewards: Sequence[float]) -> Fraction:
    """The variance of some rewards, divided by their number, without rounding: so that equal variances are equal."""
    mean = exact_mean(rewards)
    return exact_mean([(Fraction(reward) - mean) ** 2 for reward in rewards])


def pods_subsets(rewards: Sequence[float], m: int) -> list[tuple[int, ...]]:
    """PODS trains on the m of n responses whose rewards have the largest variance: every best set.

    All subsets are enumerated. Source: arXiv 2504.13818, max-variance down-sampling. Dividing by m - 1, as the authors'
    code does, has the same best sets.
    """
    sets = list(itertools.combinations(range(len(rewards)), m))
    variances = [exact_variance([rewards[i] for i in chosen]) for chosen in sets]
    return [chosen for chosen, variance in zip(sets, variances, strict=True) if variance == max(variances)]


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights as probabilities."""
    total = sum(weights)
    return [weight / total for weight in weights] if total > 0 else [0.0 for _ in weights]


def rollout_priorities(advantages: Sequence[float], *, alpha: float = 0.5, eps: float = 1e-6) -> list[float]:
    """The probability of each stored response: (abs(A) + eps) ** alpha, normalised.

    Source: arXiv 2606.04560, abstract (priority by the magnitude of the advantage); the exponent and the defaults are
    second-hand, from ugadiarov-la-phystech-edu/custom_vcpo, recipe/fully_async_policy/rollout_replay.py, commit
    6b06e59.
    """
    return normalized([(abs(advantage) + eps) ** alpha for advantage in advantages])


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
    """Rollout-level replay, step by step: what is stored, and how many stored responses a step replays.

    A step drops groups of equal rewards, removes what is older than max_age, draws from what was stored in EARLIER
    steps, and then stores the step's own responses. Drawing removes nothing. It draws round(ratio * fresh), at most
    what there is, and nothing in the warm-up. Source: arXiv 2606.04560, abstract; the order and the numbers are
    second-hand, as of `rollout_priorities`.
    """

    max_age: int = 10
    ratio: float = 0.5
    warmup: int = 20
    capacity: int = 30_000
    stored: list[tuple[tuple[Hashable, int], int]] = field(default_factory=list)  # name, step of birth

    def step(self, step: int, groups: Mapping[Hashable, Sequence[float]]) -> tuple[list[tuple[Hashable, int]], int]:
        """The step's responses by name, and how many are replayed. The i-th response of group g is named (g, i)."""
        fresh = [(name, i) for name, rewards in groups.items() if len(set(rewards)) > 1 for i in range(len(rewards))]
        self.stored = [entry for entry in self.stored if step - entry[1] <= self.max_age]
        size = 0 if step < self.warmup else min(round(self.ratio * len(fresh)), len(self.stored))
        self.stored += [(name, step) for name in fresh]
        self.stored = self.stored[max(0, len(self.stored) - self.capacity) :]
        return fresh, size


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
    rate: dict[int, float] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)
    under_way: set[int] = field(default_factory=set)

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

    def choose(self, step: int) -> list[int]:
        """The prompts that the step replays."""
        candidates = sorted(
            (prompt for prompt in self.rate if self.allowed(step, prompt)),
            key=lambda prompt: (abs(self.rate[prompt] - 0.5), self.rate[prompt], self.uses.get(prompt, 0), prompt),
        )
        replayed = candidates[: math.floor(self.prompts * self.fraction)]
        for prompt in replayed:
            self.uses[prompt] = self.uses.get(prompt, 0) + 1
            self.under_way.add(prompt)
        return replayed

    def record(self, step: int, rates: Iterable[tuple[int, float]]) -> None:
        """The pass rates of a step's prompts, new and replayed. They take the place of earlier ones."""
        for prompt, rate in rates:
            self.rate[prompt], self.last[prompt] = rate, step
            self.under_way.discard(prompt)


def by_definition(values, rewards, log_ratios, mask, gamma, lambd):
    """Espeholt et al., Eq. 1, as a sum over the tokens that follow; lists of one row, positions that are masked too.

    v_s = V_s + sum over t >= s of gamma^(t - s) (product of c_s to c_(t-1)) rho_t delta_t
    """
    length = len(values)
    values = [value if on else 0.0 for value, on in zip(values, mask, strict=True)] + [0.0]
    rewards = [reward if on else 0.0 for reward, on in zip(rewards, mask, strict=True)]
    ratios = [math.exp(ratio) if on else 1.0 for ratio, on in zip(log_ratios, mask, strict=True)]
    rho, c = [min(1, ratio) for ratio in ratios], [lambd * min(1, ratio) for ratio in ratios]
    delta = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(length)]
    targets = [
        values[s] + sum(gamma ** (t - s) * math.prod(c[s:t]) * rho[t] * delta[t] for t in range(s, length))
        for s in range(length)
    ] + [0.0]
    return [delta[s] + gamma * lambd * (targets[s + 1] - values[s + 1]) for s in range(length)], targets[:-1]
