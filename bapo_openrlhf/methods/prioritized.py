"""BAPO with prioritised replay and re-evaluation: not in the paper, which draws uniformly and oldest first."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.difficulty import SuccessCounts
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.methods.bapo import BAPO, BAPOConfig
from bapo_openrlhf.methods.bapo import STATE_VERSION as BAPO_VERSION
from bapo_openrlhf.methods.base import require_state

STATE_VERSION = 1
SMALL = 1e-6  # so that a group of error 0 can still be drawn


@dataclass(frozen=True)
class PrioritizedConfig(BAPOConfig):
    """BAPO's numbers, and these.

    Attributes:
        replay: error: prioritised by the last error; uniform: as in the paper.
        exponent: alpha of the priorities, within [0, 10]; 0 is uniform.
        reevaluate: thompson: by the posterior of a prompt's difficulty; oldest: as in the paper.
        decay: lam of the posterior, within [0, 1]: how much of what was seen before a prompt's last group still counts.
    """

    replay: str = "error"
    exponent: float = 0.6
    reevaluate: str = "thompson"
    decay: float = 0.5


class PrioritizedBAPO(BAPO):
    """BAPO with two other draws.

    Replay (X3): of the groups that BAPO could replay, each is drawn with probability proportional to
    (error + 1e-6)^alpha, one after the other without replacement: proportional prioritisation (arXiv 1511.05952,
    Sec. 3.3), for groups instead of transitions. Its importance-sampling correction (Sec. 3.4) is left out: BAPO's
    uniform draw from [c2, c3] is no estimate of an expectation either. The error of a group is what it had when it was
    last trained on: the mean |value - return| over its tokens under a critic, else the mean |A|. A group that was
    stored and not trained on has the largest error known, so that it will be seen.

    Re-evaluation (X2): of each hard prompt, a success probability is drawn from its posterior Beta(a, b)
    (`adapt.difficulty`, prior 1 and 1), which all its groups update. The prompts whose draw is at least c1 come first,
    the oldest of them before the others; then those whose draw is nearest below.

    Raises:
        ValueError: an option is out of its range.
    """

    config: PrioritizedConfig

    def __init__(self, config: PrioritizedConfig, seed: int = 0) -> None:
        super().__init__(config, seed)
        for name, value, allowed in (
            ("replay", config.replay, ("error", "uniform")),
            ("reevaluate", config.reevaluate, ("thompson", "oldest")),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value}; it must be {' or '.join(allowed)}")
        if not 0 <= config.exponent <= 10:  # more, and 1e-6 to that power is lost beside 1
            raise ValueError(f"exponent is {config.exponent}; it must be within [0, 10]")
        if not 0 <= config.decay <= 1:
            raise ValueError(f"decay is {config.decay}; it must be within [0, 1]")
        self.errors: dict[int, float] = {}  # of stored groups, by uid
        self.posteriors = SuccessCounts(config.decay, 1.0, 1.0)

    @classmethod
    def parameters(cls) -> Mapping[str, inspect.Parameter]:
        """The fields of `PrioritizedConfig`."""
        return inspect.signature(PrioritizedConfig).parameters

    @classmethod
    def build(cls, given: Mapping[str, Any], options: Mapping[str, Any]) -> Self:
        """See `Method.build`."""
        flags = {name: given[name] for name in BAPO.parameters()}
        return cls(PrioritizedConfig(**flags, **options), seed=given["seed"])

    def draw_hard(self, count: int) -> list[Prompt]:
        """Hard prompts by their draws, see the class."""
        if self.config.reevaluate == "oldest" or count == 0:
            return super().draw_hard(count)
        prompts = [entry.prompt for entry in self.hard.oldest(len(self.hard))]
        counts, _ = self.posteriors.of(prompts)
        draws = self.rng.beta(counts[:, 0], counts[:, 1])
        missing = np.maximum(float(self.config.c1) - draws, 0)
        return [prompts[index] for index in np.argsort(missing, kind="stable")[:count]]

    def draw_replay(self, count: int, accept: Callable[[Group], bool]) -> list[Group]:
        """Stored groups by their errors, see the class."""
        if self.config.replay == "uniform":
            return super().draw_replay(count, accept)
        newest = max(self.errors.values(), default=1.0)

        def priority(group: Group) -> float:
            return float((self.errors.get(group.uid, newest) + SMALL) ** self.config.exponent)

        return self.replay.sample(count, self.rng, accept, priority)

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """BAPO's; what was generated updates the posteriors."""
        self.posteriors.update([*fresh, *reevaluated])
        return super().build_batch(step, fresh, reevaluated)

    def observe(self, step: int, errors: Mapping[int, float]) -> None:
        """Keep the errors of what is stored."""
        known = self.errors | dict(errors)
        self.errors = {group.uid: known[group.uid] for group in self.replay if group.uid in known}

    def state_dict(self) -> dict[str, Any]:
        """BAPO's, errors and posteriors."""
        return super().state_dict() | {
            "method": "bapo_prioritized",
            "version": STATE_VERSION,
            "errors": [[uid, error] for uid, error in self.errors.items()],
            "posteriors": self.posteriors.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`.

        Raises:
            ValueError: the state is of another method or format version.
        """
        require_state(state, "bapo_prioritized", STATE_VERSION)
        super().load_state_dict(state | {"method": "bapo", "version": BAPO_VERSION})
        self.errors = {int(uid): float(error) for uid, error in state["errors"]}
        self.posteriors.load_state_dict(state["posteriors"])
