"""From rewards to advantages and returns, for groups of any size: Eq. 2, the other estimators, GAE and V-trace.

`adapt.advantage.ESTIMATORS` says what each estimator makes of the reward of a response, after OpenRLHF's length
penalties. With `gae`, GAE or V-trace follows (`--adapt.returns`), with the critic's values or with a mean of rewards
(`choose_baseline`). Otherwise an advantage is the sum of what follows, with gamma 1. The reward is clipped to
`--reward.clip_range` and stands at the last generated token. Each generated token has the KL penalty.
"""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from openrlhf.models.utils import compute_reward
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.length_penalty import apply_length_penalties
from scipy.signal import lfilter

from bapo_openrlhf.adapt.advantage import ESTIMATORS, length_adaptive_lambda, relative_rewards
from bapo_openrlhf.adapt.critic import critic_leaves_less, explained_variance, vtrace
from bapo_openrlhf.adapt.group import Group


class Discounts(NamedTuple):
    """Gamma of rewards, and lambda of the advantages (`actor`) and of the critic's targets (`critic`)."""

    gamma: float
    actor: float
    critic: float


def set_advantages(
    samples: Sequence[Experience],
    groups: Sequence[Group],
    args: SimpleNamespace,
    *,
    kl_coefficient: float,
    critic_lambd: float | None = None,
    log_ratios: Sequence[np.ndarray] = (),
    fresh: np.ndarray | None = None,
) -> dict[str, float]:
    """Set advantages and returns of a batch, float32 of shape (1, A) in each sample. Returns metrics of the baseline.

    `info` gets "group_reward_std", "return", and "reward" after the length penalties. The KL becomes None.

    Args:
        groups: The group of each sample, N. Equal ones are in a row.
        critic_lambd: Lambda of the returns; None if it is that of the advantages.
        log_ratios: For V-trace: log pi_today - log alpha of each token, shape (1, A), of each sample.
        fresh: Which samples are those of X1, bool (N,), to choose the baseline on them; None to take the critic.

    Raises:
        ValueError: A group needs the penalised rewards of responses that it does not hold, or the estimator is unknown.
    """
    for sample in samples:
        sample.rewards = sample.rewards.float()
    apply_length_penalties(samples, args)
    advantage, critic = args.algo.advantage, args.algo.advantage.estimator == "gae"
    lambd = advantage.lambd if critic_lambd is None else critic_lambd
    discounts = Discounts(advantage.gamma, advantage.lambd, lambd) if critic else Discounts(1.0, 1.0, 1.0)
    estimator_rewards = related_rewards(samples, groups, args, advantage.estimator)
    correction = log_ratios if args.adapt.returns == "vtrace" else [None] * len(samples)
    monte_carlo = list[torch.Tensor]()
    for sample, rewards, log_ratio in zip(samples, estimator_rewards, correction, strict=True):
        mask = sample.action_mask
        tokens = compute_reward(
            rewards, kl_coefficient, sample.kl, action_mask=mask, reward_clip_range=args.reward.clip_range
        )
        monte_carlo.append(discounted_sums(mask * tokens, discounts.gamma))
        if args.adapt.length_adaptive_lambd is not None:
            lengths, alpha = mask.sum(-1).numpy(), args.adapt.length_adaptive_lambd
            discounts = discounts._replace(actor=length_adaptive_lambda(lengths, alpha).item())
        if not critic:
            sample.returns, sample.advantages = monte_carlo[-1], monte_carlo[-1].clone()
        elif log_ratio is None:
            sample.advantages, sample.returns = gae(sample.values, tokens, mask, discounts)
        else:
            sample.advantages, sample.returns = corrected_returns(sample.values, tokens, mask, log_ratio, discounts)
        sample.info["return"] = tokens.sum(dim=-1)
        sample.kl = None
    metrics = choose_baseline(samples, groups, args, monte_carlo, fresh) if critic and fresh is not None else {}
    if ESTIMATORS[advantage.estimator].whitened:
        whiten(samples, scale=not advantage.no_std_norm)
    return metrics


def choose_baseline(
    samples: Sequence[Experience],
    groups: Sequence[Group],
    args: SimpleNamespace,
    monte_carlo: Sequence[torch.Tensor],
    fresh: np.ndarray,
) -> dict[str, float]:
    """Take a mean of rewards as the baseline, G - mean as advantages, if the critic leaves more variance on X1.

    With `--adapt.critic_baseline batch` it is the mean over the batch, as in EVPO (arXiv 2604.19485). With `group` it
    is the mean over the other responses of the group. Groups that the filter dropped would flatter the critic, because
    they differ mostly in their prompts, and it may have learned replayed groups by heart. Without X1 the mean is taken.
    `monte_carlo` is G, the Monte Carlo returns of each sample, shape (1, A). The means are of clipped rewards, as G is.
    """
    kind, with_mean, clip = args.adapt.critic_baseline, list[torch.Tensor](), args.reward.clip_range
    clipped = [sample.rewards.clamp(*clip) for sample in samples]
    if kind == "batch":
        with_mean = [numbers - torch.cat(clipped).mean() for numbers in monte_carlo]
    elif kind == "group":
        related = related_rewards(samples, groups, args, "rloo", clip=clip)  # r - mean of the others
        means = [(one - rewards).unsqueeze(-1) for one, rewards in zip(clipped, related, strict=True)]
        with_mean = [numbers - mean for numbers, mean in zip(monte_carlo, means, strict=True)]
    masks = [sample.action_mask.bool() for sample in samples]

    def of_fresh(numbers: Sequence[torch.Tensor]) -> np.ndarray:
        rows = [row[mask] for row, mask, is_fresh in zip(numbers, masks, fresh, strict=True) if is_fresh]
        return torch.cat([torch.zeros(0), *rows]).double().numpy()

    returns, values = of_fresh(monte_carlo), of_fresh([e.values for e in samples])
    by_critic = kind == "critic" or critic_leaves_less(returns, values, of_fresh(with_mean))
    for sample, advantages in () if by_critic else zip(samples, with_mean, strict=True):
        sample.advantages = sample.action_mask * advantages
    explained = explained_variance(returns, values)
    metrics = {} if explained is None else {"value/explained_variance_fresh": explained}
    return metrics | {"value/critic_is_baseline": float(by_critic)}


