"""`prepare`: each published row becomes a prompt and a label, or is counted with the reason for its rejection."""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.record.durable import write_atomically, write_json
from bapo_openrlhf.tasks import judge_digest
from bapo_openrlhf.tasks.task import BadRow, Problem, Task
from bapo_openrlhf.workbench.prepare.source_rows import HubError, SourceRows, digest, local_copies, open_source

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Preparation:
    out: Path
    parts: tuple[str, ...] | None = None  # None: all
    generator: str | None = None  # None: published data
    local: Mapping[str, Path] = field(default_factory=dict)  # copies of published data, by part
    style: str | None = None  # name of one of the task's prompts; None: the first
    seed: int = 0  # of the order in which shuffled parts are divided, and of generated problems
    limits: Mapping[str, int] = field(default_factory=dict)  # of problems, by part; otherwise the task's
    drop_overlap: bool = False  # leave out training problems that are in a benchmark, and do not only report them
    tokens: Callable[[str], int] | None = None  # counts those of a prompt with chat markup, with `tokenizer`
    max_tokens: int = 0  # the most of a prompt if they are counted
    tokenizer: str | None = None


def prepare(task: Task, request: Preparation) -> dict[str, Any]:
    """Write OUT/PART.jsonl and OUT/PART.rejected.jsonl for each part; write and return the manifest of all parts.

    A part is kept if it was made from the same data in the same way, so the same call resumes. Benchmarks come first
    because the training data is compared with them. A ConfigError says what is unknown, or cannot be read or used.
    """
    _check(task, request)
    request.out.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(request.out, task.name)
    possible = (task.sizes or {})[request.generator] if request.generator else {*task.benchmarks, "train"}
    parts = [part for part in task.parts if part in (possible if request.parts is None else request.parts)]
    unknown = [part for part in task.benchmarks if part in possible and part not in (*parts, *manifest["parts"])]
    if request.drop_overlap and "train" in parts and unknown:
        raise ConfigError(
            f"--overlap is drop, and {', '.join(unknown)} is not prepared in {request.out}; prepare it first, or name "
            "it in --parts too, because its problems are to be left out of the training data"
        )
    for part in parts:
        try:
            manifest["parts"][part] = _part(task, part, request, manifest)
        except HubError as error:
            others = [one for one in parts if one not in manifest["parts"] and one not in request.local]
            missing = dict.fromkeys([part, *others] if error.offline else [part])
            raise ConfigError(f"{error}. {local_copies({one: task.parts[one].source for one in missing})}") from None
        write_json(request.out / MANIFEST, manifest)
    compared = {part: entry["sha256"] for part, entry in manifest["parts"].items()}
    if manifest["overlap"].get("of") != compared:
        manifest["overlap"] = {"of": compared, "benchmarks": _overlap(request.out, list(compared))}
        write_json(request.out / MANIFEST, manifest)
    return manifest


def _check(task: Task, request: Preparation) -> None:
    names = [("part", part, task.parts) for part in (*(request.parts or ()), *request.local, *request.limits)]
    names += [("prompt", request.style, task.prompts), ("generator", request.generator, task.sizes or {})]
    for kind, name, allowed in names:
        if name is not None and name not in allowed:
            raise ConfigError(f"{kind} is {name!r}; {task.name} has {', '.join(allowed) or 'none'}")
    if request.generator is None:
        if task.problem is None:
            generators = ", ".join(task.sizes or {})
            raise ConfigError(f"generator is None; {task.name} has {generators}, and no published data")
        return
    if request.local:
        raise ConfigError(f"generator is {request.generator!r} and there are local copies; give only one of the two")
    sizes = {**(task.sizes or {})[request.generator], **request.limits}
    for part in request.parts or ():
        if part not in sizes:
            raise ConfigError(
                f"part is {part!r}; generator {request.generator} has {', '.join(sizes)}, and makes others only "
                f"with a size: --size {part}=N"
            )


def read_manifest(out: Path, task: str) -> dict[str, Any]:
    """The manifest of a folder, or an empty one; a ConfigError if it is not that of the task."""
    path = out / MANIFEST
    if not path.is_file():
        return {"format": FORMAT, "task": task, "parts": {}, "overlap": {}}
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError:
        raise ConfigError(f"{path} is not JSON; remove it to prepare the folder again") from None
    if manifest.get("format") != FORMAT or manifest.get("task") != task:
        raise ConfigError(
            f"{path} has task {manifest.get('task')} and format {manifest.get('format')}; they must be {task} and "
            f"{FORMAT}: choose another folder (`prepare --out`)"
        )
    return manifest


