"""Whether a study's runs bear out what was claimed: a plain verdict on each claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bapo_openrlhf.workbench.report.charts import Table, number
from bapo_openrlhf.workbench.study.data import Results
from bapo_openrlhf.workbench.study.definition import Claim
from bapo_openrlhf.workbench.study.statistics import Estimate, mean_interval, ratio_interval

DIFFERENCES = ("accuracy", "solved")  # shares, compared by their difference; rollouts by their ratio
UNDECIDED = "undecided"
WORDS = {True: "holds", False: "does not hold", None: UNDECIDED}
NO_WIDTH = 1e-9  # an interval that is narrower has none


@dataclass(frozen=True)
class Verdict:
    """A claim, measured.

    Attributes:
        target: the accuracy to reach, of rollouts_to; None for other measures.
        effect: better - than (accuracy, solved), or better / than (rollouts, rollouts_to), over the pairs of runs of
            the same seed; None without a pair.
        better, than: the measure of each arm, averaged over the pairs (rollouts: the geometric mean); None without.
        holds: None where it is undecided.
        notes: what a reader has to know.
    """

    claim: Claim
    target: float | None
    effect: Estimate | None
    better: float | None
    than: float | None
    holds: bool | None
    notes: Sequence[str] = ()


def judge(results: Results) -> list[Verdict]:
    """A verdict on each claim; on one about reaching an accuracy, on each target.

    A claim holds where the whole 95 % interval says so, it does not where the whole interval speaks against it, and is
    undecided else. "Better" is above 0 for differences, below 1 for ratios of rollouts; "about equal" is within the
    margin.
    """
    verdicts = []
    for claim in results.study.claims:
        targets: Sequence[float | None] = results.study.targets if claim.measure == "rollouts_to" else [None]
        verdicts += [_judge(results, claim, target) for target in targets]
    return verdicts


def _judge(results: Results, claim: Claim, target: float | None) -> Verdict:
    unknown = [name for name in (claim.better, claim.than) if name not in results.by_arm]
    if unknown:
        return Verdict(claim, target, None, None, None, None, [f"the study has no arm {', '.join(unknown)}"])
    if claim.measure == "rollouts_to":
        return _judge_reaching(results, claim, target)
    ours, theirs = (results.by_seed(name, claim.measure) for name in (claim.better, claim.than))
    pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    verdict = _compare(claim, target, pairs)
    if claim.measure in DIFFERENCES and verdict.effect and _has_no_width(verdict.effect):
        return replace(verdict, holds=None, notes=["all pairs differ by the same: nothing to judge the spread by"])
    return verdict


def _judge_reaching(results: Results, claim: Claim, target: float | None) -> Verdict:
    """Rollouts until the target. A run that never came there needed more than it generated.

    What it generated stands for it: against a run that came there this makes the difference look smaller, or turns
    it, so such pairs alone never decide in favour of the arm that did not arrive.
    """
    pairs, ours_missed, theirs_missed, neither = [], 0, 0, 0
    sides = [{found.seed: found for found in results.by_arm[name]} for name in (claim.better, claim.than)]
    for seed in sorted(sides[0].keys() & sides[1].keys()):
        found = [side[seed] for side in sides]
        if not all(one.finished and results.accuracy(one) for one in found):
            continue
        reached = [results.until(one, target or 0.0, "rollouts/total") for one in found]
        spent = [results.cost(one).rollouts for one in found]
        if reached == [None, None]:
            neither += 1
            continue
        ours_missed += reached[0] is None
        theirs_missed += reached[1] is None
        values = [spent[side] if reached[side] is None else reached[side] for side in (0, 1)]
        if values[0] is not None and values[1] is not None:
            pairs.append((values[0], values[1]))
    verdict = _compare(claim, target, pairs)
    notes = list(verdict.notes)
    for count, name in ((ours_missed, claim.better), (theirs_missed, claim.than)):
        if count:
            notes.append(f"{results.labels[name]} did not get there in {count} pair(s): all its rollouts stand for it")
    if neither:
        notes.append(f"neither got there in {neither} pair(s), left out")
    in_doubt = (ours_missed and verdict.holds) or (theirs_missed and verdict.holds is False)
    in_doubt = in_doubt or (claim.margin and (ours_missed or theirs_missed))
    return replace(verdict, holds=None if in_doubt else verdict.holds, notes=notes)


def _compare(claim: Claim, target: float | None, pairs: Sequence[tuple[float, float]]) -> Verdict:
    """The verdict by the interval of the pairs' differences or ratios."""
    if claim.measure in DIFFERENCES:
        effect = mean_interval([ours - theirs for ours, theirs in pairs])
        sides = [mean_interval(side) for side in zip(*pairs, strict=True)]
        equal, sign = 0.0, 1
    else:
        pairs = [pair for pair in pairs if min(pair) > 0]  # nothing generated: reached before training
        effect = ratio_interval([ours / theirs for ours, theirs in pairs])
        sides = [ratio_interval(side) for side in zip(*pairs, strict=True)]
        equal, sign = 1.0, -1
    better, than = (side.value for side in sides if side) if sides else (None, None)
    notes = [] if pairs else ["no pair of runs of the same seed has it"]
    if len(pairs) == 1:
        notes.append("one pair: no interval")
    return Verdict(claim, target, effect, better, than, _holds(effect, equal, sign, claim.margin), notes)


def _holds(effect: Estimate | None, equal: float, sign: int, margin: float) -> bool | None:
    """By the interval alone; `sign` is 1 where more is better."""
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


def _has_no_width(effect: Estimate) -> bool:
    return effect.low is not None and effect.high is not None and effect.high - effect.low < NO_WIDTH


# ── in words ──


def table_of(results: Results) -> Table:
    """The verdicts in words and numbers: a row a claim."""
    head = ["claim", "source", "verdict", "measured", "95 % interval", "claimed", "better", "than", "pairs", "notes"]
    rows = [_row(results, verdict) for verdict in judge(results)]
    return Table(head, rows, "Claims and what was measured, over pairs of runs of the same seed")


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
        effect_in_words(verdict),
        interval_in_words(verdict),
        f"× {claim.ratio:.2f}" if claim.ratio is not None else "–",
        *sides,
        str(effect.count if effect else 0),
        "; ".join(verdict.notes) or "–",
    ]


def sentence(verdict: Verdict) -> str:
    """What the claim says, with the target where there are several."""
    return verdict.claim.says + (f" (until {verdict.target:.1%})" if verdict.target is not None else "")


def effect_in_words(verdict: Verdict) -> str:
    """Difference in points, or ratio."""
    if verdict.effect is None:
        return "–"
    if verdict.claim.measure in DIFFERENCES:
        return f"{100 * verdict.effect.value:+.1f} points"
    return f"× {verdict.effect.value:.3g}"


def interval_in_words(verdict: Verdict) -> str:
    """Low to high."""
    effect = verdict.effect
    if effect is None or effect.low is None or effect.high is None:
        return "–"
    if verdict.claim.measure in DIFFERENCES:
        return f"{100 * effect.low:+.1f} to {100 * effect.high:+.1f}"
    return f"× {effect.low:.3g} to {effect.high:.3g}"


def value_in_words(measure: str, value: float | None) -> str:
    """A share in percent, rollouts as they are."""
    if value is None:
        return "–"
    return f"{value:.1%}" if measure in DIFFERENCES else number(round(value))
