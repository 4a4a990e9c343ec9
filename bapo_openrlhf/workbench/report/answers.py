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
    "or the file was not copied"
)


@dataclass(frozen=True)
class HardPrompt:
    """A prompt: the answers of its first group without a right response and of its first success, and its groups."""

    failed: Row
    solved: Row | None
    groups: int | None


def listings(run: Run, label: str) -> list[Listing]:
    """The prompts of a run that were solved later, and those that never were; `label` is the page's name of the run."""
    result = []
    for title, prompts in (
        ("None right and solved later, the newest first", newly_solved(run)),
        ("Never solved, the most often tried first", never_solved(run)),
    ):
        parts = telling_parts([str(prompt.failed["text"]) for prompt in prompts])
        entries = [*map(_entry, prompts[:MAX_ANSWERS], parts)]
        result.append(Listing(label, title, entries, len(prompts), "" if run.answers else NO_ANSWERS))
    return result


def _entry(prompt: HardPrompt, start: str) -> Entry:
    what = f"None right at step {number(prompt.failed['step'])}"
    what += f", solved at step {number(prompt.solved['step'])}" if prompt.solved else ""
    what += f", {number(prompt.groups)} group{'s' if prompt.groups > 1 else ''}" if prompt.groups else ""
    texts = [("Prompt", "prompt", str(prompt.failed["text"])), ("Label", "label", str(prompt.failed["label"]))]
    for kind, row in (("None right", prompt.failed), ("Solved", prompt.solved)):
        if row:
            heading = f"{kind}, step {number(row['step'])}, reward {number(row['reward'])}"
            texts.append((heading, "response", row["response"]))
    return Entry(what, start, texts)


def newly_solved(run: Run) -> list[HardPrompt]:
    """Prompts with a group in which none was right that were solved later, the newest success first."""
    failed, groups = _first(run, "failed"), _means(run)["count"]
    solved = _first(run, "solved").items()
    both = [HardPrompt(failed[prompt], row, groups.get(prompt)) for prompt, row in solved if prompt in failed]
    return sorted(both, key=lambda prompt: -prompt.solved["step"])  # type: ignore[index]


def never_solved(run: Run) -> list[HardPrompt]:
    """Prompts that have no group with a mean above 0 at all, the most often tried first."""
    means = _means(run)
    solved = {*_first(run, "solved"), *means.index[means["max"] > 0]}
    failed = _first(run, "failed").items()
    others = [HardPrompt(row, None, means["count"].get(prompt)) for prompt, row in failed if prompt not in solved]
    return sorted(others, key=lambda prompt: (-(prompt.groups or 0), prompt.failed["step"]))


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
