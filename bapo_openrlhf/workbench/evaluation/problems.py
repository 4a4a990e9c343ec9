"""The problems of a benchmark, read from its file."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bapo_openrlhf.adapt.rewards import UNIT, Range
from bapo_openrlhf.data.reading import read
from bapo_openrlhf.data.rows import Values, quoted
from bapo_openrlhf.data.sources import SourceFlags
from bapo_openrlhf.data.vision import NOT_FILES, images_of, places
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.tasks import task_of
from bapo_openrlhf.user_file import at_home, start_of
from bapo_openrlhf.workbench.evaluation import paper
from bapo_openrlhf.workbench.prepare.build import MANIFEST
from bapo_openrlhf.workbench.prepare.source_rows import digest

_NAME = re.compile(r"[\w-][\w.-]*")


class Columns(NamedTuple):
    """The columns of a file of problems."""

    input: str = "input"
    label: str = "label"
    images: str = "images"


COLUMNS = Columns()  # of the files of tasks


@dataclass(frozen=True)
class BenchmarkProblem:
    """One problem of a benchmark."""

    id: str  # unique within the benchmark
    input: Any  # the text of the prompt without chat markup, or a list of messages
    label: Any
    images: tuple[str, ...] = ()  # paths or addresses in the order of the <image> tags in `input`


@dataclass(frozen=True)
class Benchmark:
    """Problems and the file that judges them."""

    name: str
    title: str  # name in the tables
    file: Path
    sha256: str  # of the file of the problems
    reward: Path
    problems: tuple[BenchmarkProblem, ...]  # the first of the file, up to the limit
    size: int  # number of problems in the file
    columns: Columns
    generator: str | None = None  # what made the problems; None if they are published, or the user's
    reward_range: Range = UNIT


def load(
    spec: str, data: Path, reward: Path | None, limit: int | None, reward_range: Range = UNIT,
    columns: Columns = COLUMNS, *, chat: bool = False,
) -> Benchmark:  # fmt: skip
    """The benchmark that a word names: a task's, or NAME=FILE. A ConfigError says what is wrong with its files.

    `data` has a folder for each task. Only NAME=FILE has the given `reward`, `reward_range` and `columns`. With `chat`
    a prompt may be a list of messages.
    """
    name, equals, path = spec.partition("=")
    if equals:
        if not _NAME.fullmatch(name) or not path:
            raise ConfigError(
                f"benchmark is {spec!r}; it must be NAME=FILE, where NAME has only letters, digits, - _ ."
            )
        if name in paper.BENCHMARKS or name in ("results", "settings"):
            raise ConfigError(f"benchmark {spec!r}: the name {name} already has a meaning; choose another name")
        if reward is None:
            raise ConfigError(f"benchmark {spec!r} needs --reward FILE.py to judge the responses")
        title, file = name, at_home(path)
        if not file.is_file():
            raise ConfigError(f"benchmark {spec!r}: there is no file {file}{start_of(file)}")
    else:
        task = task_of(name, data)
        title = task.benchmarks[name].title if name in task.benchmarks else name
        file, reward, columns, reward_range = data / task.name / f"{name}.jsonl", task.file, COLUMNS, UNIT
        if not file.is_file():
            raise ConfigError(
                f"benchmark {name}: there is no file {file}; `bapo-openrlhf prepare {task.name}` makes it, and --data "
                "names its folder"
            )
    if not reward.is_file():
        raise ConfigError(f"reward is {reward}; it must be a file that exists")
    sha256 = digest(file)
    with TemporaryDirectory() as folder:
        problems = tuple(_problems(f"benchmark {name}", file, columns, Path(folder), chat=chat))
    generator = None if equals else _generator(file.parent / MANIFEST, name)
    first, size = problems[:limit], len(problems)
    return Benchmark(name, title, file, sha256, reward.resolve(), first, size, columns, generator, reward_range)


def _generator(manifest: Path, name: str) -> str | None:
    if not manifest.is_file():
        return None
    return json.loads(manifest.read_bytes()).get("parts", {}).get(name, {}).get("asked", {}).get("generator")


def _problems(flag: str, file: Path, columns: Columns, folder: Path, *, chat: bool) -> Iterator[BenchmarkProblem]:
    names = {"input_key": columns.input, "label_key": columns.label}
    flags = SourceFlags(flag, str(file), names, (columns.images, "id"))
    (part,) = read(flags, folder, download=False).parts
    values = Values(names, chat=chat)
    for _, text in values.missing(part.names):
        raise ConfigError(f"{part.where}: {text}")
    ids: set[str] = set()
    for number, (place, row) in enumerate(part.places(), 1):
        for _, text in values.wrong(place, row):
            raise ConfigError(f"{place}: {text}")
        identity = row.get("id")
        identity = f"{flag.split()[-1]}-{number}" if identity is None else identity
        if not isinstance(identity, (str, int)):
            raise ConfigError(f"{place}: id is {quoted(identity)}; it must be a text")
        if str(identity) in ids:
            raise ConfigError(f"{place}: the id {identity!r} occurs twice; ids must be unique")
        ids.add(str(identity))
        images = _images(place, row[columns.input], images_of(row.get(columns.images)))
        yield BenchmarkProblem(str(identity), row[columns.input], row[columns.label], images)


def _images(place: str, prompt: Any, images: list[Any]) -> tuple[str, ...]:
    """The images of a problem, which are those that a run takes: paths, addresses and `data:image`."""
    if not all(isinstance(image, str) for image in images):
        raise ConfigError(f"{place}: images is {quoted(images)}; it must be a list of paths or addresses")
    if images and len(images) != (tags := places(prompt)):
        raise ConfigError(f"{place}: there are {len(images)} images and {tags} <image> tags; the numbers must be equal")
    for image in images:
        if not image.startswith(NOT_FILES) and not Path(image).is_file():
            raise ConfigError(f"{place}: there is no image {image}")
    return tuple(images)
