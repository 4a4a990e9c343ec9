"""How the driver waits for a run: it passes a signal on to the trainer, and says so if the run stalls.

A run stalls if it stays in one phase of a step for several times as long as its longest step took. Then each process is
asked for an answer. The trainer waits for those that give none, because they are in a call, or are stopped.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bapo_openrlhf.errors import Ended
from bapo_openrlhf.flags.config import RunConfig
from bapo_openrlhf.training.driver.signals import BEFORE, Signals
from bapo_openrlhf.training.trainer.run_state import STARTING, message_of

LOOK = 0.5  # seconds between two looks at the run
ANSWER = 5.0  # seconds in which a process answers that is in no call
LEAST, LONGEST_STEPS = 60.0, 3.0  # a run stalls after LEAST seconds, or so many times its longest step if that is more
FIRST = 600.0  # seconds before it has made a step
ENGINE = "rollout engine"  # how the names of engines begin
STALLED = 75  # status of the process: EX_TEMPFAIL of sysexits.h, which asks for another try
LOADING = "loading the models"


class Place(NamedTuple):
    """Where a run is: the step that it has begun last (`RunState.begun`), and what it does now."""

    step: int = 0
    phase: str = STARTING

    def __str__(self) -> str:
        return f"{f'step {self.step}' if self.step else BEFORE}, {self.phase}"


class Pace:
    """How long a run has been where it is, and how long that may take by its own steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._since = clock, clock()
        self._step_since: float | None = None
        self.place, self.longest = Place(), None  # seconds of its longest step whose beginning was seen

    def at(self, place: Place) -> None:
        """The run is here now."""
        if place == self.place:
            return
        now = self._clock()
        if place.step != self.place.step:
            if self._step_since is not None:
                self.longest = max(self.longest or 0.0, now - self._step_since)
            self._step_since = now
        self.place, self._since = place, now

    @property
    def seconds(self) -> float:
        """How long it has been there."""
        return self._clock() - self._since

    @property
    def limit(self) -> float:
        """Seconds after which it stalls."""
        return FIRST if self.longest is None else max(LEAST, LONGEST_STEPS * self.longest)


