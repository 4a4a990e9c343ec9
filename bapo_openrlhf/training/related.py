"""Rewards related to those of their groups, for groups of any size.

OpenRLHF relates the rewards of groups that all have G responses. Here a group may hold any number of the responses that
it was generated with. So this project relates the rewards, and OpenRLHF makes returns or GAE of them.
"""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.adapt.advantage import relative_rewards
from bapo_openrlhf.adapt.group import Group


def relate(experiences: Sequence[Experience], groups: Sequence[Group], args: SimpleNamespace) -> None:
    """Set the rewards of the samples to what the estimator makes of them, and note the spread of each group.

    Args:
        experiences: The experience of N samples, with the rewards after OpenRLHF's length penalties.
        groups: The group of each sample, N. Equal ones are in a row.
        args: OpenRLHF's (nested) arguments.

    Raises:
        ValueError: A group needs the penalised rewards of responses that it does not hold.
    """
    estimator = args.algo.advantage.estimator
    order = np.concatenate([experience.index for experience in experiences])
    rewards, spread = np.empty(len(order)), np.empty(len(order))
    rewards[order] = torch.cat([experience.rewards for experience in experiences]).double().numpy()
    edges = np.flatnonzero(np.diff([group.uid for group in groups], prepend=-1, append=-1)).tolist()
    for start, end in itertools.pairwise(edges):
        own, group = rewards[start:end], groups[start]
        if group.relative_to == "kept" or len(group.generated) == group.size:
            baseline = own
        elif estimator != "gae" and penalises_length(args):
            raise ValueError(
                f"group {group.uid} holds only some of its responses; the length penalties of the others "
                "(reward.overlong_buffer_len, reward.stop_properly_penalty_coef) are not known"
            )
        else:
            baseline = np.array(group.generated)
        spread[start:end] = baseline.std()
        rewards[start:end] = relative_rewards(estimator, own, baseline, args.adapt.eps)
    for experience in experiences:
        experience.rewards = torch.from_numpy(rewards[experience.index]).float()
        experience.info["group_reward_std"] = torch.from_numpy(spread[experience.index]).float()


def penalises_length(args: SimpleNamespace) -> bool:
    """Whether OpenRLHF lowers the rewards of long responses."""
    return args.reward.overlong_buffer_len is not None or args.reward.stop_properly_penalty_coef is not None


def one_by_one(args: SimpleNamespace) -> SimpleNamespace:
    """The arguments with which OpenRLHF takes each response as a group of its own, whose reward is ready."""

    def changed(space: SimpleNamespace, **changes: Any) -> SimpleNamespace:
        return SimpleNamespace(**vars(space) | changes)

    # OpenRLHF whitens the advantages of these two. With a name that it does not know, it takes the rewards as they are.
    estimator = {"gae": "gae", "reinforce_baseline": "reinforce"}.get(args.algo.advantage.estimator, "related")
    return changed(
        args,
        rollout=changed(args.rollout, n_samples_per_prompt=1),
        reward=changed(args.reward, overlong_buffer_len=None, stop_properly_penalty_coef=None),
        algo=changed(args.algo, advantage=changed(args.algo.advantage, estimator=estimator)),
    )
