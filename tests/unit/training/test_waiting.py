"""How the driver waits for a run, with Ray's answers and the time as the test sets them."""

import os
import re
import shutil
import signal
import subprocess
from types import SimpleNamespace

import pytest
import ray

from bapo_openrlhf.errors import Ended
from bapo_openrlhf.flags.config import RunConfig
from bapo_openrlhf.training.driver import waiting
from bapo_openrlhf.training.driver.signals import Signals

NUMBERS = {"trainer": 10, "actor rank 0": 20, "actor rank 1": 21, "rollout engine 0": 30}  # of the processes


class Ref:
    """Ray's reference to an answer, which comes at a time."""

    def __init__(self, value=None, *, at: float = 0.0, error: Exception | None = None) -> None:
        self.value, self.at, self.error = value, at, error


class Driver:
    """A driver that waits. Its trainer says at each time where it is, and some of its workers answer late."""

    def __init__(self, monkeypatch, **flags) -> None:
        self.now, self.told, self.said, self.events = 0.0, [], [], []
        self.place, self.late, self.stopped, self.raylet = (0, "starting"), set(), set(), ""
        clock = lambda: self.now  # noqa: E731
        self.signals = Signals(clock)
        self.signals.waits = True
        self.processes = {name: self.process(name) for name in NUMBERS}
        handles = {"trainer": self.processes["trainer"], "processes": self.processes}
        self.waiting = waiting.Waiting(
            RunConfig(**flags), signals=self.signals, warn=lambda *said: self.said.append(said), clock=clock, **handles
        )
        monkeypatch.setattr(ray, "wait", self.wait)
        monkeypatch.setattr(ray, "get", self.get)
        monkeypatch.setattr(ray, "remote", lambda **_: lambda function: SimpleNamespace(
            options=lambda scheduling_strategy: SimpleNamespace(remote=lambda process: Ref(process in self.stopped))
        ))  # fmt: skip

    def process(self, name):
        number = NUMBERS[name]

        def answer(*_, late=True):
            home = 28 * "ab", "host", number
            return Ref(home, at=float("inf") if late and name in self.late else self.now)

        def call(function):  # an engine answers calls although vLLM's process does not
            if function is waiting.stopped_raylet:
                return Ref(self.raylet)
            return answer(late=not name.startswith("rollout"))

        return SimpleNamespace(
            place=SimpleNamespace(remote=lambda: Ref(self.place, at=answer().at)),
            stop=SimpleNamespace(remote=lambda: self.told.append(self.now)),
            answers=SimpleNamespace(remote=answer),
            **{"__ray_call__": SimpleNamespace(remote=call)},
        )

    def at(self, seconds, function, *args):
        self.events.append((seconds, lambda: function(*args)))

    def goes(self, seconds, step, phase):
        """The trainer is somewhere else from then on."""
        self.at(seconds, lambda: setattr(self, "place", (step, phase)))

    def wait(self, refs, *, num_returns=1, timeout=None):
        """Let time pass until enough references have their answers."""
        end = self.now + timeout
        while sum(ref.at <= self.now for ref in refs) < num_returns and self.now < end:
            self.now = min(self.now + 0.25, end)
            due = [event for event in self.events if event[0] <= self.now]
            self.events = [event for event in self.events if event not in due]
            for _, function in due:
                function()
        return [ref for ref in refs if ref.at <= self.now], [ref for ref in refs if ref.at > self.now]

    def get(self, refs):
        if isinstance(refs, list):
            return [self.get(ref) for ref in refs]
        assert refs.at <= self.now, "the driver would wait without looking"
        if refs.error:
            raise refs.error
        return refs.value


@pytest.fixture
def driver(monkeypatch):
    """Makes a driver with these flags of the run."""
    return lambda **flags: Driver(monkeypatch, **flags)


def error_of(run, refs, **given):
    with pytest.raises(Ended) as caught:
        run.waiting.get(refs, **given)
    return caught.value


