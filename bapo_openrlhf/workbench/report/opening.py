"""The sentence that a report begins with: what a run learned, or which of several runs reached a level first.

The level is the highest smoothed reward that every run reached. A difference is noise if it is at most two standard
errors. The error comes from the changes of the reward from step to step, so a trend does not count as noise.
"""

import math
from collections.abc import Callable, Sequence

from bapo_openrlhf.record.outcome import nothing_trained
from bapo_openrlhf.record.run_record import REWARD, change_in_words, end_means
from bapo_openrlhf.workbench.pages.charts import smoothed
from bapo_openrlhf.workbench.pages.text import duration, many, number, smoothing_width
from bapo_openrlhf.workbench.report.runs import Run
from bapo_openrlhf.workbench.report.tables import ALL_SECONDS, cost_of, differing

TASK = ("data.prompt_dataset", "reward.remote_url", "train.agent_func_path")
# What a run spends: the metric, the words for a share of it and for an equal amount, and how it is written.
COSTS = (
    ("seconds", "in {} of the time of {} ({} instead of {})", "in about the time of {} ({} and {})", duration),
    (
        "rollouts/total",
        "with {} of the responses of {} ({} instead of {})",
        "with about as many responses as {} ({} and {})",
        number,
    ),
)


def opening(runs: Sequence[Run]) -> str:
    """One sentence about one run, or what the comparison of several comes to."""
    reasons = {run.name: nothing_trained(run.rows, run.config.get("algo.advantage.estimator", "")) for run in runs}
    if sentences := [f"{name}: {why}." for name, why in reasons.items() if why]:
        return " ".join(sentences)
    if names := [run.name for run in runs if run.curve(REWARD).empty]:
        listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        return f"{listed}: no reward is recorded, so nothing can be said about learning."
    return _comparison(runs) if len(runs) > 1 else _change(runs[0])


def spent_until(run: Run, metric: str, reward: float) -> float | None:
    """The value of a running total when the smoothed reward first reached `reward`; None if it never did."""
    curve = smoothed(run.curve(REWARD, over=metric))
    totals = curve.index[curve >= reward]
    return float(totals[0]) if len(totals) else None


def _change(run: Run) -> str:
    rewards = run.curve(REWARD)
    first, last, count = end_means(rewards)
    if len(rewards) < 2:
        return f"{run.name} has one reward so far, {first:.3g}, so nothing can be said about learning yet."
    responses, seconds = cost_of(run)["responses generated"], cost_of(run)[ALL_SECONDS]
    cost = many(len(run.rows), "step")
    cost += f", which took {duration(seconds)}" if seconds else ""
    cost += f"{',' if seconds else ''} and {number(responses)} responses" if responses else ""
    ends = f"{first:.3g} (first {many(count, 'step')}) to {last:.3g} (last {many(count, 'step')})"
    what = "rose" if last > first else "fell" if last < first else "went"
    chance = ", which may be chance," if abs(last - first) <= 2 * _noise(run, count) * math.sqrt(2) else ""
    held_out = change_in_words(run.evaluations)
    subject = f"held-out {held_out}; the mean reward of training" if held_out else "the mean reward"
    return f"{run.name}: {subject} {what} from {ends}{chance} in {cost}."


def _noise(run: Run, steps: int) -> float:
    """Standard error of the mean reward of so many steps."""
    return math.sqrt((run.curve(REWARD).diff() ** 2).mean() / 2 / steps)


def _smoothed_noise(run: Run) -> float:
    return _noise(run, smoothing_width(len(run.curve(REWARD))))


def _comparison(runs: Sequence[Run]) -> str:
    inputs = [run.metadata["inputs"] for run in runs if "inputs" in run.metadata]  # digests of what they learned from
    if other := differing([{name: of_run.get(name) for name in TASK} for of_run in inputs]):
        return f"The runs have different tasks (--{', --'.join(other)}), so their rewards are not compared."
    curves = [smoothed(run.curve(REWARD)) for run in runs]
    for run, curve in zip(runs, curves, strict=True):
        if not curve.max() - curve.iloc[0] > 2 * _smoothed_noise(run) * math.sqrt(2):
            highest = ", ".join(f"{curve.max():.3g} ({run.name})" for run, curve in zip(runs, curves, strict=True))
            return (
                f"{run.name} never rose above its first reward ({curve.iloc[0]:.3g}) by more than chance explains, so "
                f"there is no level that all runs learned to reach. The highest smoothed rewards are {highest}."
            )
    level = min(curve.max() for curve in curves)
    costs = [cost for cost in COSTS if all(spent_until(run, cost[0], level) is not None for run in runs)]
    if not costs:
        return f"All runs reached a mean reward of {level:.3g}, but neither times nor responses are recorded."
    first, *others = sorted(runs, key=lambda run: spent_until(run, costs[0][0], level))  # type: ignore[arg-type,return-value]
    parts = [" and ".join(_share(first, other, level, *cost) for cost in costs) for other in others]
    counts = [len(run.rows) for run in runs]
    lengths = f" The runs have different numbers of steps: {', '.join(map(str, counts))}." if len({*counts}) > 1 else ""
    return (
        f"{first.name} reached a mean reward of {level:.3g} {'; '.join(parts)}. {level:.3g} is the highest smoothed "
        f"reward that every run reached.{lengths}"
    )


def _share(
    first: Run, other: Run, level: float, metric: str, share: str, equal: str, words: Callable[[float], str]
) -> str:
    """What the first run spent until the level, as a share of the other's; equal if the slower was near it by then."""
    mine, its = (spent_until(run, metric, level) or 0.0 for run in (first, other))
    curve = smoothed((other if its > mine else first).curve(REWARD, over=metric))  # of the slower
    rewards = curve[curve.index <= min(mine, its)]
    noise = math.hypot(_smoothed_noise(first), _smoothed_noise(other))
    if len(rewards) and rewards.iloc[-1] >= level - 2 * noise:
        return equal.format(other.name, words(mine), words(its))
    return share.format(f"{mine / its:.2f}", other.name, words(mine), words(its))
