"""Rollouts ahead of training: while the trainer trains on a step, the engines generate for the steps that follow it.

OpenRLHF's asynchronous mode has a trainer and a generator in two processes, with a queue, slots and a lock between
them. Here a thread of the trainer's process generates, and OpenRLHF's synchronous loop gets the samples that are ready.
So the loop, the method, the record and the checkpoints are those of the synchronous mode. The order is fixed, and does
not depend on which side is faster: in trainer step t the rollout of step t + q is asked for, from the weights that the
engines hold then. A sync waits until all rollouts that were asked for are there.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any

from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.adapt.state import prompt_state
from bapo_openrlhf.host import extends
from bapo_openrlhf.training.trainer.rollout import AdaptedSamplesGenerator, Draft, Rollout, Samples

Asked = tuple[list[Samples], Rollout]
"""What OpenRLHF's loop gets in its calls for a step, and the rollout. A call has no samples if it only finds the end of
an epoch's data. After the last epoch there is no call, and the rollout is empty."""


class SharedLoader:
    """A data loader from which one thread draws prompts while another one asks for its state, one at a time.

    Without the lock, both threads may create the loader's iterator. A resumed run could then start its data from the
    beginning.

    Args:
        loader: The data loader.
    """

    def __init__(self, loader: Any) -> None:
        self._loader, self._turn = loader, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        with self._turn:
            batches = iter(self._loader)
        return self._drawn(batches)

    def _drawn(self, batches: Iterator[Any]) -> Iterator[Any]:
        end = object()
        while True:
            with self._turn:
                batch = next(batches, end)
            if batch is end:
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The loader's state."""
        with self._turn:
            state: dict[str, Any] = self._loader.state_dict()
            return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        with self._turn:
            self._loader.load_state_dict(state)


class AheadSamplesGenerator(AdaptedSamplesGenerator):
    """The generator of a run in which generation is ahead of training.

    Only `ask`, `metrics` and `generate_samples` may be called while a rollout is generated.

    Attributes:
        next_step: Trainer step of the next rollout to ask for.
    """

    HARD_KIND = "reevaluated ahead"  # because the step of the rollout may generate hard prompts of its own again

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.next_step = 0
        self.queue = self.rollout_weights.queue
        self._epochs = 0  # whose data has ended
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._ready: list[Samples] = []  # of the rollout that the loop gets now

    def ask(self, until: int, hard: Sequence[Prompt], **kwargs: Any) -> None:
        """Ask for the rollouts up to that of step `until`, from the weights that the engines hold now.

        Args:
            until: Trainer step. Rollouts that were asked for before are not asked for again.
            hard: Hard prompts to generate again together with the last of these rollouts. If there is none, as when a
                run is resumed with a shorter queue, the next rollout takes them along.
            kwargs: Arguments of `generate_samples`.
        """
        self.hard_prompts_left += hard
        for step in range(self.next_step, until + 1):
            prompts: list[Prompt] = []
            if step == until:
                prompts, self.hard_prompts_left = self.hard_prompts_left, []
            draft = Draft(step, Rollout(self.rollout_weights.weights_version, hard_prompts_left=prompts))
            self.queue.append(self._thread.submit(self._make, draft, kwargs))
            self.next_step = step + 1

    def _make(self, draft: Draft, kwargs: dict[str, Any]) -> Asked:
        """Generate a rollout, in the thread. An epoch may end without samples, and the next one begins then."""
        batches: list[Samples] = []
        while self._epochs < self.args.train.num_episodes:
            batches.append(self._generate_rollout(draft, **kwargs))
            self._epochs += draft.rollout.exhausted
            if batches[-1][0]:
                break
        return batches, draft.rollout

    def _hard_prompts(self, draft: Draft) -> Sequence[Prompt]:
        """The hard prompts that the rollout was asked to take along, whatever its weights are."""
        prompts, draft.rollout.hard_prompts_left = draft.rollout.hard_prompts_left, []
        return prompts

    @property
    def there(self) -> list[Rollout]:
        """The rollouts that were generated, and have not reached the trainer yet."""
        done = [rollout for rollout in self.queue if rollout.done() and not rollout.exception()]
        return [rollout.result()[1] for rollout in done]

    @property
    def in_flight(self) -> int:
        """Number of prompts whose groups were generated, and have not reached the trainer yet."""
        return sum(rollout.asked for rollout in self.there)

    def metrics(self) -> dict[str, float]:
        """Numbers of the last step, with what overlapped and what did not."""
        ahead = {"groups/in_flight": self.in_flight, "rollouts/waited_seconds": self.queue.seconds_waited()}
        return super().metrics() | ahead | {"rollouts/seconds": self.rollout.seconds}

    @extends(SamplesGenerator)
    def generate_samples(self, **kwargs: Any) -> Samples:
        """The samples of the next step, once they are there."""
        self.before_samples()
        if not self._ready:
            if not self.queue:  # at the start of a run, or of epochs that were added to it
                self.next_step = self.state.step
                self.ask(self.next_step, [], **kwargs)
            self._ready, self.rollout = self.queue.popleft().result()
            self.hard_prompts_left += self.rollout.hard_prompts_left
            # Not in the thread that generates: the ranks of a model must get all calls in one order.
            self.reward_model.score([*chain(*(samples for samples, *_ in self._ready)), *self.rollout.hard_samples])
        return self._ready.pop(0)

    def state_dict(self) -> dict[str, Any]:
        """The rollouts that training has not reached yet, as plain data and tensors."""
        self.queue.wait()
        asked = [rollout.result() for rollout in self.queue]
        rollouts = [_rollout_state(batches, rollout) for batches, rollout in asked if batches]
        beyond = len(asked) - len(rollouts)  # asked for after the last epoch; a resumed run may have more epochs
        left = chain(self.hard_prompts_left, *(rollout.hard_prompts_left for _, rollout in asked))
        state = {"next_step": self.next_step - beyond, "epochs": self._epochs, "rollouts": rollouts}
        return state | {"hard_prompts_left": list(map(prompt_state, left))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.next_step, self._epochs = state["next_step"], state["epochs"]
        self.hard_prompts_left = [Prompt(**prompt) for prompt in state["hard_prompts_left"]]
        for saved in state["rollouts"]:
            rollout: Future[Asked] = Future()
            rollout.set_result(_rollout_of(saved))
            self.queue.append(rollout)


def _rollout_state(batches: list[Samples], rollout: Rollout) -> dict[str, Any]:
    samples = [[list(map(vars, some)), *rest] for some, *rest in batches]
    numbers = {name: value for name, value in vars(rollout).items() if name != "hard_prompts_left"}
    return {"samples": samples, "rollout": numbers | {"hard_samples": list(map(vars, rollout.hard_samples))}}


def _rollout_of(state: dict[str, Any]) -> Asked:
    batches = [([Experience(**sample) for sample in some], *rest) for some, *rest in state["samples"]]
    hard = [Experience(**sample) for sample in state["rollout"]["hard_samples"]]
    return batches, Rollout(**state["rollout"] | {"hard_samples": hard})
