"""A smoke run: the checks, the small model, a run that is killed after a checkpoint, and one that resumes it.

Its folder DIR/smoke/NAME has config.yaml (the whole configuration, which `train` takes as it is), reward.py, the
output of both runs, and their record in run/.
"""

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml  # type: ignore[import-untyped]

from bapo_openrlhf import machine
from bapo_openrlhf.adapt.rewards import UNIT
from bapo_openrlhf.adapt.shift import USUAL_KL
from bapo_openrlhf.adapt.vocabulary import FAILED, STATES
from bapo_openrlhf.errors import ConfigError, RunError
from bapo_openrlhf.flags.sizes import batch_arithmetic
from bapo_openrlhf.launch.preflight import check_inputs
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.record.checkpoint_store import CheckpointStore, step_of
from bapo_openrlhf.record.outcome import UNTRAINED
from bapo_openrlhf.record.owner import LOCK
from bapo_openrlhf.workbench.pages.text import duration
from bapo_openrlhf.workbench.smoke import reduce
from bapo_openrlhf.workbench.smoke.reward import write_reward
from bapo_openrlhf.workbench.study.runner import TRAIN, require_steps

CONFIG, RUN = "config.yaml", "run"
LOSSES = ("policy_loss", "critic_loss", "actor_grad_norm", "critic_grad_norm")
LARGE = ("model1", "model2", "model3", "checkpoints", "saved", "saved_critic")  # folders that a verdict needs no more

MARK = "BAPO_OPENRLHF_SMOKE"  # in the environment of each process of a smoke run
PATIENCE = 900.0  # seconds after which a stage hangs
# Ray's services, which hold no model. Some wait a minute for a server that was killed.
SERVICES = (b"/ray/dashboard/", b"/runtime_env/agent/", b"Agent", b"monitor.py")

Row = Mapping[str, Any]


# ── stages and processes ──


def processes(mark: str) -> Iterator[Path]:
    """The folders in /proc of the processes of a run."""
    variable = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended, or it is another user's
                if variable in (folder / "environ").read_bytes().split(b"\0"):
                    yield folder


def survivors(mark: str) -> list[str]:
    """Command lines of the processes of a run that hold a model."""
    commands = []
    for folder in processes(mark):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if command and not any(service in command for service in SERVICES):
                commands.append(command.replace(b"\0", b" ").decode(errors="replace").strip())
    return commands


