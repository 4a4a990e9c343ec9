"""Batch arithmetic: how groups become micro-batches and optimizer steps on data-parallel ranks.

OpenRLHF hands each rank an equal, consecutive share of its forward-pass batches and drops what fills no micro-batch. So
a batch must hold a multiple of `quantum` groups; this is the one place that says which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace


@dataclass(frozen=True)
class BatchArithmetic:
    """Counts that follow from a configuration.

    Attributes:
        group_size: G, responses a prompt.
        capacity: B, groups a training batch holds at most.
        rollout_groups: prompts of a rollout batch.
        train_batch: samples of an optimizer step.
        ranks: data-parallel ranks of actor, critic and reference, by name.
        micro_train: samples of a micro-batch in training, on one rank.
        micro_rollout: samples of a forward pass when experience is made, on one rank.
    """

    group_size: int
    capacity: int
    rollout_groups: int
    train_batch: int
    ranks: dict[str, int]
    micro_train: int
    micro_rollout: int

    @property
    def shares(self) -> int:
        """Equal shares that the samples are split into, such that every model's ranks get whole shares."""
        return math.lcm(*self.ranks.values())

    @property
    def quantum(self) -> int:
        """Least number of groups that gives every rank equally many whole micro-batches."""
        trained = [ranks * self.micro_train for name, ranks in self.ranks.items() if name in ("actor", "critic")]
        samples = math.lcm(self.shares, *trained)
        return samples // math.gcd(samples, self.group_size)

    def micro_batches(self, groups: int, model: str = "actor") -> int:
        """Micro-batches that each rank trains on, for a batch of `groups` groups."""
        return groups * self.group_size // (self.ranks[model] * self.micro_train)

    def optimizer_steps(self, groups: int) -> int:
        """Optimizer steps for a batch of `groups` groups and one epoch; the last one may be smaller."""
        return math.ceil(groups * self.group_size / self.train_batch)

    def left_over(self, samples: int, *, dynamic: bool) -> int:
        """Samples of a batch that OpenRLHF by itself does not train on.

        Each rank trains on whole micro-batches; with dynamic batching all train on whole optimizer steps.

        Args:
            samples: of the batch; fewer than usual where the data ends.
            dynamic: whether `--train.dynamic_batch_enable` is on.
        """
        if dynamic:
            full = self.rollout_groups * self.group_size // self.train_batch
            return samples - min(full, samples // self.train_batch) * self.train_batch
        ranks = self.ranks["actor"]
        batches = [min(self.micro_rollout, samples - start) for start in range(0, samples, self.micro_rollout)]
        share = math.ceil(len(batches) / ranks)  # forward-pass batches of one rank
        return sum(sum(batches[rank * share : (rank + 1) * share]) % self.micro_train for rank in range(ranks))

    def forward_batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Positions of the samples in each forward-pass batch, one rank's batches after the other's.

        Every rank gets equally many samples. They are dealt out by length, so that ranks get about equally many tokens,
        and in each rank's batches samples of like lengths stand together, so that little is padded.

        Args:
            lengths: tokens of each sample.

        Raises:
            ValueError: the samples cannot be shared equally.
        """
        if len(lengths) % self.shares:
            raise ValueError(f"{len(lengths)} samples cannot be shared equally by {self.shares} ranks")
        by_length = sorted(range(len(lengths)), key=lambda position: lengths[position])
        shares = [by_length[first :: self.shares] for first in range(self.shares)]
        size = self.micro_rollout
        return [share[start : start + size] for share in shares for start in range(0, len(share), size)]


def epoch_steps(args: SimpleNamespace, prompts: int) -> int:
    """Trainer steps of one pass through `prompts` prompts of the data: each uses up those that its method draws."""
    drawn: int = args.rollout.batch_size * args.adapt.candidates
    return math.ceil(prompts / drawn)


def batch_arithmetic(args: SimpleNamespace) -> BatchArithmetic:
    """The arithmetic of OpenRLHF's (nested) arguments."""
    capacity = (args.adapt.batch_size if args.adapt.enabled else None) or args.rollout.batch_size
    copies = args.ds.ring_attn_size * args.ds.tensor_parallel_size
    models = {"actor": args.actor}
    if args.critic.model_name_or_path:
        models["critic"] = args.critic
    if args.algo.kl.init_coef > 0 and not (args.adapt.enabled and args.adapt.kl_target == "behaviour"):
        models["reference"] = args.ref
    return BatchArithmetic(
        group_size=args.rollout.n_samples_per_prompt,
        capacity=capacity,
        rollout_groups=args.rollout.batch_size,
        train_batch=args.train.batch_size,
        ranks={name: max(m.num_nodes * m.num_gpus_per_node // copies, 1) for name, m in models.items()},
        micro_train=args.train.micro_batch_size,
        micro_rollout=args.rollout.micro_batch_size,
    )
