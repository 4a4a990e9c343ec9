"""An update of actor or critic in plain PyTorch, and what is logged of it: the formulas written out.

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
    """-min(r A, clip(r) A) by token, with r = pi / old.

    Returns:
        (B, A) each: the loss, whether the clip holds the token, whether the engine's correction leaves it out.
    """
    advantages, old, mask = batch["advantages"], batch["action_log_probs"], batch["action_mask"]

    def ratio(log_probs):
        logs = log_probs - old
        return (mean_of(logs, mask).expand(mask.shape) if objective.by_sequence else logs).exp()

    current, border = ratio(batch["output"]), torch.where(advantages > 0, 1 + objective.high, 1 - objective.low)
    held = torch.where(advantages > 0, current > border, current < border) & (advantages != 0)
    used = torch.where(held, border, ratio(log_probs))
    if objective.dual is not None:
        used = torch.where((advantages < 0) & (current > objective.dual), objective.dual, used)
    loss, out = -used * advantages, torch.zeros_like(held)
    if objective.band is not None:
        mismatch = old - batch["rollout_log_probs"]
        middle = mean_of(mismatch, mask).exp()
        out = ((middle < objective.band[0]) | (middle > objective.band[1])).expand(mask.shape)
        loss = torch.where(out, 0.0, mismatch.exp()) * loss
    return loss, held, out


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
    """The loss of an optimizer step, its log-probs, the tokens that the clip holds, and its entropies."""
    logits = net(batch["sequences"], attention_mask=batch["attention_mask"]).logits.float().log_softmax(-1)[:, :-1]
    log_probs, mask = logits.gather(-1, batch["sequences"][:, 1:, None])[..., 0], batch["action_mask"]
    loss, held, _ = surrogate(batch, log_probs, objective)
    part = total(loss, mask, objective.by_sample) / count(mask, objective.by_sample)
    part = part + objective.kl * total(k3(batch, log_probs), mask) / mask.sum()
    entropies = -(logits.exp() * logits).sum(-1)
    if objective.entropy is not None:
        part = part - objective.entropy * total(entropies, mask) / mask.sum()
    return part, log_probs, held, entropies.detach()


# ── What is logged ──


def actor_metrics(windows, objective, entropies):
    """OpenRLHF's numbers of an update, over the samples of the batch.

    A micro-batch's loss is its sum, divided by what an average micro-batch of its optimizer step holds. The numbers of
    micro-batches are weighted by their tokens; those of samples are plain means.

    Args:
        windows: of each optimizer step, in order, the micro-batches of all ranks; no fillers.
        entropies: (B, A) of each micro-batch in the same order, as plain PyTorch finds them.
    """
    weighted, tokens, samples, entropies = {}, 0, {}, iter(entropies)
    for window in windows:
        masks = [batch["action_mask"] for batch in window]
        size = {kind: sum(count(mask, kind) for mask in masks) / len(masks) for kind in (False, True)}
        for batch in window:
            mask, current = batch["action_mask"], batch["output"]
            loss, held, out = surrogate(batch, current, objective)
            weight, by = count(mask), objective.by_sample
            result = {
                "policy_loss": total(loss, mask, by) / size[by],
                "ppo_clip_ratio": total(held, mask) / weight,
                "ppo_kl": total(batch["action_log_probs"] - current, mask) / weight,
                "kl": total(k3(batch, current), mask) / size[False],
                "logprobs_diff": total(current - batch["base_action_log_probs"], mask) / weight,
            }
            if objective.entropy is not None:
                result["entropy_loss"] = total(next(entropies), mask) / size[False]
            if objective.band is not None:
                result["vllm_kl"] = total(batch["rollout_log_probs"] - batch["action_log_probs"], mask) / weight
                result["is_filter_ratio"] = out[:, 0].float().mean()
            for name, number in result.items():
                weighted[name] = weighted.get(name, 0.0) + float(number) * weight
            tokens += weight
            for name, numbers in batch["by_sample"].items():
                if name not in result:
                    samples.setdefault(name, []).extend(numbers.tolist())
    return {name: number / tokens for name, number in weighted.items()} | {
        name: sum(numbers) / len(numbers) for name, numbers in samples.items()
    }


def critic_metrics(windows, clip):
    """The mean loss of each optimizer step and the mean value of each micro-batch, each counted once a sample."""
    loss = value = samples = 0.0
    for window in windows:
        tokens, here = sum(count(batch["action_mask"]) for batch in window), sum(len(b["action_mask"]) for b in window)
        errors = [total(squared_error(b, b["output"], clip)[0], b["action_mask"]) for b in window]
        loss += here * float(sum(errors)) / tokens
        value += sum(len(b["output"]) * float(total(b["output"], b["action_mask"])) / count(b["action_mask"])
                     for b in window)  # fmt: skip
        samples += here
    return {"critic_loss": loss / samples, "values": value / samples}
