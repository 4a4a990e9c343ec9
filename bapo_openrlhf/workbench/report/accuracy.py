"""Prompts by accuracy: where they were, and where they went.

The functions take the groups of `Run.groups`. The accuracy of a prompt is the mean reward of a group of G responses.
"""

from typing import NamedTuple

import numpy as np
import pandas as pd

from bapo_openrlhf.record.run_record import GROUPS
from bapo_openrlhf.workbench.report.runs import Run

MAX_PASSES = 12
PAPER_PASSES = 3  # of Fig. 7
PAPER = f"In the paper, {PAPER_PASSES} passes unlocked 31 % with BAPO and 19 % with GRPO"


def why_no_bins(run: Run) -> str:
    """Why a run's prompts have no accuracy bins; empty if they have."""
    if run.groups.empty:
        return f"{GROUPS} is not there or is empty"
    if run.groups["mean"].isna().all():
        return "no group of the run has a mean reward"
    if not run.groups["mean"].dropna().between(0, 1).all():
        return "mean rewards are not between 0 and 1, and the bins k/G are for these"
    return ""


def group_size(groups: pd.DataFrame) -> int:
    """G, the largest number of responses. With a method that generates in stages, groups may have fewer."""
    return int(groups["responses"].max())


def _with_bins(groups: pd.DataFrame) -> pd.DataFrame:
    """The groups that have a mean, with the bin 0..G whose k/G is nearest to it."""
    with_mean = groups.dropna(subset="mean")
    return with_mean.assign(bin=np.floor(with_mean["mean"] * group_size(groups) + 0.5).astype(int))


def passes(groups: pd.DataFrame) -> pd.DataFrame:
    """How many prompts were in each accuracy bin 0..G (columns) at first sight, and after each pass (Fig. 7, 13).

    A pass is as many fresh groups as there are different prompts; it ends with the step that reaches them. Groups
    without a mean reward count for the pass, not for the bins. Of many passes, MAX_PASSES evenly spaced ones are kept.
    Each prompt is counted in the bin of its latest group until then.
    """
    groups = groups.reset_index(drop=True)
    binned = _with_bins(groups)
    is_fresh = groups["source"] == "fresh"
    prompts = groups.loc[is_fresh, "prompt"].nunique()
    ends = groups.index[groups["step"].ne(groups["step"].shift(-1))]  # the last group of each step
    fresh_groups = is_fresh.cumsum()[ends]
    whole_passes = fresh_groups // max(prompts, 1)
    names = {end: str(count) for end, count in whole_passes[whole_passes.diff().fillna(whole_passes) > 0].items()}
    names.setdefault(ends[-1], f"{fresh_groups.iloc[-1] / prompts:.1f}" if prompts else "end")
    counts = {"first": binned.drop_duplicates("prompt")["bin"].value_counts()}
    for place in evenly(len(names), MAX_PASSES):
        end, name = [*names.items()][place]
        counts[name] = binned.loc[:end].drop_duplicates("prompt", keep="last")["bin"].value_counts()
    return pd.DataFrame(counts).T.reindex(columns=range(group_size(groups) + 1)).fillna(0).astype(int)


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of the indices 0..count - 1, evenly spaced, the last one included."""
    most = min(count, most)
    return [round((number + 1) * count / most) - 1 for number in range(most)]


def migration(groups: pd.DataFrame) -> pd.DataFrame:
    """How many prompts went from the bin of their first group (rows) to that of their latest (columns) (Fig. 15)."""
    by_prompt = _with_bins(groups).groupby("prompt")["bin"].agg(["first", "last", "size"])
    again = by_prompt[by_prompt["size"] > 1]
    bins = range(group_size(groups) + 1)
    return pd.crosstab(again["first"], again["last"]).reindex(index=bins, columns=bins, fill_value=0)


def movement(counts: pd.DataFrame) -> tuple[int, int, int]:
    """How many prompts of a `migration` are worse, the same, and better than at first."""
    cells = counts.to_numpy()
    return int(np.tril(cells, -1).sum()), int(np.trace(cells)), int(np.triu(cells, 1).sum())


class HardPrompts(NamedTuple):
    """Numbers of the prompts whose first group had no right response: of all, and of those that had more later."""

    prompts: int
    retries: int  # a later group
    solutions: int  # a later group with a right response
    latest_solutions: int  # a right response in the latest group


def hard_prompts(groups: pd.DataFrame) -> HardPrompts:
    """What became of the prompts that were not solved at first (Fig. 7)."""
    if groups.empty:
        return HardPrompts(0, 0, 0, 0)
    by_prompt = groups.dropna(subset="mean").groupby("prompt")["mean"].agg(["first", "max", "last", "size"])
    hard = by_prompt[by_prompt["first"] == 0]
    return HardPrompts(len(hard), *(int(part.sum()) for part in (hard["size"] > 1, hard["max"] > 0, hard["last"] > 0)))


def hard_prompts_in_words(groups: pd.DataFrame) -> str:
    """A sentence or more about `hard_prompts`; empty if each prompt was solved at first."""
    prompts, retries, solutions, latest = hard_prompts(groups)
    if not prompts:
        return ""
    text = f"{prompts:,} prompts had no right response in their first group, and "
    if not retries:
        return text + "none of them was asked again."
    text += (
        f"{retries:,} of them were asked again. A later group solved {solutions:,} of these "
        f"({solutions / retries:.0%}), the latest group {latest:,} ({latest / retries:.0%})."
    )
    fresh = groups[groups["source"] == "fresh"]
    return text if len(fresh) < PAPER_PASSES * fresh["prompt"].nunique() else f"{text} {PAPER}."
