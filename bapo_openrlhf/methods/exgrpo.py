"""ExGRPO: half of a batch are prompts that were solved before, each with a stored success (arXiv 2510.02245).

Paper: "ExGRPO: Learning to Reason from Experience". Details follow its authors' code (ElliottYan/LUFFY, folder ExGRPO,
read at commit 01f4ae0).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import compress
from typing import Any

import numpy as np

from bapo_openrlhf.adapt.batch import Batch, fill
from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.adapt.group import Group, Prompt, Response, group_from_state, group_state
from bapo_openrlhf.adapt.metric import ATTEMPTS, EXCHANGE_AGE, declare
from bapo_openrlhf.adapt.schedule import due
from bapo_openrlhf.methods.base import FilteredMethod, option

RIGHT = 1  # a response is right if its reward is at least this


@dataclass(frozen=True)
class StoredSuccess:
    """What is stored of a prompt.

    `solved` is k, from 1 to G - 1: how many responses were right in its last group that had a right one. `group` is the
    one that generated its success of lowest entropy, with only that response.
    """

    solved: int
    group: Group


@dataclass(eq=False, kw_only=True)
class ExGRPO(FilteredMethod):
    """Generates again for prompts that were solved now and then, each time with a stored success.

    It is GRPO on these groups and on fresh ones. A prompt with 1 to G - 1 right responses of G is stored with its right
    response of lowest entropy, in the bucket of k, the number of right ones. A newer group moves the prompt to another
    bucket. A group without a right response leaves it where it is, and one with G right responses retires it for good.
    In each step that re-evaluates, prompts are drawn without replacement: first a bucket with weight N(k; G/2, 1), of
    any size, then one of its prompts uniformly. They are generated again with today's policy, and the stored success
    replaces the first of the G new responses. It keeps the log-probs and the `weights_version` of the policy that
    generated it. With this exchange, the groups are X2 and update the store as fresh ones do. X2 keeps its places in
    the batch. Fresh groups beyond them are cut.

    Prompts are stored from the first step on, by the authors only after the start. They are drawn after the first step
    in which more than `start_above` of the fresh responses are right (Pass@1).

    The paper's setting is `--adapt.reevaluate_every 1`, `--adapt.rollout_delay 1`, and as `--rollout.batch_size` 1 -
    `experience_share` of `--adapt.batch_size`. With more, fresh groups are generated and cut. Before the start, and
    while too few prompts are stored, batches are smaller. The authors fill them with fresh groups.

    Deviations: entropy is the mean of -log alpha over the tokens of the response, from the stored log-probs. The
    authors let today's policy compute the entropies of all stored successes of the drawn prompts again. Entropy never
    changes here, so only the success of lowest entropy is stored, and it stays until one of lower entropy comes. G
    responses are generated, but the authors generate only the other G - 1. Their loss shapes the ratio w of the stored
    responses as w / (w + 0.1) and does not clip. Here these responses are in the loss like all others, with the ratio
    that `--adapt.ratio` sets. Once experience is used, their script has in the loss of the others what LUFFY's script
    has. They leave retired prompts out of the data. Here these still come as fresh ones, and are filtered as long as
    all responses are right. X2 has no limit of distance (`--adapt.max_shift_fresh` is for X1).

    Args:
        experience_share: rho, share of the batch that stored prompts are, within [0, 1].
        start_above: Pass@1, within [0, 1], above which stored successes are used. 0 starts after the first one.
    """

    USE = "Use it if the model solves many prompts only sometimes."
    SOURCE = "arXiv 2510.02245"
    asynchronous = False  # the success of a named prompt may be gone when its group comes
    STATE = ("rng", "started", "store", "retired")
    METRICS = (
        ATTEMPTS,
        EXCHANGE_AGE,
        *declare("""
            experience/started | | Started | | 1 if stored prompts are drawn, 0 before that.
            experience/pass_rate | 0 to 1 | Pass@1 | | Share of the fresh responses that are right.
            experience/prompts | prompts | Stored prompts | | Prompts with a stored success.
            experience/bytes | bytes | Size of the store | | Size of the stored successes' tokens and log-probs.
            experience/retired | prompts | Retired prompts | | Prompts that all responses solved, so far.
        """),
    )

    reevaluate_every: int = 1
    experience_share: Fraction = option(Fraction(1, 2), "in [0, 1]")
    start_above: Fraction = option(Fraction(7, 20), "in [0, 1]")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.places = math.floor(self.experience_share * self.capacity)
        self.started = False
        self.store: dict[str, StoredSuccess] = {}  # by prompt id
        self.retired: set[str] = set()  # prompt ids

    def begin_step(self, step: int) -> list[Prompt]:
        """Prompts drawn from the store. None before the start, or in a step that does not re-evaluate."""
        return self.draw(self.places) if self.started and due(step, self.reevaluate_every) else []

    def draw(self, count: int) -> list[Prompt]:
        """Up to `count` stored prompts, one after another: a bucket by its weight, then a prompt left in it."""
        buckets: dict[int, list[Prompt]] = {}
        for stored in self.store.values():
            buckets.setdefault(stored.solved, []).append(stored.group.prompt)
        prompts = []
        for _ in range(min(count, len(self.store))):
            solved_counts = sorted(k for k in buckets if buckets[k])
            exponents = -((np.array(solved_counts) - self.group_size / 2) ** 2) / 2
            weights = np.exp(exponents - exponents.max())  # otherwise all could be rounded to 0 in large groups
            bucket = buckets[int(self.rng.choice(solved_counts, p=weights / weights.sum()))]
            prompts.append(bucket.pop(int(self.rng.integers(len(bucket)))))
        return prompts

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """X1: fresh groups that the filter keeps. X2: groups of stored prompts, each with its stored success."""
        past_groups = [self.store[group.prompt.id].group for group in reevaluated]
        groups = [
            group.exchange(0, past.standalone(past.responses[0]))
            for group, past in zip(reevaluated, past_groups, strict=True)
        ]
        x2 = [group for group in groups if has_signal(group)]
        batch = fill(
            self.max_responses, fresh, self.keeps(fresh), x2, most_fresh=self.max_responses - self.group_size * len(x2)
        )
        batch.solved = [group for group in groups if not has_signal(group)]

        right_count = sum(len(right_responses(group)) for group in fresh)
        pass_rate = Fraction(right_count, sum(group.size for group in fresh)) if fresh else Fraction(0)
        for group in (*fresh, *groups):
            self.learn(group)
        self.started = self.started or pass_rate > self.start_above
        ages = [step - past.weights_version for past in past_groups]
        self.measured = {
            "groups/reevaluation_attempts": len(reevaluated),
            "experience/started": float(self.started),
            "experience/prompts": len(self.store),
            "experience/retired": len(self.retired),
            "experience/bytes": sum(item.group.sampled_nbytes for item in self.store.values()),
            **({"experience/pass_rate": float(pass_rate)} if fresh else {}),
            **({"exchange/age_mean": float(np.mean(ages))} if ages else {}),
        }
        return batch

    def learn(self, group: Group) -> None:
        """Enter a group of this step into the store."""
        name, right_ones = group.prompt.id, right_responses(group)
        if len(right_ones) == group.size:
            self.retired.add(name)
            self.store.pop(name, None)
        elif right_ones and name not in self.retired:
            best = min(right_ones, key=entropy)
            entry = self.store.get(name)
            if entry and entropy(entry.group.responses[0]) <= entropy(best):  # also if `best` is the stored one
                self.store[name] = replace(entry, solved=len(right_ones))
            else:
                self.store[name] = StoredSuccess(len(right_ones), replace(group, responses=(best,)))

    def state_dict(self) -> dict[str, Any]:
        """Store, retired prompts and generator state."""
        store = [{"solved": item.solved, "group": group_state(item.group)} for item in self.store.values()]
        return super().state_dict() | {"store": store, "retired": sorted(self.retired)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        super().load_state_dict(state)
        self.store, self.retired = {}, set(state["retired"])
        for item in state["store"]:
            group = group_from_state(item["group"])
            self.store[group.prompt.id] = StoredSuccess(item["solved"], group)


def right_responses(group: Group) -> list[Response]:
    """The responses that are right."""
    return list(compress(group.responses, (reward >= RIGHT for reward in group.rewards)))


def entropy(response: Response) -> float:
    """Estimated entropy per token of the policy that generated the response: mean of -log alpha over its tokens."""
    return float(-np.mean(response.log_probs, dtype=np.float64)) if len(response.log_probs) else 0.0
