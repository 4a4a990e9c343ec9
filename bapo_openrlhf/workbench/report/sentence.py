"""The first sentences of a report: which run learned how fast."""

from collections.abc import Sequence

from bapo_openrlhf.record.run_record import REWARD
from bapo_openrlhf.workbench.pages.text import duration, many, number
from bapo_openrlhf.workbench.report import data
from bapo_openrlhf.workbench.report.runs import Run

TASK = "data.prompt_dataset"  # runs with different values of this flag have rewards of different tasks
COSTS = {"seconds": "time", "rollouts/total": "responses"}


def first_sentences(runs: Sequence[Run]) -> str:
    """What the runs say in two or three sentences.

    Several runs of one task are compared at the highest smoothed reward that every one of them reached.
    """
    silent = [run.name for run in runs if data.best_smoothed(run) is None]
    if silent:
        return f"No reward is recorded of {', '.join(silent)}, so this page cannot say how fast the runs learned."
    if len(runs) == 1:
        return _alone(runs[0])
    if data.differing([{TASK: run.config.get(TASK)} for run in runs]):
        return f"These runs have different tasks ({TASK}), so their rewards are not compared."
    level = min(data.best_smoothed(run) or 0.0 for run in runs)
    return " ".join([
        f"Every run reached a reward of {level:.3f} (smoothed); at least one of them never got higher.",
        *(_against(runs[0], run, level) for run in runs[1:]),
        "Each is a single run, and another seed may change the order.",
    ])  # fmt: skip


def _alone(run: Run) -> str:
    first, last = data.end_means(run.curve(REWARD))
    cost = data.cost(run)
    responses, seconds = cost["responses generated"], cost[data.ALL_SECONDS]
    spent = [f"{number(responses)} responses"] if responses is not None else []
    spent += [duration(seconds)] if seconds is not None else []
    words = f"The mean reward of {run.name} went from {first:.3f} to {last:.3f} in {many(len(run.rows), 'step')}"
    return f"{words} ({' and '.join(spent)})." if spent else f"{words}."


def _against(base: Run, run: Run, level: float) -> str:
    """When a run reached the level, against the base. A cost that is not recorded in both is left out."""
    parts = []
    for metric, name in COSTS.items():
        its, of = (data.spent_until(one, metric, level) for one in (run, base))
        if its is not None and of:
            shown = duration if name == "time" else number
            parts.append(f"{its / of:.2f} of the {name} ({shown(its)} instead of {shown(of)})")
    if not parts:
        return f"The costs of {run.name} and {base.name} until then are not recorded."
    return f"{run.name} took {' and '.join(parts)} that {base.name} took."
