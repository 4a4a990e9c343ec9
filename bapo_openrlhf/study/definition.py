"""What a study consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Arm:
    """One method on one advantage path.

    Attributes:
        method: key of the study's methods, e.g. bapo_without_x2.
        path: group (group-relative advantages) or critic (GAE).
        label: what people call it, e.g. BA-PPO.
        flags: of its runs.
    """

    method: str
    path: str
    label: str
    flags: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What the study's files call it."""
        return f"{self.method}-{self.path}"


@dataclass(frozen=True)
class Claim:
    """A statement that the study's runs can bear out.

    Attributes:
        says: in words.
        source: where it is stated, e.g. A.9.
        better, than: names of arms.
        measure: accuracy (final), rollouts (generated; fewer is better), solved (share of the prompts not solved at
            first that were solved later) or rollouts_to (rollouts until the target accuracy).
        ratio: claimed ratio of the measure, better / than; for information.
        margin: "about equal": holds when the interval lies within +-margin (relative for rollouts). 0: one-sided.
    """

    says: str
    source: str
    better: str
    than: str
    measure: str
    ratio: float | None = None
    margin: float = 0.0


@dataclass(frozen=True)
class Study:
    """What is run.

    Attributes:
        evaluations: benchmark names in the evaluations' keys, e.g. cd34 of eval_cd34_pass1.
        targets: accuracies to reach.
    """

    name: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    evaluations: tuple[str, ...]
    targets: tuple[float, ...]
    claims: tuple[Claim, ...]
