"""What the batches of decision_design.md's arms were made of: how much replay, how far away, and which share of the
variance of rewards is between prompts.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from bapo_openrlhf.workbench.study.data import RUN, Results

AGAIN = ("groups/reevaluated", "groups/replayed")  # X2 and X3, the groups trained on in a step


def doses(results: Results) -> pd.DataFrame:
    """X2 and X3 in the batches of each arm that has any.

    Returns:
        A row for each arm: label; responses generated and groups trained on in a run; X2 and X3, their shares of these
        groups in per cent; and the mean TV distances of fresh and of replayed groups, each group counted once.
    """
    rows = []
    for arm in results.arms:
        steps = results.steps[results.steps["arm"] == arm.name]
        fresh, x2, x3 = (steps[name].fillna(0) for name in ("groups/fresh", *AGAIN))
        runs, trained = len(steps.groupby(RUN)), (fresh + x2 + x3).sum()
        if (x2 + x3).sum():
            rows.append({
                "label": results.labels[arm.name], "responses": steps["rollouts/step"].sum() / runs,
                "groups": trained / runs, "X2, %": 100 * x2.sum() / trained, "X3, %": 100 * x3.sum() / trained,
                "TV fresh": weighted(steps, "tv/fresh", fresh), "TV X3": weighted(steps, "tv/replayed", x3),
            })  # fmt: skip
    return pd.DataFrame(rows)


def weighted(steps: pd.DataFrame, metric: str, groups: pd.Series) -> float:
    """Mean of a metric over groups: each step counts by its number. nan if no step has it."""
    values = steps.reindex(columns=[metric])[metric]
    weights = groups.where(values.notna(), 0)
    return float((values * weights).sum() / weights.sum()) if weights.sum() else np.nan


def between_prompts(results: Results) -> pd.DataFrame:
    """The share of the variance of rewards that is between the prompts of a step, in the fresh groups trained on.

    With k responses to each prompt, the mean square between prompts has the expectation W + k B, and that within
    prompts W, so both give an unbiased estimate of B. The share is B / (B + W), with their means over the steps of the
    second half of all runs. A reward counts as 0 or 1; one group in fifty has a mean that is no multiple of 1/k.

    Returns:
        A row for each arm that has a step with two groups: label, steps, and share in per cent.
    """
    rows = []
    for arm in results.arms:
        of_arm = [run.run.groups.assign(seed=run.seed) for run in results.by_arm[arm.name]]
        groups = pd.concat(of_arm).query("state == 'fresh'")
        groups = groups[groups["step"] > groups["step"].max() / 2]
        parts = [components(of_step["mean"], of_step["responses"]) for _, of_step in groups.groupby(["seed", "step"])]
        if known := [part for part in parts if part]:
            between, within = np.mean(known, axis=0)
            share = 100 * between / (between + within)
            rows.append({"label": results.labels[arm.name], "steps": len(known), "share": share})
    return pd.DataFrame(rows)


def components(means: pd.Series, sizes: pd.Series) -> tuple[float, float] | None:
    """Unbiased variance between and within groups of equal size whose values are 0 or 1; None with fewer than two."""
    if len(means) < 2 or sizes.nunique() > 1:
        return None
    size = sizes.iloc[0]
    within = (means * (1 - means)).mean() * size / (size - 1)
    return means.var(ddof=1) - within / size, within
