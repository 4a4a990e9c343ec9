"""Sentences for `watch` and `report`: what the study of docs/results.md found about groups like those of a run.

A run beyond the limits may learn well, so the sentences are no warnings. FARTHEST_SHIFT was found with replayed
groups, which had been trained on before. Groups that had not are worth half of a fresh one up to a TV distance of
0.16. Looking at a run needs no numpy, so this file imports none.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bapo_openrlhf.workbench.pages.text import is_number

MOST_USES = 1  # earlier steps that trained on a replayed group: after one, its gradient points less far than without
# Shifts, found with responses of 62 tokens on average:
FARTHEST_SHIFT = 1.3e-4  # shift on replayed groups: beyond it, they point less than half as far as fresh ones
STALEST_SHIFT = 1.1e-4  # the same of fresh groups, on average: twice as much cost 3.5 points
LIMITS = {
    "replayed": (
        FARTHEST_SHIFT,
        f"a group beyond a shift of {FARTHEST_SHIFT:.1e} was worth less than half a fresh one. "
        "--adapt.max_shift_replayed leaves such groups out, and a smaller learning rate brings them nearer",
    ),
    "fresh": (
        STALEST_SHIFT,
        f"about twice {STALEST_SHIFT:.1e} cost 3.5 points of accuracy. A smaller --adapt.rollout_delay brings them "
        "nearer, and --adapt.max_shift_rollout syncs when they are too far",
    ),
}  # by source: the limit of the mean shift, and what was found beyond it


def staleness_findings(rows: Sequence[Mapping[str, Any]], steps: str) -> list[str]:
    """Sentences about sources whose mean shift or uses in these rows, which are called `steps`, were beyond a limit."""
    sentences = []
    for source, (limit, finding) in LIMITS.items():
        shift, distance = (_mean(rows, source, f"{metric}/{source}") for metric in ("shift", "tv"))
        if shift is not None and shift > limit:
            tv = "" if distance is None else f" and a TV distance of {distance:.2g}"
            sentences.append(
                f"{source} groups were at a mean shift of {shift:.1e}{tv} in {steps}. "
                f"In our study, with 62 tokens a response, {finding}."
            )
    uses = _mean(rows, "replayed", "staleness/replayed_uses_mean")
    if uses is not None and uses > MOST_USES:
        sentences.append(
            f"replayed groups had been trained on in {uses:.1f} earlier steps on average in {steps}. In our study, "
            "groups of the last 3 steps that were trained on once pointed 0.89 as far as others with a learning rate "
            "of 2e-5, and 0.29 with 1e-4. A smaller --adapt.replay_steps uses each less often."
        )
    return sentences


def _mean(rows: Sequence[Mapping[str, Any]], source: str, metric: str) -> float | None:
    pairs = [(row.get(f"groups/{source}"), row.get(metric)) for row in rows]
    pairs = [(groups, value) for groups, value in pairs if is_number(groups) and is_number(value)]
    total = sum(groups for groups, _ in pairs)
    return sum(groups * value for groups, value in pairs) / total if total else None
