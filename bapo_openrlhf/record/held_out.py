"""The held-out evaluations of a run, in words: for its console, its end, `watch` and `report`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

PASS1 = re.compile(r"eval_(.+)_pass1")  # OpenRLHF's name of the mean reward of all answers to a data set


def scores(row: Mapping[str, Any]) -> dict[str, float]:
    """The mean reward of each data set in a row of evaluations.jsonl."""
    return {match[1]: value for name, value in row.items() if (match := PASS1.fullmatch(name)) and value is not None}


def scores_in_words(row: Mapping[str, Any]) -> str:
    """One evaluation. Empty if it has no score."""
    return ", ".join(f"{name} {value:.3f}" for name, value in scores(row).items())


def change_in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """The last evaluation, and the first one on its data. Empty if none has a score."""
    scored_rows = [row for row in rows if scores(row)]
    if not scored_rows:
        return ""
    last = scored_rows[-1]
    first = next(row for row in scored_rows if scores(row).keys() & scores(last).keys())  # a resume may change the data
    if first["step"] == last["step"]:
        return f"{scores_in_words(last)} (step {last['step']})"
    begin = scores(first)
    changes = [f"{name} {begin[name]:.3f} to {end:.3f}" if name in begin else f"{name} {end:.3f}"
               for name, end in scores(last).items()]  # fmt: skip
    return f"{', '.join(changes)} (steps {first['step']} to {last['step']})"