class TestWithoutASignal:
    def test_it_returns_what_the_calls_return(self, driver):
        run = driver()
        assert run.waiting.get([Ref("a", at=3), Ref("b", at=700)]) == ["a", "b"]
        assert run.waiting.get([]) == [] and run.told == []

    def test_the_first_end_is_raised_at_once(self, driver):
        run = driver()
        with pytest.raises(ray.exceptions.RayActorError):
            run.waiting.get([Ref(at=9000), Ref(at=2, error=ray.exceptions.RayActorError())])
        assert run.now < 4


class TestASignal:
    @pytest.mark.parametrize(("since", "step"), [(1, 2), (4.75, 1)])  # also if the first step has just begun
    def test_is_passed_on_to_the_trainer_once(self, driver, since, step):
        run = driver()
        run.goes(since, step, "training")
        run.at(5, run.signals, signal.SIGTERM)
        assert run.waiting.get([Ref(3, at=40)]) == [3]
        assert len(run.told) == 1 and 5 <= run.told[0] < 5 + 2 * waiting.LOOK

    @pytest.mark.parametrize(("place", "flags", "second", "told", "end", "when"), [
        ((0, "starting"), {}, None, 0, 5, "before the first step"),
        ((0, "evaluating"), {}, None, 0, 5, "before the first step"),
        ((2, "training"), {}, 8, 1, 8, "within step 2, training, because a second signal came"),
        ((2, "training"), {"grace_seconds": 0}, None, 0, 5, "because the step .* within run.grace_seconds 0"),
        ((2, "training"), {"grace_seconds": 30}, None, 1, 35, "because the step .* within run.grace_seconds 30"),
    ])  # fmt: skip
    def test_ends_the_run(self, driver, place, flags, second, told, end, when):
        run = driver(**flags)
        run.goes(1, *place)
        run.at(5, run.signals, signal.SIGUSR1)
        if second:
            run.at(second, run.signals, signal.SIGTERM)
        error = error_of(run, [Ref(at=9000)])
        assert error.code == 128 + signal.SIGUSR1 and re.fullmatch(f"stopped by SIGUSR1 (.*, )?{when}", error.text)
        assert end <= run.now < end + 2 * waiting.LOOK and len(run.told) == told

    def test_that_all_processes_got_leaves_no_step_to_end(self, driver):
        run = driver()
        run.goes(1, 2, "training")
        run.at(5, run.signals, signal.SIGTERM)
        error = error_of(run, [Ref(at=7, error=ray.exceptions.RayActorError())])
        assert (error.how, error.code) == ("stopped", 143) and "\n" not in error.text
        assert "because the step could not end: RayActorError: " in error.text

    def test_ends_a_run_whose_trainer_cannot_say_where_it_is(self, driver):
        """OpenRLHF's asynchronous one. No stall is looked for either."""
        run = driver()
        run.waiting.trainer = None
        run.at(2000, run.signals, signal.SIGTERM)
        assert error_of(run, [Ref(at=9000)]).text.startswith("stopped by SIGTERM within a step, because OpenRLHF's ")
        assert run.said == []


