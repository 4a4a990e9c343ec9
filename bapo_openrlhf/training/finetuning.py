"""Fine-tuning: one optimizer step of the actor's cross-entropy on demonstrations that a method names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from bapo_openrlhf.adapt.arithmetic import in_parts
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.training.dealing import dealt_batches, ranks_of
from bapo_openrlhf.training.samples import samples_of


def finetune(
    demonstrations: Sequence[Group], actor: Any, *, micro: int, weight: float, sleep: bool, pad: int
) -> dict[str, float]:
    """Take the optimizer step. Returns its metrics.

    Args:
        demonstrations: Groups of responses to fine-tune on; at least one.
        actor: OpenRLHF's group of the actor's processes.
        micro: Number of samples of a micro-batch.
        weight: Factor of the loss.
        sleep: Whether the actor's states must be loaded to the GPU for this (`--ds.enable_sleep`).
        pad: Token id of the padding.
    """
    samples, ranks = samples_of(demonstrations), ranks_of(actor)
    tokens = sum(int(sample.action_mask.sum()) for sample in samples)
    batches = dealt_batches(samples, ranks, lambda _, shares: [in_parts(share, micro) for share in shares], pad)
    if sleep:
        ray.get(actor.async_run_method(method_name="reload_states"))
    refs = actor.async_run_method_batch(
        method_name="finetune",
        demonstrations=batches,
        tokens=[tokens] * ranks,
        ranks=[ranks] * ranks,
        weight=[weight] * ranks,
    )
    parts = ray.get(refs)[:: len(refs) // ranks]  # all processes of a tensor-parallel or ring group return the same
    if sleep:
        ray.get(actor.async_run_method(method_name="offload_states"))
    return {"finetune/demonstrations": len(samples), "finetune/loss": sum(part for (part,) in parts)}