def related_rewards(
    samples: Sequence[Experience],
    groups: Sequence[Group],
    args: SimpleNamespace,
    estimator: str,
    clip: Sequence[float] = (-np.inf, np.inf),
) -> list[torch.Tensor]:
    """What an estimator makes of each sample's reward, float32 of shape (1,). `info` gets the spread of its group's.

    Rewards are clipped to `clip` first, but not for the spread.
    """
    penalties = args.reward.overlong_buffer_len, args.reward.stop_properly_penalty_coef
    penalises_length = penalties != (None, None)
    rewards = torch.cat([sample.rewards for sample in samples]).double().numpy()
    spread = np.empty(len(rewards))
    edges = np.flatnonzero(np.diff([group.uid for group in groups], prepend=-1, append=-1)).tolist()
    for start, end in itertools.pairwise(edges):
        members, group = rewards[start:end], groups[start]
        if group.relative_to == "kept" or len(group.generated) == group.size:
            baseline = members
        elif estimator != "gae" and penalises_length:
            raise ValueError(
                f"group {group.uid} holds only some of its responses; the length penalties of the others "
                "(reward.overlong_buffer_len, reward.stop_properly_penalty_coef) are not known"
            )
        else:
            baseline = np.array(group.generated)
        spread[start:end] = baseline.std()
        ends = tuple(map(float, group.reward_range))
        members, baseline = np.clip(members, *clip), np.clip(baseline, *clip)
        rewards[start:end] = relative_rewards(estimator, members, baseline, args.adapt.eps, ends)
    for sample, of_group in zip(samples, torch.from_numpy(spread).float().split(1), strict=True):
        sample.info["group_reward_std"] = of_group
    return list(torch.from_numpy(rewards).float().split(1))


def gae(
    values: torch.Tensor, rewards: torch.Tensor, mask: torch.Tensor, discounts: Discounts
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of one sample by GAE (arXiv 1506.02438), shape (1, A) each, as are the arguments.

    The returns may have another lambda than the advantages (Decoupled-GAE of arXiv 2503.01491):

        delta_t = r_t + gamma V_(t+1) - V_t
        A_t = sum over i >= 0 of (gamma lambda_actor)^i delta_(t+i)
        R_t = V_t + sum over i >= 0 of (gamma lambda_critic)^i delta_(t+i)

    Tokens that were not generated count as value 0 and reward 0, as in OpenRLHF.
    """
    values, rewards = mask * values, mask * rewards
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    delta = rewards + discounts.gamma * following - values
    advantages = discounted_sums(delta, discounts.gamma * discounts.actor)
    errors = advantages
    if discounts.critic != discounts.actor:
        errors = discounted_sums(delta, discounts.gamma * discounts.critic)
    return advantages, errors + values


def corrected_returns(
    values: torch.Tensor, rewards: torch.Tensor, mask: torch.Tensor, log_ratios: np.ndarray, discounts: Discounts
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by V-trace (`adapt.critic`). The log ratios are log pi_today - log alpha of each token, shape (1, A)."""
    numbers = values.double().numpy(), rewards.double().numpy(), log_ratios, mask.numpy()
    advantages, targets = vtrace(*numbers, gamma=discounts.gamma, lambd=discounts.actor)
    if discounts.critic != discounts.actor:
        _, targets = vtrace(*numbers, gamma=discounts.gamma, lambd=discounts.critic)
    return torch.from_numpy(advantages).float(), torch.from_numpy(targets).float()


def discounted_sums(numbers: torch.Tensor, factor: float) -> torch.Tensor:
    """s_t = x_t + factor s_{t+1}, computed from the last token to the first in the dtype of x, shape (B, A)."""
    weights = np.array([1, -factor], dtype=numbers.numpy().dtype)
    sums = lfilter(weights[:1], weights, numbers.numpy()[:, ::-1], axis=-1)
    return torch.from_numpy(sums[:, ::-1].copy())


def whiten(samples: Sequence[Experience], *, scale: bool) -> None:
    """A' = (A - mean A) / std A over all generated tokens of a batch, or only A - mean A unless `scale`."""
    advantages = torch.cat([sample.advantages.flatten() for sample in samples]).float()
    mask = torch.cat([sample.action_mask.flatten() for sample in samples])
    count = mask.sum()
    mean = (advantages * mask).sum() / count
    variance = ((advantages - mean).square() * mask).sum() / count
    factor = variance.clamp(min=1e-8).rsqrt() if scale else 1.0  # so equal advantages stay finite
    for sample in samples:
        sample.advantages = (sample.advantages - mean) * factor
