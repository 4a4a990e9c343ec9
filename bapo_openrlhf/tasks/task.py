"""The parts of a task: where its data is published, how a row becomes a problem, and how a response is judged.

Each task is one file with its published data, its prompts, its reward function, and a `TASK` that names them. The file
is also the reward file, which OpenRLHF loads by its path (`--reward.remote_url bapo_openrlhf/tasks/math.py`), so it
imports little. Nothing here needs torch, a network or a tokenizer.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class BadRow(ValueError):
    """A published row that is not a problem of the task. The message is the reason. Equal reasons are counted."""


@dataclass(frozen=True)
class Problem:
    """One problem before it is put into a prompt.

    Attributes:
        label: The input of the reward function. It is a string because OpenRLHF's loader needs one type in a column.
        key: Equal for two forms of the same problem. It shows duplicates, and overlap of training and test data.
        images: Contents of the image files, in the order in which the text refers to them.
        solution: A worked solution with its answer, for a supervised warm-up.
    """

    text: str
    label: str
    key: str
    images: tuple[bytes, ...] = ()
    solution: str | None = None


@dataclass(frozen=True)
class Source:
    """A table of a published data set, by its name on the hub. A number other than `rows` is reported."""

    hub: str
    columns: tuple[str, ...]
    split: str = "train"
    config: str | None = None
    rows: int | None = None


@dataclass(frozen=True)
class Part:
    """Training data or a benchmark: some of the different problems of a source.

    These are `count` problems, beginning with number `first`, or all the rest. If `shuffled`, the seed shuffles the
    source before, so that several parts can divide it. `title` is the name in the paper's tables.
    """

    title: str
    source: Source
    first: int = 0
    count: int | None = None
    shuffled: bool = False


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        file: The file of the task, which is also its reward file.
        benchmarks: The benchmarks by name, in the order of the paper's Table 1.
        prompts: Functions that make a prompt without chat markup, by name. The first is the default.
        problem: Makes a Problem from a published row. It raises BadRow if that is impossible. None: no published data.
        generate: Makes problems from (generator, part, number, seed), for tasks that need no published data.
        sizes: The default number of generated problems by generator and part. It names the generators.
        configure: Makes the task from `--tasks` and `--config`, for a task that has no problems without them.
        kinds: What these two say, for the manifest.
        takes: Whether an answer made of a label is right. None: no answer can be made of one.
    """

    name: str
    file: Path
    train: Part
    benchmarks: Mapping[str, Part]
    prompts: Mapping[str, Callable[[Problem], str]]
    problem: Callable[[Mapping[str, Any]], Problem] | None = None
    generate: Callable[[str, str, int, int], Iterator[Problem]] | None = None
    sizes: Mapping[str, Mapping[str, int]] | None = None
    configure: Callable[[str | None, Path | None], "Task"] | None = None
    kinds: str = ""
    takes: Callable[[Any], bool] | None = None

    @property
    def parts(self) -> dict[str, Part]:
        """The benchmarks, the training data as train, and as warmup the problems with solutions that are generated."""
        warmup = any("warmup" in sizes for sizes in (self.sizes or {}).values())
        return {**self.benchmarks, **({"warmup": self.train} if warmup else {}), "train": self.train}


def require(row: Mapping[str, Any], columns: Sequence[str]) -> list[Any]:
    """The values of some columns of a published row, which `prepare` has checked for. An empty value is a BadRow."""
    values = [row[column] for column in columns]
    for column, value in zip(columns, values, strict=True):
        if value is None or (isinstance(value, str) and not value.strip()):
            raise BadRow(f"{column} is empty")
    return values


def shares(count: int, weights: Mapping[str, float]) -> dict[str, int]:
    """`count` divided in proportion to the weights, by largest remainder."""
    exact = {name: count * weight / sum(weights.values()) for name, weight in weights.items()}
    counts = {name: int(amount) for name, amount in exact.items()}
    by_remainder = sorted(weights, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: count - sum(counts.values())]:
        counts[name] += 1
    return counts


THINK = "<think>"


def texts_of(queries: Sequence[str], prompts: Sequence[str], responses: Sequence[str] | None) -> list[str]:
    """What the model wrote, after the `<think>` with which its prompt may end.

    OpenRLHF's own engine gives no responses. Then each is what follows the prompt in its query, and nothing if the
    prompt is not there as it was, because the rest could have an answer.
    """
    if responses is None:
        pairs = zip(queries, prompts, strict=True)
        responses = [query.partition(prompt)[2] if prompt else query for query, prompt in pairs]
    starts = (THINK if prompt.rstrip().endswith(THINK) else "" for prompt in prompts)
    return [start + response for start, response in zip(starts, responses, strict=True)]


def speech(response: str) -> str:
    """A response without thinking that has begun with `<think>` and has not ended."""
    before, begun, after = response.rpartition(THINK)
    return before if begun and "</think>" not in after else response


_LAYOUT = re.compile(r"\s+|\$|\\[,;:! ]|\\(?:left|right|quad|qquad|displaystyle)(?![a-zA-Z])")


def text_key(text: str) -> str:
    """The key of a text: the text without case and layout, which is blanks, dollar signs and LaTeX spacing."""
    return _LAYOUT.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").lower().rstrip(".")


def vector(numbers: list[float]) -> Any:
    """A float tensor, which OpenRLHF's own engine needs. It is a list if the process has not loaded torch."""
    torch = sys.modules.get("torch")
    return numbers if torch is None else torch.tensor(numbers, dtype=torch.float32)


def verdict(rewards: list[float], **logs: list[float]) -> dict[str, Any]:
    """What a reward function returns: the rewards, which are also the scores, and "extra_logs" for the metrics."""
    extra_logs = {name: vector(numbers) for name, numbers in logs.items()}
    return {"rewards": vector(rewards), "scores": vector(rewards), "extra_logs": extra_logs}
