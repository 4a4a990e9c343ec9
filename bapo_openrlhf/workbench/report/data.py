"""The numbers of the report's tables: what became of the groups, and what the runs spent."""

from collections.abc import Mapping, Sequence
from typing import Any

from bapo_openrlhf.adapt.vocabulary import REASONS
from bapo_openrlhf.record.run_record import REWARD, SOURCES, phase_seconds
from bapo_openrlhf.workbench.pages.colours import PHASE_LABELS, STATE_LABELS
from bapo_openrlhf.workbench.pages.curves import smoothed
from bapo_openrlhf.workbench.report.runs import Run

ALL_SECONDS = "time of all steps"


def outcomes(run: Run) -> dict[str, int]:
    """How many generated groups ended in each of STATE_LABELS. States that never occurred are left out.

    The numbers come from the metrics. Why the filter dropped a group is in filtered/*, in older runs only in
    groups.jsonl, and otherwise unknown.
    """
    counts = {state: run.total(f"groups/{state}") for state in STATE_LABELS if state not in REASONS}
    reasons = {reason: run.total(f"filtered/{reason}") for reason in REASONS}
    if not sum(reasons.values()) and not run.groups.empty:
        means = run.groups.loc[run.groups["state"] == "filtered", "mean"]
        none, every = int((means == 0).sum()), int((means == 1).sum())
        reasons = {"none_right": none, "all_right": every, "by_draw": len(means) - none - every}
    counts |= reasons
    counts["filtered"] = max(0, counts["filtered"] - sum(reasons.values()))
    return {state: round(counts[state]) for state in STATE_LABELS if counts[state]}


def cost(run: Run) -> dict[str, float | None]:
    """What a run spent, by the names on the page (Table 2 and Fig. 9); None if the record does not say it.

    It trained on the tokens of responses and of worked solutions, in each epoch.
    """
    totals = ("rollouts/total", "tokens/generated_total", "tokens/trained_total")
    responses, generated, trained = (next(reversed(run.curve(total).to_list()), None) for total in totals)
    epochs = run.config.get("train.max_epochs") or 1
    return {
        "trainer steps": len(run.rows),
        "responses generated": responses,
        "tokens generated": generated,
        "tokens trained on": None if trained is None else (trained + run.total("demonstrations/tokens")) * epochs,
        "groups trained on": round(sum(run.total(f"groups/{source}") for source in SOURCES)),
        ALL_SECONDS: phase_seconds(run.rows).get("step_total"),
    }


def all_phases(runs: Sequence[Run]) -> list[str]:
    """The phases that a step may have, in its order, and then those that only the runs have."""
    there = dict.fromkeys([*PHASE_LABELS, *(phase for run in runs for phase in phase_seconds(run.rows))])
    return [phase for phase in there if phase != "step_total"]


def spent_until(run: Run, metric: str, reward: float) -> float | None:
    """The value of a running total when the smoothed reward first reached `reward`; None if it never did."""
    curve = smoothed(run.curve(REWARD, over=metric))
    reached = curve.index[curve >= reward]
    return float(reached[0]) if len(reached) else None


def best_smoothed(run: Run) -> float | None:
    """The highest smoothed reward of a run; None if it has no reward."""
    curve = run.curve(REWARD)
    return None if curve.empty else float(smoothed(curve).max())


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The sorted names of the flags whose values are not the same in all runs. A run may also lack the flag."""
    names = sorted({name for config in configs for name in config})
    return [name for name in names if any(name not in one or one[name] != configs[0].get(name) for one in configs)]
