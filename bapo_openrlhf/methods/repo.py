"""RePO: each fresh prompt brings along replayed responses of its own, after "RePO" (arXiv 2506.09340).

What the paper leaves open is as in its authors' code, SihengLi99/RePO at commit 119fef6.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from bapo_openrlhf.adapt.batch import Batch, cut_to, fresh_alone
from bapo_openrlhf.adapt.buffers import ResponseCache
from bapo_openrlhf.adapt.filters import has_signal, make_filter
from bapo_openrlhf.adapt.group import Group, Prompt, Response
from bapo_openrlhf.methods.base import Method, require_state

STATE_VERSION = 1
STRATEGIES = ("all", "random", "highest", "recent", "variance")


class RePO(Method):
    """GRPO on fresh groups, J_on, plus GRPO on replayed ones, J_off: J = J_on + J_off.

    The last responses of each prompt are cached. When a prompt comes again as a fresh group and enough of it is cached,
    G cached responses are trained on as well. Their advantages are computed apart from the fresh ones (the paper's
    "split" estimation), (r - mean r_off) / std r_off: they are a group of their own, in X3. Fresh groups that the
    filter keeps come first, then replayed groups as far as they fit, those with the highest reward variance.

    Responses of a replayed group may stem from several steps. Its `step` and `policy_step` are those of its oldest
    response, so it counts as off-policy and as old as the oldest; each response keeps its own `policy_step`, and the
    log-probs of the policy that generated it, so importance ratios are exact. Its `uid` is that of the newest stored
    group in it.

    Deviations: k is G, for groups are whole (the paper's 8 on + 8 off). `all` replays the cached groups as they were
    generated, each with its own advantages, where the authors normalise the whole cache at once. Fresh groups with
    equal rewards are filtered: the authors train on them with advantages of 0 (`--adapt.filter none` does). Replayed
    groups with equal rewards are left out in any case. The authors have no capacity: with `--adapt.batch_size` twice
    `--rollout.batch_size` one replayed group for each prompt fits. A prompt that comes twice in a step is replayed
    once. Of equal rewards the newer responses are taken, where the authors' code takes the older.

    The cache holds responses of every prompt of the data; `cache/bytes` in the log says how much that is.

    Args:
        capacity: B, groups a batch holds at most.
        group_size: G, and k of the paper.
        seed: of the generator behind `random` and the filters that draw.
        filter, gaussian_mean, gaussian_std, uniform_fraction: the fresh filter, as the --adapt flags.
        strategy: which cached responses of a prompt are replayed.
            all: every cached group that is still whole.
            random: G of them, uniformly without replacement.
            highest: the G with the highest rewards, as in the authors' script. Once G of them are right, these have
                equal rewards, and the prompt is not replayed.
            recent: the last G, which are the prompt's last group.
            variance: the G whose rewards have the greatest variance; of several such, those with the greatest sum.
        cache_responses: most responses cached of a prompt; the oldest leave. 0: 2 G (the authors' 16, with G = 8).
        warm_up: a prompt is replayed once so many of its responses are cached. 0: as many as fit (the authors' 16), so
            with the default cache from its third time on.

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
        strategy: str = "highest",
        cache_responses: int = 0,
        warm_up: int = 0,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy is {strategy!r}; it must be one of {', '.join(STRATEGIES)}")
        if cache_responses and cache_responses < group_size:
            raise ValueError(
                f"cache_responses is {cache_responses}; it must be at least {group_size}, the size of a group, or 0"
            )
        cache_responses = cache_responses or 2 * group_size
        if warm_up and not group_size <= warm_up <= cache_responses:
            raise ValueError(
                f"warm_up is {warm_up}; it must be from {group_size}, the size of a group, to {cache_responses}, what "
                "is cached of a prompt at most, or 0"
            )
        self.capacity, self.group_size = capacity, group_size
        self.strategy = strategy
        self.warm_up = warm_up or cache_responses
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.fresh_filter = make_filter(filter, mean=gaussian_mean, std=gaussian_std, fraction=uniform_fraction)
        self.cache = ResponseCache(cache_responses)
        self._metrics: dict[str, float] = {}

    def begin_step(self, step: int) -> list[Prompt]:
        """No prompt is generated again."""
        return []

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """X1: fresh groups that the filter keeps. X3: replayed groups of the prompts of all fresh groups."""
        batch = fresh_alone(fresh, self.fresh_filter(fresh, self.rng), self.capacity)

        prompts = {group.prompt.id: group.prompt for group in fresh}  # each once, or a uid would come twice in X3
        drawn = [group for prompt in prompts.values() for group in self.replays(self.cache.groups(prompt))]
        informative = [group for group in drawn if has_signal(group)]
        batch.replayed = cut_to(self.capacity - len(batch), informative, []).fresh

        for group in fresh:  # last: a step's own responses are not replayed in that same step
            self.cache.add(group)
        self._metrics = {
            "groups/capacity": self.capacity,
            "cache/prompts": len(self.cache),
            "cache/responses": self.cache.responses,
            "cache/bytes": self.cache.nbytes,
            "cache/added": self.cache.counts["added"],
            "cache/evicted": self.cache.counts["evicted"],
            "cache/drawn": len(drawn),
            "cache/without_signal": len(drawn) - len(informative),
            "cache/no_room": len(informative) - len(batch.replayed),
        }
        return batch

    def replays(self, cached: Sequence[Group]) -> list[Group]:
        """What the strategy replays of one prompt: groups of G responses, whatever their rewards.

        Args:
            cached: what the cache has of the prompt, oldest first.
        """
        responses = [(group, response) for group in cached for response in group.responses]
        if len(responses) < self.warm_up:
            return []
        if self.strategy == "all":
            return [group for group in cached if group.size == self.group_size]
        rewards = [reward for group in cached for reward in group.rewards]
        return [group_of([responses[position] for position in self._chosen(rewards)])]

    def _chosen(self, rewards: Sequence[Fraction]) -> list[int]:
        """Positions of the G responses to replay, in order.

        Args:
            rewards: of a prompt's cached responses, oldest first; at least G.
        """
        count, size = len(rewards), self.group_size
        if self.strategy == "recent":
            return list(range(count - size, count))
        if self.strategy == "random":
            draw: list[int] = self.rng.choice(count, size=size, replace=False).tolist()
            return sorted(draw)
        wanted = Counter(sorted(rewards)[-size:] if self.strategy == "highest" else most_varied(rewards, size))
        positions = []
        for position in reversed(range(count)):  # of equal rewards, the newer: nearer to today's policy
            if wanted[rewards[position]]:
                wanted[rewards[position]] -= 1
                positions.append(position)
        return positions[::-1]

    def metrics(self) -> dict[str, float]:
        """After the last batch.

        - groups/capacity: groups that a batch holds at most
        - cache/prompts, cache/responses, cache/bytes: held now; bytes of tokens and sampled log-probs
        - cache/added, cache/evicted: responses, over the whole run
        - cache/drawn: groups that the strategy has drawn in this step; those trained on are groups/replayed
        - cache/without_signal: of these, left out because their rewards are equal
        - cache/no_room: of these, left out because the batch was full
        """
        return dict(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """Cache and generator state."""
        return {
            "method": "repo",
            "version": STATE_VERSION,
            "rng": self.rng.bit_generator.state,
            "cache": self.cache.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`. With a smaller `cache_responses` than before, the oldest responses leave.

        Raises:
            ValueError: the state is of another method or format version.
        """
        require_state(state, "repo", STATE_VERSION)
        self.rng.bit_generator.state = state["rng"]
        self.cache.load_state_dict(state["cache"])


def group_of(responses: Sequence[tuple[Group, Response]]) -> Group:
    """Stored responses of one prompt as one group: `uid` of its newest group, `step` and `policy_step` of its oldest.

    Args:
        responses: each with the group that it was generated in.
    """
    groups = [group for group, _ in responses]
    return Group(
        uid=max(group.uid for group in groups),
        prompt=groups[0].prompt,
        responses=tuple(group.standalone(response) for group, response in responses),
        step=min(group.step for group in groups),
        policy_step=min(group.policy_step for group in groups),
    )


def most_varied(rewards: Sequence[Fraction], size: int) -> list[Fraction]:
    """The `size` rewards with the greatest variance; of several such choices, the one with the greatest sum.

    With the others fixed, the variance is a convex function of one chosen reward. So where unchosen rewards lie on both
    sides of it, exchanging it for one of them does not make the variance less. What is left after all such exchanges
    are the i lowest and the `size` - i highest, for some i: `size` + 1 choices are compared, and not all subsets as in
    the authors' code.
    """
    ranked = sorted(rewards)
    choices = [ranked[:low] + ranked[len(ranked) - size + low :] for low in range(size + 1)]

    def spread(choice: list[Fraction]) -> tuple[Fraction, Fraction]:
        total = sum(choice, Fraction(0))
        return size * sum((reward * reward for reward in choice), Fraction(0)) - total**2, total

    return max(choices, key=spread)
