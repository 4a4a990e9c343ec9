"""What a run that trained nothing must say at its end."""

from collections.abc import Mapping, Sequence
from typing import Any

from bapo_openrlhf.adapt.advantage import GROUP_ESTIMATORS
from bapo_openrlhf.adapt.rewards import same_reward
from bapo_openrlhf.adapt.vocabulary import ENDS
from bapo_openrlhf.record.run_record import ANSWERS, REWARD

UNTRAINED = 3  # status of a run that came to its end and trained nothing


def nothing_trained(rows: Sequence[Mapping[str, Any]], estimator: str) -> str | None:
    """Why a run of these steps and this `algo.advantage.estimator` trained nothing. None if it did, or made no step."""
    if not rows:
        return None
    steps = "the only step" if len(rows) == 1 else f"each of {len(rows)} steps"
    means = {row[REWARD] for row in rows if row.get(REWARD) is not None}
    without = all(row.get("groups/with_signal") == 0 and not row.get("demonstrations/trained") for row in rows)
    if all(row.get("skipped_update") for row in rows):
        what = f"nothing was trained: the batch was empty in {steps}"
    elif without and (estimator in GROUP_ESTIMATORS or (len(means) == 1 and not any(map(_differ, rows)))):
        what = f"nothing was learned in {steps}"
    else:
        return None
    generated = f"{_total(rows, 'groups/generated')} groups were generated"
    if without:
        spread = " to ".join(f"{mean:g}" for mean in sorted({min(means), max(means)})) if means else "unknown"
        why = f"in each group all rewards were equal (mean reward {spread}), and only differences carry a signal"
        look = f"Read some of the responses in {ANSWERS}" if {*means} == {0} else "Look at the reward function"
        return f"{what}. {generated}; {why}. {look}, or take prompts of another difficulty"
    ends = ", ".join(f"{count} {end.replace('_', ' ')}" for end in ENDS if (count := _total(rows, f"groups/{end}")))
    return f"{what}. {generated}: {ends}"


def _differ(row: Mapping[str, Any]) -> bool:
    """Whether the rewards of a batch differ, by more than rounding. A step without an update has none."""
    mean, deviation = (row.get(f"rollout/reward_{name}") or 0.0 for name in ("mean", "std"))
    return not same_reward(mean, mean + deviation)


def _total(rows: Sequence[Mapping[str, Any]], key: str) -> int:
    return int(sum(row.get(key) or 0 for row in rows))
