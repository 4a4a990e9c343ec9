"""Measures what each correction for stale responses does to bias and variance of the policy gradient.

    python research/corrections.py            # writes research/results/corrections.{json,md}

A response is 16 tokens of two kinds, and token t is of the first kind with probability sigmoid(theta_t). Its reward is
1 if at least 10 tokens are of the first kind. All 65,536 responses can be enumerated, so the gradient on today's policy
is known exactly. An older policy with other parameters generates the batches. Their gradients are those of OpenRLHF's
loss, with the flags of configs/corrections/*.yaml, before the first update. The baseline of the advantages is exact.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from folders import RESULTS, ROOT
from report import opening, origin, write

from bapo_openrlhf.cpu import stack as cpu

cpu.prepare_environment()
cpu.install()

from openrlhf.models import PolicyLoss  # noqa: E402

from bapo_openrlhf.adapt.corrections import learning_rate_factor, second_moment_mask  # noqa: E402
from bapo_openrlhf.adapt.theory import sampled_tv  # noqa: E402
from bapo_openrlhf.cli import arguments  # noqa: E402
from bapo_openrlhf.flags.openrlhf_flags import set_openrlhf_flags  # noqa: E402
from bapo_openrlhf.workbench.pages.table import Table  # noqa: E402

FILES = ROOT / "configs" / "corrections"
LENGTH, NEEDED = 16, 10  # tokens of a response; tokens of the first kind for a reward
RESPONSES, BATCHES = 256, 1000
AGES = (0.1, 0.3, 1.0)  # standard deviation of the older policy's parameters around today's


def arguments_of(*files: str) -> SimpleNamespace:
    """The flags of a run with these correction files."""
    words = ["--algorithm", "bapo_grpo", "--actor.model_name_or_path", "model", "--reward.remote_url", "reward.py"]
    words += ["--data.prompt_dataset", "data.jsonl", "--rollout.n_samples_per_prompt", "4"]
    if files:
        words += ["--config", *(str(FILES / f"{file}.yaml") for file in files)]
    args = arguments.parse(words)
    set_openrlhf_flags(args)
    args.whole = False  # whether the advantages get the weight of the whole response, which no flag asks for
    return args


def log_probs(theta: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probs of tokens (1: the first kind), shape (N, LENGTH)."""
    return torch.nn.functional.logsigmoid(torch.where(tokens == 1, theta, -theta))


