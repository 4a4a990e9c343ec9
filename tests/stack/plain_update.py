"""The losses of actor and critic in plain PyTorch: the formulas written out.

A micro-batch is a dictionary of what a worker read (see ragged_probe_classes.py), with `output`, what its model said:
log-probs or values, (B, A). Where a clip decides, the run's own output decides it, because a number at the border may
be rounded to either side.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import pad


class Objective(NamedTuple):
    """The actor's loss: clip range, dual clip, coefficients, and band of the correction for the rollout engine."""

    low: float = 0.2
    high: float = 0.3
    dual: float | None = None
    kl: float = 0.1
    entropy: float | None = None
    by_sample: bool = False  # the mean is over samples, of each one's mean over tokens
    by_sequence: bool = False  # GSPO: one ratio for a sample, the geometric mean of its tokens'
    band: tuple[float, float] | None = None


def mean_of(numbers, mask):
    """(B, 1): of each sample over its tokens."""
    return (numbers * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)


def surrogate(batch, log_probs, objective):
    """-min(r A, clip(r) A) by token, with r = pi / old, and whether the clip holds the token; (B, A) each."""
    advantages, old, mask = batch["advantages"], batch["action_log_probs"], batch["action_mask"]

    def ratio(log_probs):
        logs = log_probs - old
        return (mean_of(logs, mask).expand(mask.shape) if objective.by_sequence else logs).exp()

    current, border = ratio(batch["output"]), torch.where(advantages > 0, 1 + objective.high, 1 - objective.low)
    held = torch.where(advantages > 0, current > border, current < border) & (advantages != 0)
    used = torch.where(held, border, ratio(log_probs))
    if objective.dual is not None:
        used = torch.where((advantages < 0) & (current > objective.dual), objective.dual, used)
    loss = -used * advantages
    if objective.band is not None:
        mismatch = old - batch["rollout_log_probs"]
        middle = mean_of(mismatch, mask).exp()
        out = (middle < objective.band[0]) | (middle > objective.band[1])  # which the engine's correction leaves out
        loss = torch.where(out, 0.0, mismatch.exp()) * loss
    return loss, held


def k3(batch, log_probs):
    """e^d - 1 - d with d = log(reference / pi), by token."""
    d = batch["base_action_log_probs"] - log_probs
    return d.exp() - 1 - d


def squared_error(batch, values, clip):
    """max((V - R)^2, (clip(V) - R)^2) / 2 by token, and the tokens whose value the clip decides."""
    old, returns, current = batch["values"], batch["returns"], batch["output"]
    inside = torch.maximum(torch.minimum(current, old + clip), old - clip)
    held = (inside - returns) ** 2 > (current - returns) ** 2
    return torch.where(held, inside - returns, values - returns) ** 2 / 2, held


def total(numbers, mask, by_sample=False):
    """Sum over tokens, or over samples of the mean over tokens."""
    return mean_of(numbers, mask).sum() if by_sample else (numbers * mask).sum()


def count(mask, by_sample=False):
    return len(mask) if by_sample else int(mask.sum())


def joined(window):
    """The micro-batches of an optimizer step as one, padded."""
    names = [name for name, value in window[0].items() if isinstance(value, torch.Tensor) and value.dim() == 2]
    widths = {name: max(batch[name].shape[1] for batch in window) for name in names}
    return {
        name: torch.cat([pad(batch[name], (0, widths[name] - batch[name].shape[1])) for batch in window])
        for name in names
    }


def actor_loss(net, batch, objective):
    """The loss of an optimizer step, its log-probs, and the tokens that the clip holds."""
    logits = net(batch["sequences"], attention_mask=batch["attention_mask"]).logits.float().log_softmax(-1)[:, :-1]
    log_probs, mask = logits.gather(-1, batch["sequences"][:, 1:, None])[..., 0], batch["action_mask"]
    loss, held = surrogate(batch, log_probs, objective)
    part = total(loss, mask, objective.by_sample) / count(mask, objective.by_sample)
    part = part + objective.kl * total(k3(batch, log_probs), mask) / mask.sum()
    if objective.entropy is not None:
        entropies = -(logits.exp() * logits).sum(-1)
        part = part - objective.entropy * total(entropies, mask) / mask.sum()
    return part, log_probs, held
