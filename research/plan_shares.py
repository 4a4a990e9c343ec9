"""Shares of groups and mean lengths, read from a run's record. `plan.py` predicts with them."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import pandas as pd

from bapo_openrlhf.adapt.thresholds import AdaptiveThresholds
from bapo_openrlhf.record.run_record import read_groups, read_metrics, read_run
from bapo_openrlhf.workbench.planning.workload import Workload

Rows = Sequence[Mapping[str, Any]]


def measured_values(directory: str | os.PathLike[str], workload: Workload) -> dict[str, float]:
    """The constants of a plan that a run's record has, by name.

    Args:
        directory: The folder of a run with any algorithm whose groups have rewards.
        workload: Its thresholds decide which groups count as hard, replayable or improved.
    """
    groups = [row for row in read_groups(directory) if row.get("mean") is not None]
    return shares_of(groups, workload) | lengths_of(read_metrics(directory), read_run(directory)["config"])


def shares_of(groups: Rows, workload: Workload) -> dict[str, float]:
    """Shares of fresh groups, and shares of hard prompts that were tried again.

    Args:
        groups: The groups of one run in order. Each has step, prompt, source and mean; rewards are 0 or 1.
    """
    fresh = [row for row in groups if row["source"] == "fresh"]
    means = [row["mean"] for row in fresh]
    signal = [mean for mean in means if 0 < mean < 1]
    adapt = workload.args.adapt
    c1, middle, width = adapt.thresholds()[0], adapt.gaussian_mean, adapt.gaussian_std
    shares = {
        "signal_share": len(signal) / len(means),
        "hard_share": sum(mean <= c1 for mean in means) / len(means),
        "replayable_share": _replayable(fresh, workload),
    }
    if signal:
        shares["gaussian_share"] = statistics.fmean(math.exp(-(((m - middle) / width) ** 2) / 2) for m in signal)
    tried = [row["mean"] for row in groups if row["source"] == "reevaluated"]
    if not tried:  # Prompts that came again after they had been hard show what a re-evaluation would find.
        frame = pd.DataFrame(fresh)
        was_hard = (frame["mean"] <= c1).groupby(frame["prompt"]).shift(fill_value=False)
        tried = frame.loc[was_hard, "mean"].tolist()
    if tried:
        shares["leaving_share"] = sum(mean > c1 for mean in tried) / len(tried)
        shares["improved_share"] = sum(c1 < mean < 1 for mean in tried) / len(tried)
    return shares


def _replayable(fresh: Rows, workload: Workload) -> float:
    """Share of the last steps' groups whose mean is within c2 and c3, both of their own step and of today."""
    adapt, limits = workload.args.adapt, {}
    _, c2, c3 = adapt.thresholds()
    by_step = pd.DataFrame(fresh).groupby("step")["mean"].agg(list)
    for step, means in by_step.items():
        thresholds = AdaptiveThresholds(c2, c3, direction=adapt.threshold_direction)
        thresholds.update(Fraction(statistics.fmean(means)))
        limits[step] = (thresholds.c2, thresholds.c3)
    inside = [
        all(low <= mean <= high for low, high in (limits[step], limits[last]))
        for last in limits
        for step in range(last - adapt.replay_steps, last)
        for mean in by_step.get(step, [])
    ]
    return sum(inside) / len(inside) if inside else 0.0


def lengths_of(metrics: Rows, config: Mapping[str, Any]) -> dict[str, float]:
    """Mean lengths of responses and prompts, as shares of the longest that the run's own flags allow."""
    longest = config.get("rollout.max_new_tokens") or config.get("data.max_len")
    tokens = sum(row.get("tokens/generated") or 0 for row in metrics)
    responses = sum(row.get("rollouts/step") or 0 for row in metrics)
    if not longest or not responses:
        return {}
    shares = {"response_share": tokens / responses / longest}
    prompt_limit = (config.get("data.max_len") or 0) - longest
    prompts = [
        row["total_length"] - row["response_length"]
        for row in metrics
        if row.get("total_length") is not None and row.get("response_length") is not None
    ]
    if prompts and prompt_limit > 0:
        shares["prompt_share"] = min(statistics.fmean(prompts) / prompt_limit, 1.0)
    return shares
