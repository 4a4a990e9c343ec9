"""Runs the study of decision_design.md, fair_trial_design.md, critic_design.md or reuse_design.md, in a git worktree at
one commit with its own environment.

    python research/decision_runs.py prepare ../decision   # once: the worktree, its environment, and the model
    cd ../decision
    nohup .venv/bin/python research/decision_runs.py run > runs/decision.log 2>&1 &   # the same command continues
    .venv/bin/python research/decision_runs.py left        # what is left, with hours

With `--trial fair`, `--trial critic` or `--trial reuse` before these words it is one of the others. Other work may
land meanwhile, because nothing of it reaches the worktree. No arm mixes two commits or two environments: `run` refuses
that. If runs with the same seed are compared, they come from one kind of CPU. If such a seed has been begun on another
one, its other runs wait for that.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from decision_stages import (
    AVX2,
    FAILED,
    NotYet,
    Stage,
    ended,
    every_stage,
    planned,
    seconds_left,
    stage_of,
    stages_of,
    study_of,
)  # fmt: skip
from folders import RESULTS, ROOT
from hard_prompts import BASE_COUNTS, SOLVED, solved_by, write_never
from kept_records import newest_commit, unpack

from bapo_openrlhf.errors import ConfigError, RunError
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.record.owner import owned
from bapo_openrlhf.tasks import countdown, reasoning_gym
from bapo_openrlhf.workbench.prepare.build import Preparation
from bapo_openrlhf.workbench.prepare.build import prepare as prepare_data
from bapo_openrlhf.workbench.study.runner import Planned, on_terminal, require_same, run_all

MODEL = RESULTS / "map" / "steps_model.tar.xz"  # all runs begin with it
ONCE = "failed_once"  # file in the folder of a run that has ended with an error; it is tried once more
MOST_FAILURES = 3  # so many runs in a row that fail stop everything, because then the machine is the reason


# ── what may not be mixed ──


@dataclass(frozen=True)
class Origin:
    """What a run that is done comes from.

    Attributes:
        arm: Its name.
        commit, cpu: As in its run.json.
        versions: Versions of the packages, in one text.
    """

    arm: str
    seed: int
    commit: str
    cpu: str
    versions: str


def origin(metadata: Mapping[str, object], arm: str, seed: int) -> Origin:
    """What the content of a run.json says of it."""
    versions = metadata.get("versions") or {}
    assert isinstance(versions, Mapping)
    text = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return Origin(arm, seed, str(metadata.get("commit")), str(metadata.get("cpu")), text)


def mixtures(origins: Iterable[Origin], *, paired: bool = True) -> list[str]:
    """A sentence for each arm that mixes commits or environments.

    If runs with the same seed are compared, there is also one for each seed that mixes kinds of CPU.
    """
    origins, sentences = list(origins), []
    for group, names in (("arm", ("commit", "versions")), *([("seed", ("cpu",))] if paired else [])):
        by_group: dict[object, list[Origin]] = defaultdict(list)
        for one in origins:
            by_group[getattr(one, group)].append(one)
        for key, ones in by_group.items():
            for name in names:
                values = sorted({getattr(one, name) for one in ones})
                if len(values) > 1:
                    sentences.append(f"{group} {key} has runs of {len(values)} values of {name}: {'; '.join(values)}")
    return sentences


def origins_of(runs: Iterable[Planned]) -> list[Origin]:
    """What the runs that are done come from."""
    return [origin(record.read_run(run.folder), run.arm.name, run.seed) for run in runs if run.done]


def of_this_cpu(
    runs: Sequence[Planned], cpu: str | None, beside: Sequence[Planned] = ()
) -> tuple[list[Planned], list[Planned]]:
    """The runs that have not ended: those that may run on this kind of CPU, and those that wait for another one.

    Args:
        beside: Runs of another stage with which these are compared.
    """
    begun = {one.seed: one.cpu for one in origins_of([*runs, *beside])}
    left = [run for run in runs if not ended(run)]
    here = [run for run in left if begun.get(run.seed, str(cpu)) == str(cpu)]
    return here, [run for run in left if run not in here]


def require_unmixed(stage: Stage, runs: Sequence[Planned], now: Mapping[str, object]) -> None:
    """Raise ConfigError if the runs of a stage are mixed, or if those that are left would be.

    Args:
        now: `record.provenance()` of this process.
    """
    done = origins_of(runs)
    arms = {run.arm.name for run in runs if not ended(run)}
    coming = [origin({**now, "cpu": None}, arm, -1) for arm in arms if arm in {one.arm for one in done}]
    if sentences := mixtures([*done, *coming], paired=stage.paired):
        raise ConfigError(
            f"stage {stage.name}: {sentences[0]}; go back to the commit and environment of its first runs, or delete "
            f"the folders of these runs in {stage.folder(ROOT)}"
        )


# ── running ──


def require_clean(now: Mapping[str, object]) -> None:
    """Raise ConfigError unless the package is that of a commit."""
    commit = now["commit"]
    if commit is None or str(commit).endswith("-dirty"):
        raise ConfigError(f"the commit is {commit}; runs need a worktree without changes: `prepare` makes one")


def require_base() -> None:
    """Raise ConfigError if it is not fixed yet which problems the base model never solves."""
    if not BASE_COUNTS.is_file():
        raise ConfigError(
            f"{BASE_COUNTS} is missing; it is fixed before any run: python research/hard_prompts.py, then commit it"
        )


def words_of(command: Sequence[str]) -> list[str]:
    """A study's command with this environment's Python."""
    known = {"python": [sys.executable], "bapo-openrlhf": [sys.executable, "-m", "bapo_openrlhf.cli"]}
    return [word for part in command for word in known.get(part, [part])]


def unpack_model(root: Path) -> None:
    """Unpack the model that all runs begin with, unless it is there."""
    if not (root / "runs" / "steps_model").is_dir():
        with tarfile.open(MODEL) as file:
            file.extractall(root / "runs", filter="data")


def prepare_sums(root: Path) -> None:
    """Write the data of `python examples/quickstart --size steps`, without the model, which that would make anew."""
    task = reasoning_gym.task_of_kinds(None, root / "configs" / "steps" / "sums.yaml")
    [generator] = task.sizes or {}
    prompts = countdown.TASK.sizes["small"]["train"]  # as many as the quickstart
    prepare_data(
        task, Preparation(root / "runs" / task.name, generator=generator, style="question", limits={"train": prompts})
    )


def run_command(command: Sequence[str], root: Path) -> None:
    """Run a command in the project's folder, or raise RunError."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # for scripts
    try:
        subprocess.run(words_of(command), cwd=root, check=True, env={**os.environ, "PATH": folders})
    except (OSError, subprocess.CalledProcessError) as error:
        raise RunError(f"{' '.join(command)} failed: {error}") from error


