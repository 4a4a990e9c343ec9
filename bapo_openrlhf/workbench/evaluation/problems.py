"""The problems of a benchmark, read from its file."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo_openrlhf.adapt.rewards import UNIT, Range
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.tasks import task_of
from bapo_openrlhf.workbench.evaluation import paper
from bapo_openrlhf.workbench.prepare.build import MANIFEST

_NAME = re.compile(r"[\w-][\w.-]*")


@dataclass(frozen=True)
class BenchmarkProblem:
    """One problem of a benchmark.

    Attributes:
        id: Unique within the benchmark.
        input: The text of the prompt without chat markup.
        label: What the judge compares a response with.
        images: Paths in the order of the <image> tags in `input`.
    """

    id: str
    input: str
    label: Any
    images: tuple[str, ...] = ()


@dataclass(frozen=True)
class Benchmark:
    """Problems and the file that judges them.

    Attributes:
        name: Name on the command line.
        title: Name in the tables.
        file: The file of the problems.
        sha256: Digest of that file.
        reward: The file with `reward_func`.
        problems: The first problems of the file, up to the limit.
        size: Number of problems in the file.
        generator: The generator that made the problems. None means that they are published.
        reward_range: The least and the greatest reward that the file gives.
    """

    name: str
    title: str
    file: Path
    sha256: str
    reward: Path
    problems: tuple[BenchmarkProblem, ...]
    size: int
    generator: str | None = None
    reward_range: Range = UNIT


def load(spec: str, data: Path, reward: Path | None, limit: int | None, reward_range: Range = UNIT) -> Benchmark:
    """The benchmark that a word of the command line names.

    Args:
        spec: Name of a task's benchmark, or NAME=FILE.jsonl.
        data: The folder that `bapo-openrlhf prepare` wrote to. It has a folder for each task.
        reward: The reward file of benchmarks given as NAME=FILE.jsonl.
        limit: The most problems. None means all.
        reward_range: The least and the greatest reward of that file. Those of the tasks are from 0 to 1.

    Raises:
        ConfigError: The benchmark is unknown, a file is missing, or a row is not a problem.
    """
    name, equals, path = spec.partition("=")
    if equals:
        if not _NAME.fullmatch(name) or not path:
            raise ConfigError(
                f"benchmark is {spec!r}; it must be NAME=FILE.jsonl, where NAME has only letters, digits, - _ ."
            )
        if name in paper.BENCHMARKS or name in ("results", "settings"):
            raise ConfigError(f"benchmark {spec!r}: the name {name} already has a meaning; choose another name")
        if reward is None:
            raise ConfigError(f"benchmark {spec!r} needs --reward FILE.py to judge the responses")
        title, file = name, Path(path).expanduser()
        if not file.is_file():
            raise ConfigError(f"benchmark {spec!r}: there is no file {file}")
    else:
        task = task_of(name, data)
        title = task.benchmarks[name].title if name in task.benchmarks else name
        file, reward = data / task.name / f"{name}.jsonl", task.file
        if not file.is_file():
            raise ConfigError(
                f"benchmark {name}: there is no file {file}; `bapo-openrlhf prepare {task.name}` makes it, and --data "
                "names its folder"
            )
    if not reward.is_file():
        raise ConfigError(f"reward is {reward}; it must be a file that exists")
    content = file.read_bytes()
    problems = tuple(_problems(name, file, content))
    if not problems:
        raise ConfigError(f"benchmark {name}: {file} has no problems; it must have at least one")
    sha256 = hashlib.sha256(content).hexdigest()
    generator = None if equals else _generator(file.parent / MANIFEST, name)
    own = reward_range if equals else UNIT
    return Benchmark(name, title, file, sha256, reward.resolve(), problems[:limit], len(problems), generator, own)


def _generator(manifest: Path, name: str) -> str | None:
    """The generator that `prepare` recorded for a benchmark."""
    if not manifest.is_file():
        return None
    return json.loads(manifest.read_bytes()).get("parts", {}).get(name, {}).get("asked", {}).get("generator")


def _problems(name: str, file: Path, content: bytes) -> Iterator[BenchmarkProblem]:
    ids: set[str] = set()
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"benchmark {name}: {file}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:  # It is not JSON or not UTF-8.
            raise ConfigError(f"{where}: the line must be valid JSON ({error})") from None
        problem = _problem(where, row, f"{name}-{number}")
        if problem.id in ids:
            raise ConfigError(f"{where}: the id {problem.id!r} occurs twice; ids must be unique")
        ids.add(problem.id)
        yield problem


def _problem(where: str, row: Any, default_id: str) -> BenchmarkProblem:
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: the line is a JSON {type(row).__name__}; it must be an object")
    for column in ("input", "label"):
        if column not in row:
            raise ConfigError(f"{where}: the column {column!r} is missing; there are {', '.join(row)}")
    text, images, identity = row["input"], row.get("images") or [], row.get("id", default_id)
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{where}: input is {text!r:.80}; it must be a text")
    if not isinstance(identity, (str, int)):
        raise ConfigError(f"{where}: id is {identity!r:.80}; it must be a text")
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise ConfigError(f"{where}: images is {images!r:.80}; it must be a list of paths")
    if len(images) != text.count("<image>") and images:
        tags = text.count("<image>")
        raise ConfigError(f"{where}: there are {len(images)} images and {tags} <image> tags; the numbers must be equal")
    for image in images:
        if not Path(image).is_file():
            raise ConfigError(f"{where}: there is no image {image}")
    return BenchmarkProblem(str(identity), text, row["label"], tuple(images))
