"""What to evaluate, and how: the request, and the problems of its benchmarks, read from their files."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bapo_openrlhf.adapt.rewards import UNIT, Range
from bapo_openrlhf.data.reading import read
from bapo_openrlhf.data.rows import Values
from bapo_openrlhf.data.sources import SourceFlags
from bapo_openrlhf.data.vision import check_image, images_of, places
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.ranges import check_ranges
from bapo_openrlhf.tasks import TASKS, get_task, task_of
from bapo_openrlhf.user_file import at_home, start_of
from bapo_openrlhf.workbench.prepare.build import read_manifest
from bapo_openrlhf.workbench.prepare.source_rows import digest

_NAME = re.compile(r"[\w-][\w.-]*")
_FILES = ("results", "settings")  # names of files in the folder of an evaluation
# The ranges of values, in the words of `errors.ALLOWED`.
RANGES = {
    "at least 1": "runs max_new_tokens limit max_num_seqs tensor_parallel_size",
    "at least 2": "max_model_len",
    "finite and at least 0": "temperature",
    "in (0, 1]": "top_p gpu_memory_utilization",
    "in [0, 4294967295]": "seed",
}


class Columns(NamedTuple):
    """The columns of a file of problems."""

    input: str = "input"
    label: str = "label"
    images: str = "images"


COLUMNS = Columns()  # of the files of tasks


# ── the request ──


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. settings.json holds all of it, and a resumed evaluation must have the same values."""

    runs: int
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class Request:
    """What to evaluate: the flags of `bapo-openrlhf evaluate`, which says what each of them means."""

    model: str
    name: str
    benchmarks: Sequence[str]  # the name of a task's, or NAME=FILE
    out: Path
    sampling: Sampling
    ks: Sequence[int]
    data: Path = Path("data")
    reward: Path | None = None
    reward_range: Range = UNIT
    limit: int | None = None
    columns: Columns = COLUMNS
    chat_template: bool | str = True  # or a template with {} in place of the text
    skip_long: bool = False
    max_model_len: int | None = None  # without it the model's own limit, but no more tokens than the prompts need
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int | None = None


def check(request: Request) -> None:
    """Raise ConfigError if a value that needs no file is not allowed."""
    sampling = request.sampling
    names = [spec.partition("=")[0] for spec in request.benchmarks]
    flags = {**vars(sampling), **vars(request)}
    check_ranges(flags, {flag: rule for rule, names in RANGES.items() for flag in names.split()})
    if sampling.top_k < 1 and sampling.top_k != -1:
        raise ConfigError(f"top_k is {sampling.top_k}; it must be at least 1, or -1 for all tokens")
    if sampling.temperature == 0 and sampling.runs > 1:
        raise ConfigError(f"temperature is 0 and runs is {sampling.runs}; all runs would be the same: use --runs 1")
    for k in request.ks:
        if not 1 <= k <= sampling.runs:
            raise ConfigError(f"k is {k}; it must be within 1..{sampling.runs}, the number of runs")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None or not names:
        raise ConfigError(f"benchmark {twice} is named twice" if names else "benchmarks is empty; name at least one")
    if request.reward is not None and not any("=" in spec for spec in request.benchmarks):
        raise ConfigError(
            f"reward is {request.reward}; it is only for benchmarks given as NAME=FILE, and there are none "
            "because tasks have a reward function of their own"
        )


# ── the benchmarks ──


@dataclass(frozen=True)
class BenchmarkProblem:
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


def titles() -> dict[str, str]:
    """The titles of the tasks' benchmarks by name."""
    return {name: part.title for task in TASKS for name, part in get_task(task).benchmarks.items()}


def load(spec: str, request: Request) -> Benchmark:
    """The benchmark that a word names: a task's, or NAME=FILE. A ConfigError says what is wrong with its files.

    Only NAME=FILE has the request's `reward`, `reward_range` and `columns`. With a chat template a prompt may be a
    list of messages.
    """
    name, equals, path = spec.partition("=")
    generator = None
    if equals:
        if not _NAME.fullmatch(name) or not path:
            raise ConfigError(
                f"benchmark is {spec!r}; it must be NAME=FILE, where NAME has only letters, digits, - _ ."
            )
        if name in _FILES or name in titles():
            raise ConfigError(f"benchmark {spec!r}: the name {name} already has a meaning; choose another name")
        if request.reward is None:
            raise ConfigError(f"benchmark {spec!r} needs --reward FILE.py to judge the responses")
        file, reward, columns, reward_range = at_home(path), request.reward, request.columns, request.reward_range
        if not file.is_file():
            raise ConfigError(f"benchmark {spec!r}: there is no file {file}{start_of(file)}")
    else:
        task = task_of(name, request.data)
        folder = request.data / task.name
        file, reward, columns, reward_range = folder / f"{name}.jsonl", task.file, COLUMNS, UNIT
        if not file.is_file():
            raise ConfigError(
                f"benchmark {name}: there is no file {file}; `bapo-openrlhf prepare {task.name}` makes it, and --data "
                "names its folder"
            )
        entry = read_manifest(folder, task.name)["parts"].get(name, {})
        generator = entry.get("asked", {}).get("generator")
    if not reward.is_file():
        raise ConfigError(f"reward is {reward}; it must be a file that exists")
    sha256, chat = digest(file), request.chat_template is True
    with TemporaryDirectory() as kept:
        problems = tuple(_problems(f"benchmark {name}", file, columns, Path(kept), chat=chat))
    first, size, title = problems[: request.limit], len(problems), titles().get(name, name)
    return Benchmark(name, title, file, sha256, reward.resolve(), first, size, columns, generator, reward_range)


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
            raise ConfigError(f"{place}: id is {identity!r:.80}; it must be a text")
        if str(identity) in ids:
            raise ConfigError(f"{place}: the id {identity!r} occurs twice; ids must be unique")
        ids.add(str(identity))
        images = _images(place, row[columns.input], images_of(row.get(columns.images)))
        yield BenchmarkProblem(str(identity), row[columns.input], row[columns.label], images)


def _images(place: str, prompt: Any, images: list[Any]) -> tuple[str, ...]:
    """The images of a problem, which are those that a run takes: paths, addresses and `data:image`."""
    if images and len(images) != (tags := places(prompt)):
        raise ConfigError(f"{place}: there are {len(images)} images and {tags} <image> tags; the numbers must be equal")
    for image in images:
        check_image(place, image)
    return tuple(images)
