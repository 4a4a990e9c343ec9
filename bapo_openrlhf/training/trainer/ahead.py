"""Rollouts ahead of training: while the trainer trains on a step, the engines generate for the steps that follow it.

OpenRLHF's asynchronous mode has a trainer and a generator in two processes. Here a thread of the trainer's process
generates, and OpenRLHF's synchronous loop gets the samples that are ready. The order is fixed: in trainer step t the
rollout of step t + q is asked for, from the weights that the engines hold then. A sync waits until all rollouts that
were asked for are there.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.adapt.state import prompt_state
from bapo_openrlhf.training.trainer.rollout import InTurn, Rollout


class Ahead(InTurn):
    """Makes each rollout some steps before the trainer asks for it, in a thread.

    Only `ask`, `metrics` and `next` may be called while a rollout is made.
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
        """The hard prompts that the rollout was asked to take along, whatever its weights are."""
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