def checked(runs: Sequence[Planned]) -> tuple[dict[str, int], int]:
    """Check each arm; return the trainer steps of each run by its name, and the most devices that a run takes.

    A run that was begun with other settings is a ConfigError.
    """
    from bapo_openrlhf.cli import arguments
    from bapo_openrlhf.flags.sizes import run_steps
    from bapo_openrlhf.launch.preflight import check_inputs
    from bapo_openrlhf.launch.settings import settings_of
    from bapo_openrlhf.launch.start import logical_gpus

    steps, settings, devices = {}, {}, 0
    for run in runs:
        if run.arm.name not in steps:
            args = arguments.parse(run.words, "bapo-openrlhf train")
            inputs = check_inputs(args)
            assert inputs.prompts is not None
            steps[run.arm.name] = run_steps(args, inputs.prompts, inputs.candidates)
            settings[run.arm.name] = settings_of(args, inputs.prompts)
            devices = max(devices, logical_gpus(args))
        require_same(run, settings[run.arm.name])
    return {run.name: steps[run.arm.name] for run in runs}, devices


def note_failure(run: Planned) -> None:
    """Note that a run has ended with an error. After the second time it counts as ended."""
    once = run.folder / ONCE
    (run.folder / FAILED if once.exists() else once).touch()


def run_stage(stage: Stage, runs: Sequence[Planned], here: Sequence[Planned], root: Path, until: float | None) -> bool:
    """Run some of the runs of a stage, `Stage.parallel` at a time. Returns whether there was time for all of them."""
    from bapo_openrlhf.launch.start import shared_ray

    steps, devices = checked(runs)
    failures = 0

    with (
        shared_ray(stage.parallel * devices, stage.parallel) as environment,
        on_terminal(stage.name, steps, runs) as seen,
    ):

        def after(running: Sequence[Planned], over: Sequence[Planned]) -> None:
            """Show how far the runs are; note those that have failed, and count what the models of the others solve."""
            nonlocal failures
            seen(running, over)
            for run in over:
                failures = 0 if run.done else failures + 1
                if not run.done:
                    note_failure(run)
                elif stage.solved:
                    count_solved([run], root)
                if failures == MOST_FAILURES:
                    raise RunError(
                        f"{failures} runs in a row have failed, the last one is {run.folder}; see its output.log"
                    )

        return not run_all(here, parallel=stage.parallel, environment=environment, until=until, callback=after).left


def count_solved(runs: Iterable[Planned], root: Path) -> None:
    """Count what the trained models of runs that are done solve. A run that cannot be counted stays uncounted."""
    for run in runs:
        try:
            solved_by(run.folder, root)
        except RunError as error:
            print(f"{run.name} is not counted: {error}", file=sys.stderr)


