"""The verdict on each claim of a study: whether its runs support it."""

from collections.abc import Sequence
from dataclasses import dataclass

from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.pages.text import number
from bapo_openrlhf.workbench.study.data import Results
from bapo_openrlhf.workbench.study.definition import Claim
from bapo_openrlhf.workbench.study.statistics import Estimate, mean_interval, ratio_interval

DIFFERENCES = ("accuracy", "curve", "solved")  # these measures are shares, which are compared by their difference
WORDS = {True: "holds", False: "does not hold", None: "undecided"}
NO_WIDTH = 1e-9  # an interval that is narrower than this has no width


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim, and its numbers, which are None if there is no pair of runs of the same seed."""

    claim: Claim
    effect: Estimate | None = None  # over the pairs: `better` - `than`, or for rollouts `better` / `than`
    better: float | None = None  # mean over the pairs, for rollouts the geometric one
    than: float | None = None
    holds: bool | None = None  # None if that is undecided
    notes: Sequence[str] = ()  # what a reader has to know about the numbers


def judge(results: Results) -> list[Verdict]:
    """A verdict on each claim: it holds if the whole 95 % interval supports it, and fails if all of it contradicts it.

    "Better" is a difference above 0, or a ratio of rollouts below 1. "About equal" is an effect within the margin.
    """
    return [_judge(results, claim) for claim in results.study.claims]


def _judge(results: Results, claim: Claim) -> Verdict:
    if unknown := [name for name in (claim.better, claim.than) if name not in results.by_arm]:
        return Verdict(claim, notes=[f"the study has no arm {', '.join(unknown)}"])
    arms = [claim.better, claim.than]
    sides = results.measure(claim.measure, arms).unstack("arm").reindex(columns=arms).sort_index()
    pairs = sides.set_axis(["better", "than"], axis=1).dropna()  # a row for each seed
    if claim.measure in DIFFERENCES:
        interval, effects, equal, sign = mean_interval, pairs["better"] - pairs["than"], 0.0, 1
    else:
        interval, effects, equal, sign = ratio_interval, pairs["better"] / pairs["than"], 1.0, -1
    effect, *means = (interval(values) for values in (effects, pairs["better"], pairs["than"]))
    better, than = (side.value if side else None for side in means)
    holds, notes = _holds(effect, equal, sign, claim.margin), []
    if len(pairs) < 2:
        notes = ["one pair: no interval" if len(pairs) else "no pair of runs of the same seed has it"]
    elif claim.measure in DIFFERENCES and effect.high - effect.low < NO_WIDTH:
        holds, notes = None, ["all pairs differ by the same amount, so their spread is unknown"]
    return Verdict(claim, effect, better, than, holds, notes)


def _holds(effect: Estimate | None, equal: float, sign: int, margin: float) -> bool | None:
    """Whether the interval supports the claim. `sign` is 1 if more is better, and -1 if less is better."""
    if effect is None or effect.low is None:
        return None
    low, high = sorted((sign * (effect.low - equal), sign * (effect.high - equal)))
    supports, contradicts = low > 0, high <= 0
    if margin:
        supports, contradicts = -margin <= low and high <= margin, low > margin or high < -margin
    return True if supports else False if contradicts else None


# ── in words ──


def claims_table(results: Results) -> Table:
    head = ["claim", "source", "verdict", "measured", "95 % interval", "claimed", "better", "than", "pairs", "notes"]
    rows = [_row(results, verdict) for verdict in judge(results)]
    return Table.of(head, rows, "Claims and what was measured, over pairs of runs of the same seed")


def _row(results: Results, verdict: Verdict) -> list[str]:
    claim, effect = verdict.claim, verdict.effect
    sides = [
        f"{results.labels.get(name, name)}: {value_in_words(claim.measure, value)}"
        for name, value in ((claim.better, verdict.better), (claim.than, verdict.than))
    ]
    return [
        claim.says,
        claim.source,
        WORDS[verdict.holds],
        *effect_in_words(verdict),
        f"× {claim.ratio:.2f}" if claim.ratio is not None else "–",
        *sides,
        str(effect.count if effect else 0),
        "; ".join(verdict.notes) or "–",
    ]


def effect_in_words(verdict: Verdict) -> tuple[str, str]:
    """The effect and its interval: percentage points, or ratios."""
    effect = verdict.effect
    if effect is None:
        return "–", "–"
    sign, words, unit = "× ", "{:.3g}".format, ""
    if verdict.claim.measure in DIFFERENCES:
        sign, words, unit = "", lambda value: f"{100 * value:+.1f}", " points"
    interval = "–" if effect.low is None else f"{sign}{words(effect.low)} to {words(effect.high)}"
    return f"{sign}{words(effect.value)}{unit}", interval


def value_in_words(measure: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1%}" if measure in DIFFERENCES else number(round(value))