@dataclass
class Stages:
    """The stages of a smoke run. Each is said as soon as it has ended."""

    mark: str  # of the processes of the run
    say: Callable[[str], None]  # prints a line
    show: Callable[[str], None]  # says on a terminal what goes on now
    now: str = "checks"

    def begin(self, name: str) -> None:
        self.now = name
        self.show(name)

    def ended(self, begun: float, at: float) -> None:
        """Say that the stage has ended; its first and its last moment are `time.time()`."""
        self.say(f"  {self.now:<14}{duration(at - begun):>8}")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage that lasts as long as the block."""
        self.begin(name)
        begun = time.time()
        yield
        self.ended(begun, time.time())

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """End all processes of the run after the block."""
        try:
            yield
        finally:
            for _ in range(50):  # a process may start another one before it ends
                folders = list(processes(self.mark))
                for folder in folders:
                    with suppress(ProcessLookupError):
                        os.kill(int(folder.name), signal.SIGKILL)
                if not folders:
                    break
                time.sleep(0.1)

    def wait(self, until: Callable[[], bool], process: subprocess.Popen | None = None) -> None:
        """Wait until something has happened; a RunError if the process has ended before, or it takes too long."""
        begun = time.monotonic()
        while not until():
            if process is not None and process.poll() is not None and not until():
                raise RunError(f"the run ended with status {process.returncode}")
            if time.monotonic() - begun > PATIENCE:
                raise RunError(f"nothing happened for {duration(PATIENCE)}")
            time.sleep(0.2)


# ── the run ──


@dataclass
class Smoke:
    """One smoke run. `defaults` has every flag of `train` with its default."""

    args: SimpleNamespace
    defaults: Mapping[str, Any]
    stages: Stages
    _log: Path | None = None  # output of the last run

    @property
    def folder(self) -> Path:
        return Path(self.args.run.dir).resolve() / "smoke" / self.args.run.name

    def passes(self) -> bool:
        """Do all of it, say the verdict, and return whether it is good."""
        say, begun = self.stages.say, time.time()
        try:
            with self.stages.guarded():
                claims = self._claims()
        except (ConfigError, RunError) as error:
            say(f"failed in {self.stages.now}: {error}{self._last_words()}")
            return False
        for claim, wrong in claims:
            say(f"  {'NO' if wrong else 'yes'} {claim}{': ' if wrong else ''}{wrong}")
        good = not any(wrong for _, wrong in claims)
        seconds = duration(time.time() - begun)
        if good:
            for name in LARGE:
                shutil.rmtree(self.folder / name, ignore_errors=True)
            say(f"passed in {seconds}: this configuration starts, trains, saves, survives a kill and resumes here")
            say("not shown: the memory of the whole model (`bapo-openrlhf plan` predicts it), its speed, "
                "that it learns, and what the changed flags would do")  # fmt: skip
        else:
            say(f"failed after {seconds}; the record and the output are in {self.folder}")
        return good

    def _claims(self) -> list[tuple[str, str]]:
        args, stages = self.args, self.stages
        with stages.stage("checks"):
            on_cpu = machine.on_cpu()
            require_steps(args)
            checked = check_inputs(args, weights=False)
            changes = reduce.reductions(args, cpu=on_cpu, candidates=checked.candidates)
            if not on_cpu and not os.environ.get("RAY_ADDRESS"):
                import torch

                gpus, devices = reduce.gpus_needed(args, changes), torch.cuda.device_count()
                if gpus > devices:
                    raise RunError(f"the configuration takes {gpus} GPUs of a machine; this one has {devices}")
            self._empty_folder()
        with stages.stage("small model"):
            names, sizes = self._small_models(on_cpu)
        changes += [*sizes, *self._rewards()]
        stages.say("changed for this run:")
        for change in changes:
            stages.say(f"  {change.name}: {change.value} -> {change.replacement} ({change.reason})")
        flags = {change.name: change.replacement for change in changes if change.name in self.defaults}
        config = reduce.settings(args, self.defaults, flags | names | self._places())
        (self.folder / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")

        process, begun = self._start("first")
        self._follow(process, begun, range(1, reduce.STEPS + 1))
        with stages.stage("save"):
            stages.wait(lambda: self._saved() >= reduce.STEPS, process)
        with stages.stage("kill"):
            process.send_signal(signal.SIGKILL)
            process.wait()
            stages.wait(lambda: not survivors(stages.mark))
        last = self._saved() + 1
        before = self._row(last)  # the workers of a killed run may have come so far
        process, begun = self._start("resumed", "--ckpt.load_enable", f"--train.num_episodes={last}")
        self._follow(process, begun, [last], before)
        with stages.stage("end"):
            stages.wait(lambda: process.poll() in (0, UNTRAINED), process)
        return list(findings(args, self.folder / RUN, last, (self.folder / "model1", self.folder / "saved")))

    def _empty_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / CONFIG).exists() and any(path.name != LOCK for path in self.folder.iterdir()):
            raise ConfigError(f"the folder {self.folder} holds no smoke run; delete it, or give another --run.name")
        record.empty_folder(self.folder)
        (self.folder / CONFIG).touch()

    def _small_models(self, on_cpu: bool) -> tuple[dict[str, str], list[reduce.Reduction]]:
        """Make each model of the run small. Returns the flags that name the new ones, and the sizes that changed."""
        given = {role: getattr(self.args, role).model_name_or_path for role in ("actor", "critic", "reward")}
        names = {role: name for role, name in given.items() if name}
        sources = {name: reduce.source_folder(f"{role}.model_name_or_path", name) for role, name in names.items()}
        kinds = {role: (name, role == "reward") for role, name in names.items()}  # a reward model has another head
        different = dict.fromkeys(kinds.values())
        folders = {kind: self.folder / f"model{number}" for number, kind in enumerate(different, 1)}
        changes = []
        for (name, scores), folder in folders.items():
            changes += [reduce.Reduction("weights", name, "random", "two layers have no others")]
            changes += reduce.make_small_model(name, sources[name], folder, cpu=on_cpu, scores=scores)
        return {f"{role}.model_name_or_path": str(folders[kind]) for role, kind in kinds.items()}, changes

    def _rewards(self) -> list[reduce.Reduction]:
        """Write the reward file. An agent and a reward model keep their own rewards."""
        args = self.args
        if not args.reward.remote_url or args.train.agent_func_path:
            return []
        (source, *_), path = args.reward.remote_url, self.folder / "reward.py"
        low, high = args.adapt.rewards() or UNIT
        is_file = source.endswith(".py")
        write_reward(path, source if is_file else None, float(low), float(high))
        judge = "the true function is called, too" if is_file else "the server was asked in the checks"
        reason = f"a hash of the response is the reward: a random model solves nothing; {judge}"
        return [reduce.Reduction("reward.remote_url", source, str(path), reason)]

    def _places(self) -> dict[str, str]:
        folder, args = self.folder, self.args
        places = {"run.dir": folder, "run.name": RUN, "run.logs": "full"}
        places |= {"ckpt.path": folder / "checkpoints", "ckpt.output_dir": folder / "saved"}
        places |= {"logger.tensorboard_dir": folder / "tensorboard"} if args.logger.tensorboard_dir else {}
        return {name: str(place) for name, place in places.items()}

    def _start(self, log: str, *words: str) -> tuple[subprocess.Popen, float]:
        self.stages.begin("start" if log == "first" else "resume")
        self._log = self.folder / f"{log}.log"
        command = [sys.executable, *TRAIN, "--config", str(self.folder / CONFIG), *words]
        with self._log.open("wb") as output:
            return subprocess.Popen(
                command,
                env=os.environ | {MARK: self.stages.mark, **machine.ALONE},  # they fork from a process of their own
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ), time.time()

    def _last_words(self) -> str:
        if self._log is None:
            return ""
        lines = [line for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        return "".join(f"; {line}" for line in (errors or lines)[-1:]) + f"; its output is in {self._log}"

    def _follow(
        self, process: subprocess.Popen, begun: float, steps: Sequence[int], before: Mapping[str, Any] | None = None
    ) -> None:
        """Say the start and each step of a run as soon as its row is in the record, and is another one than before."""
        for step in steps:
            self.stages.wait(lambda step=step: self._row(step) not in (None, before), process)
            row, now = self._row(step) or {}, time.time()
            seconds = row.get("timing/step_total") or 0.0
            if step == steps[0]:
                self.stages.ended(begun, now - seconds)
            self.stages.begin(f"step {step}")
            self.stages.ended(now - seconds, now)

    def _row(self, step: int) -> dict[str, Any] | None:
        return next((row for row in record.read_metrics(self.folder / RUN) if row["step"] == step), None)

    def _saved(self) -> int:
        store = CheckpointStore(self.folder / "checkpoints", critic=bool(self.args.critic.model_name_or_path))
        tags = []
        if self.args.adapt.enabled:
            tags = [store.newest_whole(lambda _: None) or "global_step0"]
        for model in store.models:
            with suppress(OSError):
                tags.append((store.path / model / "latest").read_text().strip())
        return min(map(step_of, tags), default=0)


# ── what the record shows ──


def findings(args: SimpleNamespace, folder: Path, last: int, weights: tuple[Path, Path]) -> Iterator[tuple[str, str]]:
    """Each claim about a run to step `last`, and what contradicts it, or "". `weights` are those before and after."""
    rows = record.read_metrics(folder)
    steps = [row["step"] for row in rows]
    wrong = "" if steps == list(range(1, last + 1)) else f"its steps are {steps}, not 1 to {last}"
    yield f"the killed run was resumed after step {last - 1} and ended after step {last}", wrong
    if args.adapt.enabled:
        sizes = _sizes(args)
        yield "every generated group is counted in one state", _first(rows, lambda row: _uncounted(row, sizes))
        yield (
            "the reward function judged every response",
            _first(rows, lambda row: f"{row[f'groups/{FAILED}']} groups failed" if row[f"groups/{FAILED}"] else ""),
        )
    yield "losses and gradients are finite", _first(rows, _not_finite)
    if not args.train.agent_func_path:  # an agent's own rewards may be 0 for all that a random model does
        trained = any(row.get("actor_grad_norm") for row in rows)
        yield "there are gradients", "" if trained else "no step had a gradient above 0"
        yield "the saved weights are not the first ones", "" if changed_weights(*weights) else "all are as before"
    compared = [row for row in rows if row.get("gap/kl") is not None and not row.get("gap/age")]  # of today's weights
    if args.adapt.enabled and compared:
        when = "" if compared[-1]["step"] == last else " before the kill"
        yield f"actor and engines agree on log-probs after each weight sync{when}", _first(compared, _disagreement)


def _first(rows: Sequence[Row], wrong: Callable[[Row], str]) -> str:
    return next((f"step {row['step']}: {text}" for row in rows if (text := wrong(row))), "")


def _sizes(args: SimpleNamespace) -> range:
    """How many responses a group may have: G, or fewer with a method that asks for them little by little."""
    size = args.rollout.n_samples_per_prompt
    few = args.adapt.make_method(batch_arithmetic(args), args.train.seed).first_responses
    return range(few or size, size + 1)


def _uncounted(row: Row, sizes: range) -> str:
    counted = sum(row.get(f"groups/{state}", 0) for state in (*STATES, FAILED))
    generated = row["groups/generated"]
    if counted == generated and generated * sizes[0] <= row["rollouts/step"] <= generated * sizes[-1]:
        return ""
    return f"{counted} groups are counted, {generated} were generated with {row['rollouts/step']} responses"


def _not_finite(row: Row) -> str:
    bad = [name for name in LOSSES if name in row and not (row[name] is not None and math.isfinite(row[name]))]
    return f"{bad[0]} is not a finite number" if bad else ""


def _disagreement(row: Row) -> str:
    kl = row["gap/kl"]
    return "" if kl <= USUAL_KL else f"their KL divergence is {kl:.2g} a token, and rounding explains {USUAL_KL:g}"


def changed_weights(before: Path, after: Path) -> bool:
    """Whether any tensor of a saved model, or of its adapter, is another one than in the model before."""
    old, new = tensors_of(before), tensors_of(after)
    return any(
        bool((tensor != old[name]).any()) if name in old else "lora_B" in name and bool(tensor.any())
        for name, tensor in new.items()
    )


def tensors_of(folder: Path) -> dict[str, Any]:
    """The tensors of a saved model, or of its adapter. OpenRLHF writes an adapter with torch under ZeRO-3."""
    import torch
    from safetensors.torch import load_file

    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in folder.glob("adapter_model.bin"):
        tensors |= torch.load(file, map_location="cpu", weights_only=True)
    return tensors
