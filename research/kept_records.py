"""The records of a study's runs that are kept in results/TRIAL/, and their way back into a worktree."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pandas as pd
from decision_stages import FAILED, stage_of, stages_of
from folders import RESULTS
from hard_prompts import AGAIN, SOLVED
from smollm2 import keep

from bapo_openrlhf.record.run_record import RUN, SUMMARY
from bapo_openrlhf.workbench.study.runner import RUNS

BASE = "base_solved.json"  # what the base model solves, asked again


def folder_of(trial: str) -> Path:
    """Where the records of a study are kept."""
    return RESULTS / trial


def keep_all(root: Path, trial: str = "decision") -> None:
    """Pack the records of all stages, and write which runs have failed, and what the base model solves.

    Args:
        root: The folder of the worktree in which the runs are.
    """
    lost, kept = [], folder_of(trial)
    for stage in stages_of(trial):
        if stage.place:
            continue  # the stage whose folder it is keeps them
        folder, last = stage.folder(root) / RUNS, SOLVED if stage.solved else SUMMARY
        if any(folder.glob(f"*/{last}")):
            keep(folder, kept / f"{stage.name}.tar.xz", last)  # what a model solves cannot be counted without it
        lost += [{"stage": stage.name, "run": path.parent.name} for path in sorted(folder.glob(f"*/{FAILED}"))]
    pd.DataFrame(lost, columns=["stage", "run"]).to_csv(kept / "failed.csv", index=False)
    if (base := root / AGAIN / SOLVED).is_file():
        shutil.copyfile(base, kept / BASE)


def unpack(root: Path, trial: str = "decision") -> None:
    """Put the kept records where their runs were, also those of the searches that its rates come from.

    Runs that are there already stay as they are.

    Args:
        root: The folder of a worktree.
    """
    searches = [stage_of(stage.rates_from) for stage in stages_of(trial) if stage.rates_from]
    for each in dict.fromkeys([trial, *(search.trial for search in searches)]):
        unpack_trial(root, each)


def unpack_trial(root: Path, trial: str) -> None:
    """Put the kept records of one study where its runs were."""
    kept = folder_of(trial)
    for stage in stages_of(trial):
        runs = stage.folder(root) / RUNS
        records = kept / f"{stage.name}.tar.xz"
        if records.is_file():
            with tarfile.open(records) as file:
                there = {path.parent.name for path in runs.glob(f"*/{SUMMARY}")}
                missing = [member for member in file.getmembers() if Path(member.name).parts[0] not in there]
                file.extractall(runs, missing, filter="data")
    for row in pd.read_csv(lost).itertuples() if (lost := kept / "failed.csv").is_file() else ():
        folder = stage_of(row.stage).folder(root) / RUNS / row.run
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FAILED).touch()
    if (base := kept / BASE).is_file():
        (root / AGAIN).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(base, root / AGAIN / SOLVED)


def newest_commit(trial: str = "decision") -> str | None:
    """The commit of the newest stage that has kept runs; None without any. The runs that it lacks come from it too.

    Raises:
        ValueError: It has runs of several.
    """
    for stage in reversed(stages_of(trial)):
        if (records := folder_of(trial) / f"{stage.name}.tar.xz").is_file():
            with tarfile.open(records) as file:
                files = [file.extractfile(name) for name in file.getnames() if Path(name).name == RUN]
                commits = {str(json.load(content)["commit"]) for content in files if content}
            if len(commits) > 1:
                raise ValueError(f"{records} has runs of {len(commits)} commits: {', '.join(sorted(commits))}")
            return commits.pop()
    return None