# ── one part ──


def _part(task: Task, name: str, request: Preparation, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Make one part, or keep its file. Returns its entry of the manifest."""
    entry = manifest["parts"].get(name)
    path = request.out / f"{name}.jsonl"
    settings = _settings(task, name, request, manifest)
    same = entry is not None and entry["asked"] == settings and digest(path) == entry["sha256"] and _has_images(path)
    copy = request.local.get(name)
    # The hub is asked only if the part must be made. A local copy is always read for its digest.
    if same and (request.generator is not None or (copy is None and entry["origin"]["from"] == settings["hub"])):
        return dict(entry)
    source = None if request.generator else open_source(name, task.parts[name].source, copy)
    if same and entry["origin"] == source.origin:
        return dict(entry)
    build = _Build(task, name, request)
    problems = build.generated(settings["size"]) if source is None else build.published(source)
    origin = {"from": f"generator {request.generator}"} if source is None else source.origin
    written = build.write(problems, settings["prompt"])
    reasons = dict(Counter(row["kind"] for row in build.rejected).most_common())
    if written == 0:
        why = [f"{count} x {kind}" for kind, count in reasons.items()]
        if build.left_over:
            why.append(f"{build.left_over} x in another part: this one begins after the first {build.part.first}")
        raise ConfigError(f"{name}: none of {build.read} rows of {origin['from']} can be used: {', '.join(why)}")
    assert build.read == written + len(build.rejected) + build.left_over
    return {
        "title": task.parts[name].title,
        "asked": settings,
        "origin": origin,
        "published_rows": None if request.generator else task.parts[name].source.rows,
        "read": build.read,
        "written": written,
        "rejected": reasons,
        "left_over": build.left_over,
        "sha256": digest(path),
    }


def _settings(task: Task, name: str, request: Preparation, manifest: Mapping[str, Any]) -> dict[str, Any]:
    settings = {
        "task_file": judge_digest(task.file),
        "prompt": request.style or next(iter(task.prompts)),
        "seed": request.seed,
        "limit": request.limits.get(name),
        "tokenizer": request.tokenizer,
        "max_tokens": request.max_tokens if request.tokens else None,
    }
    if request.generator is not None:
        settings["generator"] = request.generator
        settings["kinds"] = task.kinds
        settings["size"] = request.limits.get(name) or (task.sizes or {})[request.generator][name]
    else:
        settings["hub"] = task.parts[name].source.hub
    if name == "train" and request.drop_overlap:
        settings["without"] = {part: entry["sha256"] for part, entry in manifest["parts"].items() if part != "train"}
    return settings


class _Build:
    """One part while it is made. `left_over` problems are of another part of the source, or beyond the limit."""

    def __init__(self, task: Task, name: str, request: Preparation) -> None:
        self.task, self.name, self.request = task, name, request
        self.part = task.parts[name]
        self.read = self.left_over = 0
        self.rejected: list[dict[str, Any]] = []

    def generated(self, size: int) -> Iterator[tuple[int, Problem]]:
        try:
            for problem in self.task.generate(self.request.generator, self.name, size, self.request.seed):
                self.read += 1
                yield self.read, problem
        except ValueError as error:  # There are fewer problems than `size`.
            raise ConfigError(f"{self.name}: {error}") from None

    def published(self, source: SourceRows) -> list[tuple[int, Problem]]:
        problems: list[tuple[int, Problem]] = []
        first_rows: dict[str, tuple[int, str]] = {}  # Row number and label by key.
        for number, row in tqdm(
            source.rows, desc=f"{self.name}: reading", total=source.size, unit="row", leave=False, disable=None
        ):
            self.read += 1
            try:
                if isinstance(row, BadRow):
                    raise row
                problem = self.task.problem(row)
                json.dumps(vars(problem), ensure_ascii=False, default=str).encode()  # images are bytes
            except UnicodeEncodeError as error:
                self._reject(number, f"no valid Unicode: {error}")
                continue
            except BadRow as error:
                self._reject(number, str(error))
                continue
            if problem.key in first_rows:
                first, label = first_rows[problem.key]
                kind = "duplicate" if label == problem.label else "duplicate with another label"
                self._reject(number, f"{kind}: of row {first}")
                continue
            first_rows[problem.key] = (number, problem.label)
            problems.append((number, problem))
        if self.part.shuffled:
            random.Random(f"{self.request.seed}/{self.part.source.hub}").shuffle(problems)
        selection = problems[self.part.first :][: self.part.count][: self.request.limits.get(self.name)]
        self.left_over = len(problems) - len(selection)
        return selection

    def write(self, problems: Iterable[tuple[int, Problem]], style: str) -> int:
        prompt, tests = self.task.prompts[style], dict[str, list[str]]()
        if self.name == "train" and self.request.drop_overlap:
            tests = _tests(self.request.out, self.task.benchmarks)
        rows = []
        for number, problem in tqdm(problems, desc=f"{self.name}: writing", unit="row", leave=False, disable=None):
            row = self._row(number, problem, prompt(problem))
            if row is None:
                continue
            if same := tests.get(row["key"]):
                self._reject(number, f"in a benchmark: {same[0]}")
                continue
            rows.append(row)
        if rows:
            _write_lines(self.request.out / f"{self.name}.jsonl", rows)
        _write_lines(self.request.out / f"{self.name}.rejected.jsonl", self.rejected)
        return len(rows)

    def _row(self, number: int, problem: Problem, text: str) -> dict[str, Any] | None:
        """The row that OpenRLHF reads. None means that the prompt is too long."""
        if self.request.tokens is not None and (count := self.request.tokens(text)) > self.request.max_tokens:
            self._reject(number, f"prompt too long: {count} tokens, at most {self.request.max_tokens}")
            return None
        key = hashlib.blake2b(problem.key.encode(), digest_size=8).hexdigest()
        row = {
            "id": f"{self.name}-{number}",
            "datasource": self.name,
            "input": text,
            "label": problem.label,
            "key": key,
        }
        if problem.solution is not None:
            row["solution"] = problem.solution
        if problem.images:
            images = enumerate(problem.images)
            row["images"] = [str(_image(self.request.out, f"{row['id']}-{place}", image)) for place, image in images]
        return row

    def _reject(self, number: int, reason: str) -> None:
        """Record a rejected row. The reason up to the colon is its kind. Kinds are counted."""
        self.rejected.append({"row": number, "kind": reason.split(":")[0], "reason": reason})


def _has_images(path: Path) -> bool:
    folder = path.absolute().parent / "images"
    images = (Path(image) for row in _rows(path) for image in row.get("images", ()))
    return all(image.parent == folder and image.is_file() for image in images)


def _image(out: Path, name: str, content: bytes) -> Path:
    """Write an image next to the rows. The path is absolute because OpenRLHF opens it from another folder."""
    kind = "jpg" if content[:2] == b"\xff\xd8" else "png" if content[:4] == b"\x89PNG" else "img"
    path = out.absolute() / "images" / f"{name}.{kind}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


# ── overlap ──


def _overlap(out: Path, parts: Sequence[str]) -> dict[str, Any]:
    """Numbers of test problems that are also in the training data, by benchmark. Writes the pairs to overlap.jsonl."""
    if "train" not in parts:
        return {}
    benchmarks = [part for part in parts if part != "train"]
    tests = _tests(out, benchmarks)
    pairs = [(row["id"], test) for row in _rows(out / "train.jsonl") for test in tests.get(row["key"], ())]
    _write_lines(out / "overlap.jsonl", [{"train": train, "test": test} for train, test in pairs])
    counts = Counter(test.rpartition("-")[0] for test in {test for _, test in pairs})  # An id is PART-NUMBER.
    return {part: {"same": counts[part]} for part in benchmarks}


def _tests(out: Path, benchmarks: Iterable[str]) -> dict[str, list[str]]:
    ids: dict[str, list[str]] = {}
    for part in benchmarks:
        for row in _rows(out / f"{part}.jsonl"):
            ids.setdefault(row["key"], []).append(row["id"])
    return ids


# ── files ──


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            yield from map(json.loads, file)


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