class TestAStall:
    def steps(self, run, seconds, count=4):
        """Steps of so many seconds, of two phases each. Returns when the last of them is over."""
        for number in range(count):
            run.goes(seconds * number, number + 1, "generating")
            run.goes(seconds * (number + 0.5), number + 1, "training")
        return seconds * count

    @pytest.mark.parametrize(("seconds", "limit"), [(4, 60), (100, 300)])
    def test_is_said_once_by_the_runs_own_steps(self, driver, seconds, limit):
        run = driver()
        end = self.steps(run, seconds)
        since = end - seconds / 2
        run.at(since, run.late.update, ["actor rank 0", "actor rank 1"])
        run.stopped.add(NUMBERS["actor rank 1"])
        run.waiting.note_homes()
        run.waiting.get([Ref(at=end + 5000)])
        ((step, text),) = run.said
        assert step == 4 and text.startswith("step 4, training: nothing new for ")
        assert text.endswith(
            " s. It waits for actor rank 0 (process 20 on host), actor rank 1 (process 21 on host, which is stopped)"
        )
        waited = float(text.split("nothing new for ")[1].split(" ")[0])
        assert limit <= waited <= 1.05 * limit + waiting.ANSWER + 3

    def test_is_not_a_phase_that_takes_as_long_as_a_step(self, driver):
        run = driver()
        end = self.steps(run, 100)
        run.goes(end, 5, "generating")  # a short one
        run.goes(end + 10, 6, "generating")
        run.goes(end + 260, 6, "training")
        run.waiting.get([Ref(at=end + 500)])
        assert run.said == []

    @pytest.mark.parametrize("first", [1, 13])
    def test_in_the_first_step_takes_ten_minutes(self, driver, first):
        """Also in the first one after a resume, before which the engines get the weights."""
        run = driver()
        run.goes(0, 0, "resuming")
        run.goes(0.5, 0, "syncing weights")
        run.goes(1, first, "generating")
        run.waiting.get([Ref(at=590)])
        assert run.said == []
        run.waiting.get([Ref(at=700)])
        ((_, text),) = run.said
        assert text.endswith(" s. It waits for no process, as all answer: look at rewards")

    def test_of_ray_itself(self, driver):
        """All processes of the run answer, because Ray's own one is only asked for new ones."""
        run = driver()
        run.goes(1, 1, "generating")
        run.raylet = "Ray's raylet (process 7 on host, which is stopped)"
        run.waiting.get([Ref(at=700)])
        ((_, text),) = run.said
        assert text.endswith(f" s. It waits for {run.raylet}")

    @pytest.mark.parametrize("who", ["trainer", "rollout engine 0"])
    def test_of_a_process_that_does_not_answer(self, driver, who):
        run = driver()
        end = self.steps(run, 4)
        run.at(end, run.late.add, who)
        run.waiting.note_homes()
        run.waiting.get([Ref(at=end + 100)])
        ((_, text),) = run.said
        assert text.endswith(f"It waits for {who} (process {NUMBERS[who]} on host)")

    def test_while_models_load(self, driver):
        run = driver()
        run.late.add("actor rank 1")
        run.waiting.get([Ref(at=700)], waiting.LOADING)
        ((_, text),) = run.said
        assert text.startswith(f"before the first step, {waiting.LOADING}: ")
        assert text.endswith("It waits for actor rank 1")

    def test_ends_the_run_after_the_timeout(self, driver):
        run = driver(stall_timeout=20.0)
        end = self.steps(run, 4)
        run.at(end, run.late.add, "actor rank 1")
        error = error_of(run, [Ref(at=9000)])
        assert (error.how, error.code, run.said) == ("stalled", 75, [])
        assert error.text.startswith("stalled for run.stall_timeout 20: step 4, training: nothing new for 2")
        assert error.text.endswith("It waits for actor rank 1")
        assert end + 18 <= run.now < end + 30


def test_a_raylet_that_is_stopped(monkeypatch, tmp_path):
    """A process of its name that belongs to another Ray does not count."""
    node = SimpleNamespace(raylet_socket_name="/tmp/ray/mine/sockets/raylet")
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    (tmp_path / "raylet").symlink_to(shutil.which("bash"))
    names = ["/tmp/ray/other/sockets/raylet", node.raylet_socket_name]
    started = [subprocess.Popen([tmp_path / "raylet", "-c", "read", name], stdin=subprocess.PIPE) for name in names]
    try:
        for process, says in zip(started, ("", f"(process {started[1].pid} on "), strict=True):
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            said = waiting.stopped_raylet()
            assert bool(said) == bool(says) and says in said
    finally:
        for process in started:
            process.kill()
            process.communicate()
