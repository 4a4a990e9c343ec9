"""LUFFY: one response of each group is another model's, after "Learning to Reason under Off-Policy Guidance"
(arXiv 2504.14945).

What the paper leaves open follows its authors' code, ElliottYan/LUFFY at commit 01f4ae0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bapo_openrlhf.adapt.batch import Batch, fill
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.adapt.metric import CAPACITY, TRACES, declare
from bapo_openrlhf.adapt.traces import external_response
from bapo_openrlhf.methods.base import FilteredMethod


@dataclass(eq=False, kw_only=True)
class LUFFY(FilteredMethod):
    """GRPO on mixed groups: G - 1 responses of the policy, and one of a stronger model, a trace from a file.

    The trace replaces the last response of each fresh group whose prompt has one. The fresh filter sees the mixed
    groups. Advantages are those of the mixed group (Eq. 2 of BAPO's paper, over all G rewards), so a group without a
    right response becomes one with 1 right and G - 1 wrong responses. The loss of the trace's tokens is that of policy
    shaping, see `adapt.traces.shaped`. All other tokens have OpenRLHF's own loss.

    Deviations: G responses are generated and the last is given up, but the authors generate G - 1. The reward of a
    trace is an option, but the authors ask their verifier. Mixed groups with equal rewards are filtered, unless
    `--adapt.filter none` is set. Three more settings of the authors are OpenRLHF's flags: no division by the standard
    deviation (`--algo.advantage.estimator dr_grpo`), no KL penalty (`--algo.kl.init_coef 0`), and an entropy bonus
    (`--actor.entropy_coef 0.001`). Two settings are not here: the authors do not clip the policy's own tokens, and they
    divide the loss by a constant length.

    Args:
        traces: File with the traces.
        trace_reward: Reward of a trace.
        gamma: gamma of the policy shaping, above 0.

    Raises:
        ValueError: An option is out of its range.
    """

    NAME = "luffy"
    METRICS = (
        CAPACITY,
        TRACES,
        *declare("""
            traces/mixed | groups | Mixed groups | | Fresh groups that a trace was put into.
            traces/trained_share | 0 to 1 | Share of traces | | Share of the trained responses that are traces.
        """),
    )

    traces: str = ""
    trace_reward: float = 1.0
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gamma > 0:
            raise ValueError(f"gamma is {self.gamma}; it must be above 0")
        if not np.isfinite(self.trace_reward):
            raise ValueError(f"trace_reward is {self.trace_reward}; it must be finite")
        self.shaping = self.gamma

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """X1: fresh groups that the filter keeps, each with the trace of its prompt if there is one."""
        groups = [self.mixed(group) for group in fresh]
        self.measured = {
            "groups/capacity": self.capacity,
            "traces/prompts": len(self.trace_of),
            "traces/mixed": sum(group.prompt.text in self.trace_of for group in fresh),
        }
        return fill(self.capacity, groups, self.passes(groups))

    def mixed(self, group: Group) -> Group:
        """The group with its prompt's trace in the place of the last response. Without a trace it stays as it is."""
        trace = self.trace_of.get(group.prompt.text)
        if trace is None:
            return group
        *own, last = group.responses
        return replace(group, responses=(*own, external_response(trace, last, self.trace_reward)))
