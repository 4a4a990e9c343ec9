"""The tasks. Each is one file with its published data, its prompts and its reward function."""

import hashlib
import importlib
from pathlib import Path

from bapo_openrlhf import user_file
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.tasks.task import Task

TASKS = ("math", "countdown", "geometry", "gsm8k", "reasoning_gym")


def get_task(name: str) -> Task:
    """The task with a name, or the TASK of a Python file; a ConfigError if there is none."""
    if name.endswith(".py"):
        module = user_file.load("task", Path(name))
        if not hasattr(module, "TASK"):
            raise ConfigError(f"task is {Path(name)}; the file must define a TASK")
        return module.TASK
    if name not in TASKS:
        raise ConfigError(f"task is {name!r}; it must be one of {', '.join(TASKS)}, or a .py file with a TASK")
    return importlib.import_module(f"bapo_openrlhf.tasks.{name}").TASK


def task_of_file(file: str) -> Task | None:
    """The built-in task whose reward file this is. None: it is another file."""
    path = user_file.at_home(file).resolve()
    name = path.stem if path.parent == Path(__file__).resolve().parent else ""
    return get_task(name) if name in TASKS else None


def judge_digest(file: Path) -> str:
    """The sha256 of what judges: a reward file, or all of this project's, because they import each other."""
    home, digest = Path(__file__).resolve().parent, hashlib.sha256()
    for one in sorted(home.glob("*.py")) if file.resolve().parent == home else [file]:
        digest.update(one.read_bytes())
    return digest.hexdigest()


def task_of(benchmark: str, data: Path) -> Task:
    """The task of a benchmark, which may be one that `prepare` wrote to the folder `data`, or a ConfigError."""
    tasks = [get_task(name) for name in TASKS]
    for task in tasks:
        prepared = task.configure is not None and (data / task.name / f"{benchmark}.jsonl").is_file()
        if prepared or benchmark in task.benchmarks:
            return task
    names = ", ".join(name for task in tasks for name in task.benchmarks)
    raise ConfigError(
        f"benchmark is {benchmark!r}; it must be one of {names}, one that `bapo-openrlhf prepare reasoning_gym` wrote "
        f"to {data}, or NAME=FILE with --reward FILE.py"
    )