def exact_gradient(theta: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Gradient of the mean reward per token by enumeration, and the mean reward."""
    tokens = torch.tensor(list(itertools.product((0, 1), repeat=LENGTH)))
    variable = theta.clone().requires_grad_()
    reward = (log_probs(variable, tokens).sum(-1).exp() * (tokens.sum(-1) >= NEEDED)).sum()
    (gradient,) = torch.autograd.grad(reward / LENGTH, variable)
    return gradient, float(reward.detach())


def gradient_of(args: SimpleNamespace, theta: torch.Tensor, old: torch.Tensor, tokens: torch.Tensor,
                baseline: float) -> torch.Tensor:  # fmt: skip
    """The gradient that a batch of the older policy gives, times the factor on the learning rate."""
    settings, low_high = args.algo.advantage, args.actor.eps_clip_low_high
    loss = PolicyLoss(
        *low_high,
        is_correction_level=settings.is_correction_level,
        is_correction_mode=settings.is_correction_mode,
        is_correction_gating=settings.is_correction_gating,
        is_correction_threshold=settings.is_correction_threshold,
    )
    variable = theta.clone().requires_grad_()
    policy, behaviour = log_probs(variable, tokens), log_probs(old, tokens)
    current = policy.detach()
    rewards = (tokens.sum(-1) >= NEEDED).double()
    advantages = (rewards - baseline).unsqueeze(-1).expand(tokens.shape)
    if args.adapt.max_second_moment is not None:
        moved = (current - behaviour).flatten().numpy()
        stays = second_moment_mask(moved, advantages.flatten().numpy(), args.adapt.max_second_moment)
        advantages = advantages * torch.from_numpy(stays).view(tokens.shape)
    if args.whole:
        advantages = advantages * (current - behaviour).sum(-1, keepdim=True).exp()
    before = current if args.adapt.ratio == "decoupled" else behaviour
    batch = {"dp_size": 1, "batch_num_tokens": float(tokens.numel()), "global_batch_size": float(len(tokens))}
    value, *_ = loss(policy, before, advantages, torch.ones_like(tokens), behaviour, **batch)
    (gradient,) = torch.autograd.grad(-value, variable)
    if args.adapt.scale_learning_rate:
        gradient = learning_rate_factor((current - behaviour).sum(-1).numpy(), full=len(tokens)) * gradient
    return gradient


def arms() -> dict[str, SimpleNamespace]:
    """The flags of each row of the table. The first two are for comparison, and no run has them.

    Without a weight, an older response counts as one of today's policy. With pi/alpha of the whole response there is
    no bias.
    """
    none = arguments_of("truncated_weights")
    none.algo.advantage.is_correction_level = "off"
    files = {file.stem: arguments_of(file.stem) for file in sorted(FILES.glob("*.yaml"))}
    whole = arguments_of("truncated_weights")
    whole.algo.advantage.is_correction_level, whole.whole = "off", True
    return {"no weight": none, "weight of the whole response": whole, "only the clip (default)": arguments_of()} | files


def measured(age: float, seed: int) -> dict[str, Any]:
    """Bias and spread of each arm's gradient, as shares of the length of the exact one."""
    rng = torch.Generator().manual_seed(seed)
    theta = torch.randn(LENGTH, generator=rng, dtype=torch.float64) * 0.5
    old = theta + age * torch.randn(LENGTH, generator=rng, dtype=torch.float64)
    wanted, baseline = exact_gradient(theta)
    batches = [torch.bernoulli(torch.sigmoid(old).expand(RESPONSES, -1), generator=rng).long() for _ in range(BATCHES)]
    ratios = (log_probs(theta, torch.cat(batches)) - log_probs(old, torch.cat(batches))).sum(-1).numpy()
    rows = {}
    for name, args in arms().items():
        gradients = torch.stack([gradient_of(args, theta, old, tokens, baseline) for tokens in batches])
        mean = gradients.mean(0)
        spread = (gradients - mean).square().sum(-1).mean().sqrt()
        rows[name] = {
            "bias": float((mean - wanted).norm() / wanted.norm()),
            "spread": float(spread / wanted.norm()),
            "cosine": float(torch.cosine_similarity(mean, wanted, dim=0)),
        }
    effective = float(np.exp(2 * (np.logaddexp.reduce(ratios)) - np.logaddexp.reduce(2 * ratios)) / len(ratios))
    return {"age": age, "tv": sampled_tv(ratios), "effective_share": effective, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    results = [measured(age, args.seed) for age in AGES]
    head = ["", *(f"{kind}, TV {one['tv']:.2f}" for one in results for kind in ("bias", "spread", "cosine"))]
    rows = [
        (name, *(f"{one['rows'][name][kind]:.2f}" for one in results for kind in ("bias", "spread", "cosine")))
        for name in results[0]["rows"]
    ]
    shares = ", ".join(f"{one['effective_share']:.2f}" for one in results)
    says = f"{BATCHES} batches of {RESPONSES} responses."
    text = f"""
Bias is the distance of the mean gradient from today's exact one, and spread the root mean square distance of a batch's
gradient from that mean; both as shares of the exact gradient's length. The cosine is between the mean and the exact
one. The sampling error of a bias is about spread / {math.isqrt(BATCHES)}. The effective shares of the responses'
weights are {shares}.

Today's policy is not where the older one's updates would have led, but at a random place around it. In a run, most
tokens of a response hardly move, so that a limit for a response's mean is reached later.
"""
    result = origin(f"python research/corrections.py --seed {args.seed}") | {"found": results}
    opened = opening("What corrections do to bias and variance", says, result)
    page = "\n".join([*opened, Table.of(head, rows).markdown(), text])
    write(args.out, "corrections", result, page)


if __name__ == "__main__":
    main()
