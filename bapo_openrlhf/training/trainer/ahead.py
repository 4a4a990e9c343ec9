"""Rollouts ahead of training: while the trainer trains on a step, the engines generate for the steps that follow it.

OpenRLHF's asynchronous mode has a trainer and a generator in two processes, with a queue, slots and a lock between
them. Here a thread of the trainer's process generates, and OpenRLHF's synchronous loop gets the samples that are ready.
So the loop, the method, the record and the checkpoints are those of the synchronous mode. The order is fixed, and does
not depend on which side is faster: in trainer step t the rollout of step t + q is asked for, from the weights that the
engines hold then. A sync waits until all rollouts that were asked for are there.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any

from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.adapt.state import prompt_state
from bapo_openrlhf.host import extends
from bapo_openrlhf.training.trainer.rollout import AdaptedSamplesGenerator, Rollout, Samples

Asked = tuple[list[Samples], Rollout, list[Prompt]]
"""What OpenRLHF's loop gets in its calls for a step, the rollout, and the hard prompts that it did not take along. A
call has no samples if it only finds the end of an epoch's data. After the last epoch there is no call, and the rollout
is empty."""


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

    Only `ask`, `wait`, `metrics` and `generate_samples` may be called while a rollout is generated.

    Attributes:
        next_step: Trainer step of the next rollout to ask for.
    """

    HARD_KIND = "reevaluated ahead"  # because the step of the rollout may generate hard prompts of its own again

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.next_step = 0
        self._epochs = 0  # whose data has ended
        self._waited = 0.0  # seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._rollouts: deque[Future[Asked]] = deque()
        self._left: list[Prompt] = []  # hard prompts that no rollout took along; the next one does
        self._ready: list[Samples] = []  # of the rollout that the loop gets now

    def ask(self, until: int, hard: Sequence[Prompt], **kwargs: Any) -> None:
        """Ask for the rollouts up to that of step `until`, from the weights that the engines hold now.

        Args:
            until: Trainer step. Rollouts that were asked for before are not asked for again.
            hard: Hard prompts to generate again together with the last of these rollouts. If there is none, as when a
                run is resumed with a shorter queue, the next rollout takes them along.
            kwargs: Arguments of `generate_samples`.
        """
        self._left += hard
        for step in range(self.next_step, until + 1):
            prompts: list[Prompt] = []
            if step == until:
                prompts, self._left = self._left, []
            self._rollouts.append(self._thread.submit(self._make, step, self.weights_version(), prompts, kwargs))
            self.next_step = step + 1

    def _make(self, step: int, weights_version: int, hard: list[Prompt], kwargs: dict[str, Any]) -> Asked:
        """Generate a rollout, in the thread. An epoch may end without samples, and the next one begins then."""
        batches: list[Samples] = []
        rollout, left = Rollout(), hard

        def take_hard_prompts() -> list[Prompt]:
            nonlocal left
            left = []
            return hard

        while self._epochs < self.args.train.num_episodes:
            samples, rollout = self._generate_rollout(step, weights_version, take_hard_prompts, **kwargs)
            batches.append(samples)
            self._epochs += rollout.exhausted
            if samples[0]:
                break
        return batches, rollout, left

    def wait(self) -> None:
        """Wait until all rollouts that were asked for are there. The error of one that failed is raised."""
        start = time.perf_counter()
        for rollout in self._rollouts:
            rollout.result()
        self._waited += time.perf_counter() - start

    @property
    def there(self) -> list[Rollout]:
        """The rollouts that were generated, and have not reached the trainer yet."""
        done = [rollout for rollout in self._rollouts if rollout.done() and not rollout.exception()]
        return [rollout.result()[1] for rollout in done]

    @property
    def in_flight(self) -> int:
        """Number of prompts whose groups were generated, and have not reached the trainer yet."""
        return sum(rollout.asked for rollout in self.there)

    def metrics(self) -> dict[str, float]:
        """Numbers of the last step, with what overlapped and what did not."""
        waited, self._waited = self._waited, 0.0
        ahead = {"groups/in_flight": self.in_flight, "rollouts/waited_seconds": waited}
        return super().metrics() | ahead | {"rollouts/seconds": self.rollout.seconds}

    @extends(SamplesGenerator)
    def generate_samples(self, **kwargs: Any) -> Samples:
        """The samples of the next step, once they are there."""
        self.before_samples()
        if not self._ready:
            if not self._rollouts:  # at the start of a run, or of epochs that were added to it
                self.next_step = self.step()
                self.ask(self.next_step, [], **kwargs)
            self._ready, self.rollout, left = self._rollouts.popleft().result()
            self._left += left
            # Not in the thread that generates: the ranks of a model must get all calls in one order.
            self.score([*chain(*(samples for samples, *_ in self._ready)), *self.rollout.hard_samples])
        return self._ready.pop(0)

    def state_dict(self) -> dict[str, Any]:
        """The rollouts that training has not reached yet, as plain data and tensors."""
        self.wait()
        asked = [rollout.result() for rollout in self._rollouts]
        rollouts = [_rollout_state(batches, rollout) for batches, rollout, _ in asked if batches]
        beyond = len(asked) - len(rollouts)  # asked for after the last epoch; a resumed run may have more epochs
        left = [prompt_state(prompt) for prompt in chain(self._left, *(left for *_, left in asked))]
        state = {"next_step": self.next_step - beyond, "epochs": self._epochs, "rollouts": rollouts}
        return state | {"hard_prompts_left": left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.next_step, self._epochs = state["next_step"], state["epochs"]
        self._left = [Prompt(**prompt) for prompt in state["hard_prompts_left"]]
        for saved in state["rollouts"]:
            rollout: Future[Asked] = Future()
            rollout.set_result(_rollout_of(saved))
            self._rollouts.append(rollout)


def _rollout_state(batches: list[Samples], rollout: Rollout) -> dict[str, Any]:
    samples = [[list(map(vars, some)), *rest] for some, *rest in batches]
    return {"samples": samples, "rollout": vars(rollout) | {"hard_samples": list(map(vars, rollout.hard_samples))}}


def _rollout_of(state: dict[str, Any]) -> Asked:
    batches = [([Experience(**sample) for sample in some], *rest) for some, *rest in state["samples"]]
    hard = [Experience(**sample) for sample in state["rollout"]["hard_samples"]]
    return batches, Rollout(**state["rollout"] | {"hard_samples": hard}), []
