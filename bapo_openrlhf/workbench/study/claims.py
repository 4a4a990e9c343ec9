"""The verdict on each claim of a study: whether its runs support it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas

from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.pages.text import number
from bapo_openrlhf.workbench.study.data import ROLLOUTS, RUN, Results
from bapo_openrlhf.workbench.study.definition import Claim
from bapo_openrlhf.workbench.study.statistics import Estimate, mean_interval, ratio_interval

DIFFERENCES = ("accuracy", "solved")  # these measures are shares, which are compared by their difference
WORDS = {True: "holds", False: "does not hold", None: "undecided"}
NO_WIDTH = 1e-9  # an interval that is narrower than this has no width


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim, with the numbers that it rests on.

    Attributes:
        target: The accuracy to reach if the measure is rollouts_to; None for other measures.
        effect: The difference `better` - `than` (accuracy, solved) or the ratio `better` / `than` (rollouts,
            rollouts_to) over the pairs of runs of the same seed. None if there is no pair.
        better, than: The mean of the measure over the pairs, for each of the two arms. For rollouts and rollouts_to it
            is the geometric mean. None if there is no pair.
        holds: Whether the claim holds; None if that is undecided.
        notes: What a reader has to know about the numbers.
    """

    claim: Claim
    target: float | None
    effect: Estimate | None
    better: float | None
    than: float | None
    holds: bool | None
    notes: Sequence[str] = ()


def judge(results: Results) -> list[Verdict]:
    """A verdict on each claim; a claim of the measure rollouts_to gets one for each target.

    A claim holds if the whole 95 % interval supports it, fails if the whole interval contradicts it, and is undecided
    otherwise. "Better" means a difference above 0, or a ratio of rollouts below 1. "About equal" means that the effect
    is within the margin.
    """
    return [
        _judge(results, claim, target)
        for claim in results.study.claims
        for target in (results.study.targets if claim.measure == "rollouts_to" else [None])
    ]


def _judge(results: Results, claim: Claim, target: float | None) -> Verdict:
    if unknown := [name for name in (claim.better, claim.than) if name not in results.by_arm]:
        return Verdict(claim, target, None, None, None, None, [f"the study has no arm {', '.join(unknown)}"])
    if claim.measure == "rollouts_to":
        return _judge_reaching(results, claim, target or 0.0)
    verdict = _compare(claim, target, _pairs(results.measure(claim.measure), claim).dropna())
    effect = verdict.effect
    if claim.measure in DIFFERENCES and effect and effect.count > 1 and effect.high - effect.low < NO_WIDTH:
        return replace(verdict, holds=None, notes=["all pairs differ by the same amount, so their spread is unknown"])
    return verdict


def _pairs(values: pandas.Series, claim: Claim) -> pandas.DataFrame:
    """A number of each run, index (arm, seed), as one row per seed with the columns better and than."""
    sides = values.unstack("arm").reindex(columns=[claim.better, claim.than]).sort_index()
    return sides.set_axis(["better", "than"], axis=1)


def _judge_reaching(results: Results, claim: Claim, target: float) -> Verdict:
    """The verdict on rollouts until the target.

    A run that never reached the target needed more rollouts than it generated. Its total stands for this number. If the
    other run of the pair did reach the target, the difference then looks smaller than it is, or even turns around.
    Therefore such a pair never decides in favour of the arm that did not reach the target.
    """
    usable = results.numbers[results.numbers["finished"]].index.intersection(results.accuracy.set_index(RUN).index)
    seeds = _pairs(pandas.Series(1.0, usable), claim).dropna().index
    spent, reached = (
        _pairs(values, claim).reindex(seeds)
        for values in (results.numbers["rollouts"], results.until(target, ROLLOUTS))
    )
    neither = reached.isna().all(axis=1)
    missed = reached[~neither].isna().sum()
    verdict = _compare(claim, target, reached[~neither].fillna(spent).dropna())
    notes = list(verdict.notes)
    for side, name in (("better", claim.better), ("than", claim.than)):
        if missed[side]:
            notes.append(
                f"{results.labels[name]} did not get there in {missed[side]} pair(s): all its rollouts stand for it"
            )
    if neither.any():
        notes.append(f"neither got there in {neither.sum()} pair(s), left out")
    in_doubt = (missed["better"] and verdict.holds) or (missed["than"] and verdict.holds is False)
    in_doubt = in_doubt or (claim.margin and missed.any())
    return replace(verdict, holds=None if in_doubt else verdict.holds, notes=notes)


def _compare(claim: Claim, target: float | None, pairs: pandas.DataFrame) -> Verdict:
    """The verdict that the interval of the pairs' differences or ratios gives."""
    if claim.measure in DIFFERENCES:
        interval, effects, equal, sign = mean_interval, pairs["better"] - pairs["than"], 0.0, 1
    else:
        pairs = pairs[(pairs > 0).all(axis=1)]  # 0: the target was reached before training
        interval, effects, equal, sign = ratio_interval, pairs["better"] / pairs["than"], 1.0, -1
    effect, *sides = (interval(values) for values in (effects, pairs["better"], pairs["than"]))
    better, than = (side.value if side else None for side in sides)
    notes = [] if len(pairs) else ["no pair of runs of the same seed has it"]
    if len(pairs) == 1:
        notes.append("one pair: no interval")
    return Verdict(claim, target, effect, better, than, _holds(effect, equal, sign, claim.margin), notes)


def _holds(effect: Estimate | None, equal: float, sign: int, margin: float) -> bool | None:
    """Whether the interval supports the claim. `sign` is 1 if more is better, and -1 if less is better."""
    if effect is None or effect.low is None or effect.high is None:
        return None
    low, high = effect.low - equal, effect.high - equal
    if margin:
        if -margin <= low and high <= margin:
            return True
        return False if low > margin or high < -margin else None
    low, high = (low, high) if sign > 0 else (-high, -low)
    if low > 0:
        return True
    return False if high <= 0 else None


# ── in words ──


def table_of(results: Results) -> Table:
    """The verdicts in words and numbers, one row per claim."""
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
        sentence(verdict),
        claim.source,
        WORDS[verdict.holds],
        *effect_in_words(verdict),
        f"× {claim.ratio:.2f}" if claim.ratio is not None else "–",
        *sides,
        str(effect.count if effect else 0),
        "; ".join(verdict.notes) or "–",
    ]


def sentence(verdict: Verdict) -> str:
    """The claim in words, with the target if it has one."""
    return verdict.claim.says + (f" (until {verdict.target:.1%})" if verdict.target is not None else "")


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
    """A share in percent, or a number of rollouts."""
    if value is None:
        return "–"
    return f"{value:.1%}" if measure in DIFFERENCES else number(round(value))
