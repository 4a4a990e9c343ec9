"""What was generated for a step, and how a rollout is made in the step that trains on it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.methods.base import Method
from bapo_openrlhf.training.trainer.rollout_weights import RolloutWeights
from bapo_openrlhf.training.trainer.run_state import RunState
from bapo_openrlhf.training.trainer.samples import Answers


@dataclass
class Rollout:
    """What was generated for a step.

    Attributes:
        weights_version: Number of updates behind the weights that generated it.
        hard_prompts_left: Hard prompts that it did not take along.
        fresh: Responses to its fresh prompts; with partial rollouts, those of complete groups.
        hard: Responses to the hard prompts that were generated together with them.
        passed_over: Number of the drawn prompts that were not generated for.
        begins_epoch: Whether the data of an epoch had ended before it.
        exhausted: Whether it has the last prompts of an epoch.
        pass_rate: Responses of fresh groups with a signal for each 100 prompts drawn; None without dynamic filtering.
        added_seconds: Time that it waited for hard prompts after its fresh prompts were done.
    """

    step: int
    weights_version: int
    hard_prompts_left: Sequence[Prompt] = ()
    fresh: list[Answers] = field(default_factory=list)
    hard: list[Answers] = field(default_factory=list)
    drawn: int = 0
    passed_over: int = 0
    begins_epoch: bool = False
    exhausted: bool = False
    pass_rate: float | None = None
    added_seconds: float = 0.0
    seconds: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """It as plain data, without the hard prompts that it did not take along."""
        answers = {name: [each.state_dict() for each in getattr(self, name)] for name in ("fresh", "hard")}
        return {name: value for name, value in vars(self).items() if name != "hard_prompts_left"} | answers

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Inverse of `state_dict`."""
        return cls(**state | {name: list(map(Answers.from_state, state[name])) for name in ("fresh", "hard")})


class InTurn:
    """Makes the rollout of a step when the trainer asks for it.

    Hard prompts are re-evaluated together with the fresh prompts of a step if the engines hold today's weights then.
    That needs no weight sync and fills the engines better. Otherwise they are re-evaluated afterwards.
    """

    KIND = "reevaluated"  # of the hard prompts that a rollout takes along, for their seeds

    def __init__(
        self,
        make: Callable[[Rollout, Mapping[str, Any]], None],
        *,
        method: Method,
        state: RunState,
        rollout_weights: RolloutWeights,
    ) -> None:
        self.make, self.method, self.state, self.rollout_weights = make, method, state, rollout_weights

    def hard(self, rollout: Rollout) -> Sequence[Prompt]:
        """The hard prompts that a rollout takes along. They are asked for once, when its fresh prompts are sent."""
        prompts = self.method.begin_step(rollout.step)
        if rollout.weights_version == rollout.step:
            return prompts
        rollout.hard_prompts_left = prompts
        return []

    def next(self, generation: Mapping[str, Any]) -> Rollout:
        """The rollout of this step. It is empty if the data of an epoch has just ended."""
        rollout = Rollout(self.state.step, self.rollout_weights.weights_version)
        self.make(rollout, generation)
        return rollout

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """Numbers that depend on when the rollout was made; there are none."""
        return {}
