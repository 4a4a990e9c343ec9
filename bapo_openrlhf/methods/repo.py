"""RePO: each fresh prompt can bring a group of its own stored responses, after "RePO" (arXiv 2506.09340).

What the paper leaves open follows its authors' code, SihengLi99/RePO at commit 119fef6.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from bapo_openrlhf.adapt.batch import Batch, fill, highest_variance
from bapo_openrlhf.adapt.buffers import ResponseCache
from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.adapt.group import Group, Response
from bapo_openrlhf.adapt.metric import declare
from bapo_openrlhf.adapt.rewards import exact_sum
from bapo_openrlhf.methods.base import FilteredMethod

STRATEGIES = ("all", "random", "highest", "recent", "variance")


@dataclass(eq=False, kw_only=True)
class RePO(FilteredMethod):
    """Adds to each fresh group a group of responses that were stored for the same prompt.

    It is GRPO on fresh groups, J_on, plus GRPO on replayed ones, J_off: J = J_on + J_off. The last responses of each
    prompt are cached. If a prompt comes again as a fresh group and enough responses of it are cached, G cached
    responses are trained on as well. They are a group of their own, in X3, so their advantages are computed without
    the fresh ones (the paper's "split" estimation): (r - mean r_off) / std r_off. Fresh groups that the filter keeps
    come first. Replayed groups take the room that is left, those with the highest reward variance.

    The responses of a replayed group may be from several steps. Its `step` and `weights_version` are those of its
    oldest response, so the group counts as off-policy and as old as that one. Each response keeps its own
    `weights_version` and log-probs, so importance ratios are exact. The `uid` of the group is that of the newest stored
    group in it.

    Deviations: k is G, because groups are whole (the paper's 8 on + 8 off). `all` replays the cached groups as they
    were generated, each with its own advantages, but the authors normalise the whole cache at once. Replayed groups
    with equal rewards are always left out. Their loss is the mean over responses (`--actor.loss_agg_mode
    seq-mean-token-mean`), with KL only for fresh ones, and without KL in their script. The authors have no capacity.
    If `--adapt.batch_size` is twice `--rollout.batch_size`, one replayed group for each prompt fits. A prompt that
    comes twice in a step is replayed once. Of equal rewards the newer responses are taken, but the authors' code takes
    the older ones.

    The cache holds responses of every prompt of the data. The metric `cache/bytes` says how much that is.

    Args:
        strategy: Which cached responses of a prompt are replayed.
            all: Every cached group that is still whole.
            random: G of them, uniformly without replacement.
            highest: The G with the highest rewards, as in the authors' script. Once G of them are right, these have
                equal rewards, and the prompt is not replayed.
            recent: The last G, which are the prompt's last group.
            variance: The G whose rewards have the greatest variance. Of several such choices, the one with the greatest
                sum.
        cache_responses: Most responses cached of a prompt. Beyond them, the oldest leave. 0 stands for 2 G (the
            authors' 16, with G = 8).
        warm_up: A prompt is replayed once so many of its responses are cached. 0 stands for a full cache (the authors'
            16), so with the default cache a prompt is replayed from its third time on.
    """

    USE = "Use it if prompts come many times and there is memory for responses to all of them."
    SOURCE = "arXiv 2506.09340"
    STATE = ("rng", "cache")
    METRICS = (
        *ResponseCache.METRICS,
        *declare("""
            cache/drawn | groups | Groups drawn | | Groups that the strategy drew in this step.
            cache/without_signal | groups | Drawn without signal | | Drawn groups left out for equal rewards.
            cache/no_room | groups | Drawn without room | | Drawn groups left out because the batch was full.
        """),
    )

    strategy: str = "highest"
    cache_responses: int = 0
    warm_up: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.group_size
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy is {self.strategy!r}; it must be one of {', '.join(STRATEGIES)}")
        if self.cache_responses and self.cache_responses < size:
            raise ValueError(
                f"cache_responses is {self.cache_responses}; it must be at least {size}, the size of a group, or 0"
            )
        most = self.cache_responses or 2 * size
        if self.warm_up and not size <= self.warm_up <= most:
            raise ValueError(
                f"warm_up is {self.warm_up}; it must be from {size}, the size of a group, to {most}, what is cached of "
                "a prompt at most, or 0"
            )
        self.warm_up = self.warm_up or most
        self.cache = ResponseCache(most)

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """X1: fresh groups that the filter keeps. X3: replayed groups of the prompts of all fresh groups."""
        keep = self.keeps(fresh)
        prompts = {group.prompt.id: group.prompt for group in fresh}  # each once; otherwise X3 could have a uid twice
        candidates = [group for prompt in prompts.values() for group in self.replays(self.cache.groups(prompt))]
        informative = [group for group in candidates if has_signal(group)]
        batch = fill(self.max_responses, fresh, keep, replay=lambda free: highest_variance(informative, free))

        for group in fresh:  # last: a step's own responses are not replayed in that same step
            self.cache.add(group)
        self.measured = {
            **self.cache.metrics(),
            "cache/drawn": len(candidates),
            "cache/without_signal": len(candidates) - len(informative),
            "cache/no_room": len(informative) - len(batch.replayed),
        }
        return batch

    def replays(self, groups: Sequence[Group]) -> list[Group]:
        """What the strategy replays of one prompt: groups of G of its cached responses, oldest first."""
        responses = [(group, response) for group in groups for response in group.responses]
        if len(responses) < self.warm_up:
            return []
        if self.strategy == "all":
            return [group for group in groups if group.size == self.group_size]
        rewards = [reward for group in groups for reward in group.rewards]
        return [group_of([responses[position] for position in self._positions(rewards)])]

    def _positions(self, rewards: Sequence[Fraction]) -> list[int]:
        """Positions of the G responses to replay, in order. `rewards` are those of all cached ones, oldest first."""
        count, size = len(rewards), self.group_size
        if self.strategy == "recent":
            return list(range(count - size, count))
        if self.strategy == "random":
            draw: list[int] = self.rng.choice(count, size=size, replace=False).tolist()
            return sorted(draw)
        wanted_counts = Counter(sorted(rewards)[-size:] if self.strategy == "highest" else most_varied(rewards, size))
        positions = []
        for position in reversed(range(count)):  # of equal rewards the newer, nearer to today's policy
            if wanted_counts[rewards[position]]:
                wanted_counts[rewards[position]] -= 1
                positions.append(position)
        return positions[::-1]


def group_of(responses: Sequence[tuple[Group, Response]]) -> Group:
    """Stored responses of one prompt as one group: the uid of the newest, step and weights_version of the oldest."""
    groups = [group for group, _ in responses]
    return Group(
        uid=max(group.uid for group in groups),
        prompt=groups[0].prompt,
        responses=tuple(group.standalone(response) for group, response in responses),
        step=min(group.step for group in groups),
        weights_version=min(group.weights_version for group in groups),
        reward_range=groups[0].reward_range,
    )


def most_varied(rewards: Sequence[Fraction], size: int) -> list[Fraction]:
    """The `size` rewards with the greatest variance. Of several such choices, the one with the greatest sum.

    With the others fixed, the variance is a convex function of one chosen reward. So if unchosen rewards lie on both
    sides of it, exchanging it for one of them does not reduce the variance. So the choice is the i lowest and the
    `size` - i highest rewards, for some i. The authors' code compares all subsets.
    """
    ranked = sorted(rewards)
    choices = [ranked[:low] + ranked[len(ranked) - size + low :] for low in range(size + 1)]

    def spread(choice: list[Fraction]) -> tuple[Fraction, Fraction]:
        total = exact_sum(choice)
        return size * exact_sum([reward * reward for reward in choice]) - total**2, total

    return max(choices, key=spread)
