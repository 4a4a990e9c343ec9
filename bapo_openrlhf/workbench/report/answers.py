"""Prompts with a group in which no response was right, with their answers."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from bapo_openrlhf.record.run_record import ANSWERS
from bapo_openrlhf.workbench.pages.page import Entry, Listing
from bapo_openrlhf.workbench.pages.text import number
from bapo_openrlhf.workbench.report.runs import Row, Run

MAX_ANSWERS = 20  # prompts of each kind and run
NO_ANSWERS = (
    f"{ANSWERS} is not there or is empty: each group had a right response, the run kept none (--run.answer_chars 0), "
    "or it is of an older version"
)


@dataclass(frozen=True)
class Tried:
    """A prompt: the answers of its first group without a right response and of its first success, and its groups."""

    failed: Row
    solved: Row | None
    groups: int | None


def listings(run: Run, label: str) -> list[Listing]:
    """The prompts of a run that were solved later, and those that never were; `label` is the page's name of the run."""
    result = []
    for title, tried in (
        ("None right and solved later, the newest first", newly_solved(run)),
        ("Never solved, the most often tried first", never_solved(run)),
    ):
        parts = telling_parts([str(one.failed["text"]) for one in tried])
        entries = [_entry(one, part) for one, part in list(zip(tried, parts, strict=True))[:MAX_ANSWERS]]
        result.append(Listing(label, title, entries, len(tried), "" if run.answers else NO_ANSWERS))
    return result


def _entry(tried: Tried, start: str) -> Entry:
    what = f"None right at step {number(tried.failed['step'])}"
    what += f", solved at step {number(tried.solved['step'])}" if tried.solved else ""
    what += f", {number(tried.groups)} group{'s' if tried.groups > 1 else ''}" if tried.groups else ""
    texts = [(name, name.lower(), str(tried.failed[key])) for name, key in (("Prompt", "text"), ("Label", "label"))]
    for kind, row in (("None right", tried.failed), ("Solved", tried.solved)):
        if row:
            heading = f"{kind}, step {number(row['step'])}, reward {number(row['reward'])}"
            texts.append((heading, "response", row["response"]))
    return Entry(what, start, texts)


def newly_solved(run: Run) -> list[Tried]:
    """Prompts with a group in which none was right that were solved later, the newest success first."""
    failed, groups = _first(run, "failed"), _means(run)["count"]
    solved = _first(run, "solved").items()
    both = [Tried(failed[prompt], row, groups.get(prompt)) for prompt, row in solved if prompt in failed]
    return sorted(both, key=lambda tried: -tried.solved["step"])  # type: ignore[index]


def never_solved(run: Run) -> list[Tried]:
    """Prompts that have no group with a mean above 0 at all, the most often tried first."""
    means = _means(run)
    solved = {*_first(run, "solved"), *means.index[means["max"] > 0]}
    failed = _first(run, "failed").items()
    unsolved = [Tried(row, None, means["count"].get(prompt)) for prompt, row in failed if prompt not in solved]
    return sorted(unsolved, key=lambda tried: (-(tried.groups or 0), tried.failed["step"]))


def telling_parts(texts: Sequence[str]) -> list[str]:
    """Each text without the template, which is what all texts begin and end with. A single text stays whole."""
    if len(set(texts)) < 2:
        return list(texts)
    start = len(os.path.commonprefix(list(texts)))  # noqa: RUF071 - character by character is meant
    rests = [text[start:] for text in texts]
    end = len(os.path.commonprefix([rest[::-1] for rest in rests]))  # noqa: RUF071
    return [rest[: len(rest) - end] for rest in rests]


def _first(run: Run, kind: str) -> dict[str, Row]:
    by_prompt: dict[str, Row] = {}
    for row in run.answers:
        if row["kind"] == kind:
            by_prompt.setdefault(row["prompt"], row)
    return by_prompt


def _means(run: Run) -> pd.DataFrame:
    if run.groups.empty:
        return pd.DataFrame(columns=["count", "max"])
    return run.groups.groupby("prompt")["mean"].agg(["count", "max"]).query("count > 0")