class Waiting:
    """Waits for a run. Its trainer has `place` and `stop`, or is None: OpenRLHF's asynchronous one lacks them."""

    def __init__(
        self, run: RunConfig, *, signals: Signals, trainer: Any, processes: Mapping[str, Any],
        warn: Callable[[int, str], None], clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.run, self.signals, self.trainer, self.processes = run, signals, trainer, processes
        self.pace = Pace(clock)
        self._warn, self._clock = warn, clock
        self._homes: dict[str, tuple[str, str, int]] = {}  # see `home`
        self._answer: Any = None  # Ray's reference to the trainer's answer
        self._is_stopping, self._warned_place = False, Place()

    def note_homes(self) -> None:
        """Ask all processes where they are, as long as they answer."""
        homes = ray.get([process.__ray_call__.remote(home) for process in self.processes.values()])
        self._homes = dict(zip(self.processes, homes, strict=True))

    def get(self, refs: list[Any], phase: str | None = None) -> Any:
        """What `ray.get` returns for a list of references. The trainer knows what the run does if no phase is given.

        Raises:
            Ended: A signal or the time limit for a phase ends the run before its time.
        """
        if phase is not None:
            self.pace.at(Place(self.pace.place.step, phase))
        pending = refs
        while pending:
            try:
                ready, pending = ray.wait(pending, num_returns=len(pending), timeout=LOOK)
                ray.get(ready)  # raises the first error at once
            except ray.exceptions.RayError as error:
                if self.signals.first is None:
                    raise
                why = " ".join(message_of(error).split())
                raise self._at_once(f"because the step could not end: {why}") from None
            if pending:
                if phase is None:
                    self._look()
                self._heed()
                self._complain()
        return ray.get(refs)

    def _look(self, wait: float = 0.0) -> None:
        """Take the trainer's answer if it comes in so many seconds, and ask it again."""
        if self.trainer is None:
            return
        if self._answer is not None:
            if not ray.wait([self._answer], timeout=wait)[0]:
                return
            with suppress(ray.exceptions.RayError):  # its call says more
                self.pace.at(Place(*ray.get(self._answer)))
        self._answer = self.trainer.place.remote()

    def _heed(self) -> None:
        """Pass the first signal on, and end the run if it must not wait for the end of the step."""
        signals, grace = self.signals, self.run.grace_seconds
        if signals.first is None:
            return
        if self.trainer is None:
            raise self._at_once("because OpenRLHF's asynchronous trainer cannot stop between two steps")
        if not self.pace.place.step:
            self._answer = self.trainer.place.remote()  # the last answer may be older than the signal
            self._look(ANSWER)
            if not self.pace.place.step:
                raise signals.ended(BEFORE)
        if signals.again:
            raise self._at_once("because a second signal came")
        if grace is not None and self._clock() - signals.since >= grace:
            raise self._at_once(f"because the step did not end within run.grace_seconds {grace:g}")
        if not self._is_stopping:
            self.trainer.stop.remote()
            self._is_stopping = True

    def _at_once(self, why: str) -> Ended:
        place = self.pace.place if self.trainer else "a step"
        return self.signals.ended(f"within {place}, {why}")

    def _complain(self) -> None:
        """Say once for each place that the run stalls there, and end it after the time limit."""
        pace, limit = self.pace, self.run.stall_timeout
        if self.trainer is None:
            return
        if limit is not None and pace.seconds >= limit:
            raise Ended("stalled", STALLED, f"stalled for run.stall_timeout {limit:g}: {self._stall()}")
        if pace.seconds >= pace.limit and self._warned_place != pace.place:
            self._warned_place = pace.place
            self._warn(pace.place.step, self._stall())

    def _stall(self) -> str:
        """What stalls: the step, the phase, the time, and the processes that give no answer."""
        calls = {
            name: process.answers.remote() if name.startswith(ENGINE) else process.__ray_call__.remote(home)
            for name, process in self.processes.items()
        }
        answered = ray.wait(list(calls.values()), num_returns=len(calls), timeout=ANSWER)[0]
        silent_names = [name for name, call in calls.items() if call not in answered]
        processes = [name + self._described(name) for name in silent_names] or self._stopped_raylets()
        whom = ", ".join(processes) or "no process, as all answer: look at rewards"
        return f"{self.pace.place}: nothing new for {self.pace.seconds:.0f} s. It waits for {whom}"

    def _stopped_raylets(self) -> list[str]:
        """Ray's own processes that are stopped, on the machines of the run. Its other processes answer without them."""
        calls = [process.__ray_call__.remote(stopped_raylet) for process in self.processes.values()]
        answered = ray.wait(calls, num_returns=len(calls), timeout=ANSWER)[0]
        return sorted({raylet for raylet in ray.get(answered) if raylet})

    def _described(self, name: str) -> str:
        """Where a process is, and whether it is stopped."""
        if name not in self._homes:
            return ""
        node, host, process = self._homes[name]
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        state = ray.remote(num_cpus=0)(is_stopped).options(scheduling_strategy=strategy).remote(process)
        stopped = False
        if ray.wait([state], timeout=2 * ANSWER)[0]:
            with suppress(ray.exceptions.RayError):
                stopped = ray.get(state)
        return f" (process {process} on {host}{', which is stopped' if stopped else ''})"


def home(_actor: Any = None) -> tuple[str, str, int]:
    """Where this process is: the id of Ray's node, the name of the machine, and the number of the process."""
    return ray.get_runtime_context().get_node_id(), socket.gethostname(), os.getpid()


def stopped_raylet(_actor: Any = None) -> str:
    """The process with which Ray manages this machine, if it is stopped; otherwise empty."""
    socket_name = os.fsencode(ray._private.worker._global_node.raylet_socket_name)
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_raylet = (entry / "comm").read_text() == "raylet\n" and socket_name in (entry / "cmdline").read_bytes()
            if is_raylet and is_stopped(int(entry.name)):
                return f"Ray's raylet (process {entry.name} on {socket.gethostname()}, which is stopped)"
    return ""


def is_stopped(process: int) -> bool:
    """Whether a process of this machine is stopped, as SIGSTOP does it."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
