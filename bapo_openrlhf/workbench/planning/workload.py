"""The flags that a plan needs, and how the roles of a run share its GPUs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf.flags.config import with_flags
from bapo_openrlhf.flags.rule import Flags
from bapo_openrlhf.flags.sizes import Block, blocks_of, most_rounds, most_tokens, response_tokens


@dataclass(frozen=True)
class Algorithm:
    """What a plan must know about an algorithm."""

    name: str
    adapted: bool = False  # batches are built from X1, X2 and X3, with a weight sync every v steps
    critic: bool = False
    dynamic: bool = False  # a group without signal is replaced by another one
    reference: bool = True  # a KL penalty to the reference model is possible

    @property
    def trained(self) -> list[str]:
        return ["actor", *["critic"] * self.critic]


ALGORITHMS = (
    Algorithm("GRPO"),
    Algorithm("PPO", critic=True),
    Algorithm("DAPO", dynamic=True, reference=False),
    Algorithm("BAPO-GRPO", adapted=True),
    Algorithm("BA-PPO", adapted=True, critic=True),
)


@dataclass(frozen=True)
class Workload:
    """What the flags of a run say, as far as a plan needs it. The verdict is about the algorithm that they ask for."""

    args: SimpleNamespace

    @property
    def algorithm(self) -> Algorithm:
        """The one of ALGORITHMS that the flags ask for. Every method of batch adaptation counts as BAPO."""
        adapted, critic = self.args.adapt.enabled, self.args.algo.advantage.estimator == "gae"
        dynamic = self.args.algo.dynamic_filtering_enable and not (adapted or critic)
        return next(one for one in ALGORITHMS if (one.adapted, one.critic, one.dynamic) == (adapted, critic, dynamic))

    @property
    def gpus(self) -> int:
        return sum(block.gpus for block in self.blocks(self.algorithm).values())

    @property
    def response_tokens(self) -> int:
        return response_tokens(self.args)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.args.data.max_len - self.response_tokens, 1)

    @property
    def sample_tokens(self) -> int:
        """Tokens of the longest sample."""
        return self.prompt_tokens + self.response_tokens

    def micro_samples(self, phase: str) -> float:
        """The number of longest samples in a micro-batch ("train"), or in a forward pass ("rollout")."""
        tokens = most_tokens(self.args, phase)
        if tokens is not None:
            return tokens / self.sample_tokens
        size: int = getattr(self.args, phase).micro_batch_size
        return size

    @property
    def masked_tokens(self) -> int:
        """Tokens of a sample in a micro-batch that torch's attention takes with padding; 0 if there is no padding."""
        args = self.args
        padded = self.micro_samples("train") > 1 and not args.ds.packing_samples
        return self.sample_tokens if padded and args.ds.attn_implementation == "sdpa" else 0

    @property
    def replay_capacity(self) -> int:
        """Most groups that the replay buffer holds after a step: its room, or those of the step and the ones before."""
        adapt, steps = self.args.adapt, self.args.adapt.replay_steps
        groups = (steps + 1) * most_rounds(self.args) * self.args.rollout.batch_size
        return min(adapt.buffer_size, groups) if steps else 0

    @property
    def copies(self) -> int:
        """Number of GPUs that hold one data-parallel rank."""
        return self.args.ds.tensor_parallel_size

    @cached_property
    def reference(self) -> bool:
        return "ref" in Flags.of(self.args).loaded

    def has_reference(self, algorithm: Algorithm) -> bool:
        return self.reference and algorithm.reference

    def with_flags(self, flags: Mapping[str, Any]) -> "Workload":
        """The workload with other values of some flags, by their dotted names."""
        return Workload(with_flags(self.args, flags))

    def blocks(self, algorithm: Algorithm) -> dict[str, Block]:
        return blocks_of(self.args, critic=algorithm.critic, reference=self.has_reference(algorithm))

    def gpus_of(self, role: str, algorithm: Algorithm, total: int) -> int:
        """GPUs of a role out of `total`, in proportion to the configuration; at least 1, because it is divided by."""
        blocks = self.blocks(algorithm).values()
        size = next(block.gpus for block in blocks if role in block.roles)
        return max(total * size // sum(block.gpus for block in blocks), 1)

    def ranks(self, role: str, algorithm: Algorithm, total: int) -> int:
        """Number of data-parallel ranks of a model that is trained or passed forward."""
        return max(self.gpus_of(role, algorithm, total) // self.copies, 1)

    def most_ranks(self, algorithm: Algorithm, total: int) -> int:
        """The ranks of the trained model that has most of them."""
        return max(self.ranks(model, algorithm, total) for model in algorithm.trained)
