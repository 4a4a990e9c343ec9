"""LUFFY: one response of each group is another model's, after "Learning to Reason under Off-Policy Guidance"
(arXiv 2504.14945).

What the paper leaves open is as in its authors' code, ElliottYan/LUFFY at commit 01f4ae0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bapo_openrlhf.adapt.batch import Batch, fresh_alone
from bapo_openrlhf.adapt.filters import make_filter
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.adapt.traces import external_response
from bapo_openrlhf.methods.base import Method, require_state

STATE_VERSION = 1


class LUFFY(Method):
    """GRPO on mixed groups: G - 1 responses of the policy and one of a stronger model, a trace from a file.

    The trace takes the place of the last response of each fresh group whose prompt has one. Advantages are those of
    the mixed group (Eq. 2 of BAPO's paper, over all G rewards), so an all-wrong group becomes one of 1 right and G - 1
    wrong. The loss of the trace's tokens is that of policy shaping, see `adapt.traces.shaped`; all others have
    OpenRLHF's own.

    Deviations: G responses are generated and the last is given up, where the authors generate G - 1. The trace's
    reward is an option, where the authors ask their verifier. Mixed groups with equal rewards are filtered, unless
    `--adapt.filter none`. Three more of the authors' settings are OpenRLHF's flags: no division by the standard
    deviation (`--algo.advantage.estimator dr_grpo`), no KL penalty (`--algo.kl.init_coef 0`), an entropy bonus
    (`--actor.entropy_coef 0.001`). They also take the clip from the policy's own tokens, and divide the loss by a
    constant length: neither is here.

    Args:
        capacity: B, groups a batch holds at most.
        seed: of the generator behind the filters that draw.
        filter, gaussian_mean, gaussian_std, uniform_fraction: the fresh filter, as the --adapt flags; it sees mixed
            groups.
        traces: file with the traces.
        trace_reward: reward of a trace.
        gamma: of the policy shaping, above 0.

    Raises:
        ValueError: an option that is out of its range.
    """

    def __init__(
        self,
        *,
        capacity: int,
        seed: int = 0,
        filter: str = "range",
        gaussian_mean: float = 0.5,
        gaussian_std: float = 0.2,
        uniform_fraction: float = 0.6,
        traces: str = "",
        trace_reward: float = 1.0,
        gamma: float = 0.1,
    ) -> None:
        if not gamma > 0:
            raise ValueError(f"gamma is {gamma}; it must be above 0")
        if not np.isfinite(trace_reward):
            raise ValueError(f"trace_reward is {trace_reward}; it must be finite")
        self.capacity = capacity
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.fresh_filter = make_filter(filter, mean=gaussian_mean, std=gaussian_std, fraction=uniform_fraction)
        self.traces, self.trace_reward, self.shaping = traces, trace_reward, gamma
        self._metrics: dict[str, float] = {}

    def begin_step(self, step: int) -> list[Prompt]:
        """No prompt is generated again."""
        return []

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """X1: fresh groups that the filter keeps, with a trace each where there is one."""
        groups = [self.mixed(group) for group in fresh]
        batch = fresh_alone(groups, self.fresh_filter(groups, self.rng), self.capacity)
        self._metrics = {
            "groups/capacity": self.capacity,
            "traces/prompts": len(self.trace_of),
            "traces/mixed": sum(group.prompt.text in self.trace_of for group in fresh),
        }
        return batch

    def mixed(self, group: Group) -> Group:
        """The group with its prompt's trace in the place of the last response; as it is where there is no trace."""
        trace = self.trace_of.get(group.prompt.text)
        if trace is None:
            return group
        *own, last = group.responses
        return replace(group, responses=(*own, external_response(trace, last, self.trace_reward)))

    def metrics(self) -> dict[str, float]:
        """After the last batch.

        - groups/capacity: groups that a batch holds at most
        - traces/prompts: prompts that have a trace
        - traces/mixed: fresh groups of this step that got one
        """
        return dict(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """Generator state; the traces are read anew."""
        return {"method": "luffy", "version": STATE_VERSION, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`.

        Raises:
            ValueError: the state is of another method or format version.
        """
        require_state(state, "luffy", STATE_VERSION)
        self.rng.bit_generator.state = state["rng"]
