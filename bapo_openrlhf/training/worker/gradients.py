"""Policy gradients of groups and the angles between them, in the actor's process. `probe` asks for them."""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.training.worker.loss_parts import after_veto

Rows = Mapping[Hashable, Sequence[Experience]]


def probe_gradients(
    trainer: Any, reference: Rows, groups: Rows, sources: Mapping[int, str]
) -> dict[Hashable, tuple[float, float]]:
    """Cosine with the reference and norm of the gradient of each group (by uid), and of the sum over each source.

    The reference has the halves 0 and 1. Under "halves" are their cosine and the norm of their sum. A cosine with a
    gradient of 0 is nan.
    """
    first, second = (policy_gradient(trainer, reference[half]) for half in (0, 1))
    direction = first + second
    sums: dict[str, torch.Tensor] = {}
    alignments: dict[Hashable, tuple[float, float]] = {"halves": (cosine(first, second), float(direction.norm()))}
    for uid, rows in groups.items():
        gradient = policy_gradient(trainer, rows)
        alignments[uid] = cosine(gradient, direction), float(gradient.norm())
        sums[sources[uid]] = sums.get(sources[uid], 0) + gradient
    return alignments | {source: (cosine(total, direction), float(total.norm())) for source, total in sums.items()}


def policy_gradient(trainer: Any, rows: Sequence[Experience]) -> torch.Tensor:
    """Gradient of OpenRLHF's policy loss, summed over samples; float32, shape (P,) for P trained parameters.

    KL loss and entropy are left out. So is DeepSpeed's engine, which would count this backward pass as one of training.
    """
    actor, engine, size = trainer.actor, trainer.actor.model, trainer.args.train.micro_batch_size
    parameters = [parameter for parameter in actor.parameters() if parameter.requires_grad]
    total = torch.zeros(sum(parameter.numel() for parameter in parameters), device=torch.cuda.current_device())
    actor.eval()  # so that no dropout draws random numbers
    actor.model = engine.module
    try:
        for start in range(0, len(rows), size):
            samples = Experience.concat_experiences(rows[start : start + size], trainer.tokenizer.pad_token_id)
            samples.to_device(torch.cuda.current_device())
            log_probs = actor(samples.sequences, samples.action_mask, attention_mask=samples.attention_mask)
            loss = trainer.actor_loss_fn(
                log_probs,
                samples.action_log_probs,
                after_veto(log_probs, samples, trainer.args.adapt.veto_ratio)[0],
                action_mask=samples.action_mask,
                rollout_log_probs=samples.rollout_log_probs,
                batch_num_tokens=1,  # not a mean, so that gradients of groups add up to that of the batch
                global_batch_size=1,
            )[0]
            gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
            total += torch.cat([gradient.flatten().float() for gradient in gradients])
    finally:
        actor.model = engine
        actor.train()
    return total


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Cosine of the angle between two vectors; nan if one of them is 0."""
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms else math.nan