def run(root: Path, hours: float | None, trial: str = "decision") -> int:
    """Run the stages of a study one after the other. Returns 0 if nothing is left."""
    now = record.provenance()
    require_clean(now)
    require_base()
    unpack_model(root)
    until = None if hours is None else time.monotonic() + 3600 * hours
    for stage in stages_of(trial):
        prepared, waiting = False, []
        while True:
            try:
                runs = planned(stage, root)
            except NotYet as error:
                print(f"{error}; stage {stage.name} has to wait for it")
                return 1
            except RunError as error:
                print(f"stage {stage.name} is left out: {error}")
                break
            require_unmixed(stage, runs, now)
            beside = planned(stage_of(stage.beside), root) if stage.beside else ()
            here, waiting = [run for run in runs if not ended(run)], []
            if stage.paired:
                here, waiting = of_this_cpu(runs, now["cpu"], beside)
            uncounted = [run for run in runs if stage.solved and run.done and not (run.folder / SOLVED).is_file()]
            if (here or uncounted) and not prepared:
                prepare_stage(stage, root)
                prepared = True
                count_solved(uncounted, root)
            if not here:
                break
            print(left(root, trial), flush=True)
            if not run_stage(stage, runs, here, root, until):
                return 1
        if waiting:
            print(f"stage {stage.name}: {', '.join(one.name for one in waiting)} wait for the CPU of their seeds")
    print(left(root, trial))
    return 0


def prepare_stage(stage: Stage, root: Path) -> None:
    """Run the commands that a stage's study names, and write the problems that its base model never solves."""
    for command in study_of(stage, root).prepare:
        run_command(command, root)
    if stage.solved:
        write_never(root)


# ── what is left ──


def left(root: Path, trial: str = "decision") -> str:
    """A table of the stages of a study: runs that are left, and their hours.

    The hours of runs whose kind has been measured are those of the machine that made them. The others of the first
    study are those of a machine with AMX, and its last column has those of one with AVX2.
    """
    rows = []
    for stage in stages_of(trial):
        runs, seconds = seconds_left(stage, root)
        rows.append({"stage": stage.name, "part": stage.part, "runs left": runs, "hours": seconds / 3600})
    table = pd.DataFrame(rows).astype({"part": object, "runs left": float})
    table.loc[len(table)] = {"stage": "all", "part": "", **table[["runs left", "hours"]].sum()}
    if trial == "decision":
        table["hours with AVX2"] = table["hours"] * AVX2
    return table.astype({"runs left": int}).round(1).to_markdown(index=False)


# ── a worktree ──


def prepare(place: Path, commit: str, trial: str = "decision") -> None:
    """Make a worktree at a commit, with an environment of its own, the model and the kept records.

    What is there already stays. So runs go on in another worktree, also on another machine.
    """
    place = place.resolve()
    if not (place / ".git").exists():
        subprocess.run(["git", "worktree", "add", "--detach", str(place), commit], cwd=ROOT, check=True)
    subprocess.run(["make", f"PYTHON={sys.executable}", ".venv/.installed"], cwd=place, check=True)
    unpack_model(place)
    unpack(place, trial)
    command = f".venv/bin/python research/decision_runs.py --trial {trial} run"
    print(f"now: cd {place} && nohup {command} > runs/{trial}.log 2>&1 &")


@contextmanager
def ending_in_order() -> Iterator[None]:
    """SIGTERM ends this process so that it ends its runs."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare, run, or say what is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    trials = dict.fromkeys(stage.trial for stage in every_stage())
    parser.add_argument("--trial", choices=trials, default="decision", help="the study")
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("prepare", help="make a worktree with an environment of its own")
    making.add_argument("place", type=Path, help="its folder")
    making.add_argument("--commit", help="its commit (default: that of the newest kept runs, or HEAD without any)")
    running = commands.add_parser("run", help="run what is left")
    running.add_argument("--max-hours", type=float, metavar="H", help="start no further run after H hours")
    commands.add_parser("data", help="write the sums that all runs need; `run` does it")
    commands.add_parser("left", help="say what is left, with hours")
    given = parser.parse_args(argv)
    if given.command == "prepare":
        prepare(given.place, given.commit or newest_commit(given.trial) or "HEAD", given.trial)
        return 0
    if given.command == "data":
        prepare_sums(ROOT)
        return 0
    if given.command == "left":
        print(left(ROOT, given.trial))
        return 0
    os.chdir(ROOT)  # flags name files from here
    folder = ROOT / "runs" / "studies" / given.trial
    try:
        with ending_in_order(), owned(folder, field="the study's folder is taken", what="study", instead="stop it"):
            return run(ROOT, given.max_hours, given.trial)
    except (ConfigError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
