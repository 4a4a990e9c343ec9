"""What was generated for a step, and when: in the step that trains on it, or ahead of training."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Self

from bapo_openrlhf.adapt.group import Prompt, prompt_state
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


class Ahead(InTurn):
    """Makes each rollout some steps before the trainer asks for it: while this trains on a step, the engines generate.

    OpenRLHF's asynchronous mode has a trainer and a generator in two processes. Here a thread of the trainer's process
    generates, and OpenRLHF's synchronous loop gets the samples that are ready. The order is fixed: in trainer step t
    the rollout of step t + q is asked for, from the weights that the engines hold then. A sync waits until all rollouts
    that were asked for are there. Only `ask`, `metrics` and `next` may be called while a rollout is made.
    """

    KIND = "reevaluated ahead"  # because the step of the rollout may generate hard prompts of its own again

    def __init__(self, *args: Any, episodes: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.next_step, self.queue, self.episodes = 0, self.rollout_weights.queue, episodes
        self._epochs = 0  # whose data has ended
        self.hard_prompts_left: list[Prompt] = []  # they go with the next rollout
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")

    def ask(self, until: int, hard: Sequence[Prompt], generation: Mapping[str, Any]) -> None:
        """Ask for the rollouts up to that of step `until` that were not asked for, from the weights of the engines now.

        The last one takes the hard prompts along. If there is none (a resume with a shorter queue), the next one does.
        """
        self.hard_prompts_left += hard
        for step in range(self.next_step, until + 1):
            prompts: list[Prompt] = []
            if step == until:
                prompts, self.hard_prompts_left = self.hard_prompts_left, []
            rollout = Rollout(step, self.rollout_weights.weights_version, prompts)
            self.queue.append(self._thread.submit(self._make_rollout, rollout, generation))
            self.next_step = step + 1

    def _make_rollout(self, rollout: Rollout, generation: Mapping[str, Any]) -> Rollout:
        """Make a rollout. If an epoch ends without samples, it is of the next one. After the last one it is empty."""
        while self._epochs < self.episodes and not rollout.fresh:
            rollout.begins_epoch = rollout.exhausted
            self.make(rollout, generation)
            self._epochs += rollout.exhausted
        return rollout

    def hard(self, rollout: Rollout) -> Sequence[Prompt]:
        """The hard prompts that were given to this rollout. They do not depend on its weights."""
        prompts, rollout.hard_prompts_left = rollout.hard_prompts_left, []
        return prompts

    def next(self, generation: Mapping[str, Any]) -> Rollout:
        """The rollout of the next step, once it is made."""
        if not self.queue:  # at the start of a run, or of epochs that were added to it
            self.next_step = self.state.step
            self.ask(self.next_step, [], generation)
        rollout: Rollout = self.queue.popleft().result()
        self.hard_prompts_left += rollout.hard_prompts_left
        return rollout

    def in_flight(self, last: Rollout) -> int:
        """Number of groups that were generated, also in part, but are not yet at the trainer, which got `last` last.

        With v > 1, those that are being generated are not counted.
        """
        rollouts = [future.result() for future in self.queue if future.done() and not future.exception()]
        unfinished = [last, *rollouts][-1].numbers.get("groups/in_flight", 0)
        return sum(len(rollout.fresh) + len(rollout.hard) for rollout in rollouts) + int(unfinished)

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """What overlapped of a rollout, and what did not."""
        return {
            "groups/in_flight": self.in_flight(rollout),
            "rollouts/waited_seconds": self.queue.seconds_waited(),
            "rollouts/seconds": rollout.seconds,
        }

    def state_dict(self) -> dict[str, Any]:
        """The rollouts that training has not reached yet, as plain data and tensors."""
        self.queue.wait()
        rollouts = [future.result() for future in self.queue]
        states = [rollout.state_dict() for rollout in rollouts if rollout.fresh or rollout.exhausted]
        surplus = len(rollouts) - len(states)  # asked for after the last epoch; a resumed run may have more epochs
        prompts = chain(self.hard_prompts_left, *(rollout.hard_prompts_left for rollout in rollouts))
        return {
            "next_step": self.next_step - surplus,
            "epochs": self._epochs,
            "rollouts": states,
            "hard_prompts_left": list(map(prompt_state, prompts)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.next_step, self._epochs = state["next_step"], state["epochs"]
        self.hard_prompts_left = [Prompt(**prompt) for prompt in state["hard_prompts_left"]]
        for rollout_state in state["rollouts"]:
            rollout: Future[Rollout] = Future()
            rollout.set_result(Rollout.from_state(rollout_state))
            self.queue.append(rollout)
