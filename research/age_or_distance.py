"""Part 4 of decision_design.md: what groups are worth that were trained on once, beside those that were held out.

The projection of a group is the length of its gradient times the cosine with the reference of its probe, in units of
the mean projection of the fresh groups with its learning rate, as in `replay_probe`. Both halves of a step's groups are
compared in the probe that they share: there they come from one policy, and have been followed by the same updates.
Every interval is over probes, because all groups of a probe share one reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from held_out import held_out
from numpy.typing import ArrayLike
from replay_probe import ALL, EDGES, ratios
from scipy import stats

from bapo_openrlhf.workbench.study.statistics import LEVEL, Estimate

PROBE = ["setting", "seed", "step"]
# What is equal in both halves. TV distances may differ at equal age, because a group that was trained on moves the
# policy on its own responses.
EQUAL = {"age": ["age"], "age and TV distance": ["age", "bin"]}
AGES = ((1, 3), (4, 7))  # steps: the ages that BAPO replays in part 1, and those beyond


def tables(probes: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The tables of part 4 by their titles.

    Args:
        probes: Lines of probes.jsonl, fresh and replayed, with the run's `setting` (its learning rate) and `seed`.
            Those without a cosine are left out. Without any line there is no table.
    """
    if probes.empty:
        return {}
    rows = prepared(probes)
    return {
        "Trained on once, as a share of held out": shares(rows),
        "The same at equal age, by age": shares_by_age(rows),
        "Change of held out projections when the TV distance doubles": trends(rows),
        "Projection as a share of fresh groups', by TV distance": by_distance(rows),
    }


def prepared(probes: pd.DataFrame) -> pd.DataFrame:
    """The lines with `probe`, its number; `trained`, whether their half is trained on; `bin`, that of the TV distance,
    from 0 on; and `projection`."""
    rows = probes.dropna(subset=["cosine", "tv"])
    rows = rows.assign(
        probe=rows.groupby(PROBE).ngroup(),
        trained=~rows["uid"].map(held_out).astype(bool),
        bin=np.digitize(rows["tv"], EDGES[1:-1]),
        projection=rows["cosine"] * rows["norm"],
    )
    unit = rows[rows["source"] == "fresh"].groupby("setting")["projection"].mean()
    rows["projection"] /= rows["setting"].map(unit)
    return rows


def by_setting(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The replayed groups of all settings, and those of each."""
    replayed = rows[rows["source"] == "replayed"]
    return [(ALL, replayed), *replayed.groupby("setting")]


def over_probes(above: ArrayLike, below: ArrayLike, level: float = LEVEL) -> Estimate:
    """The ratio of two sums over probes, with Fieller's interval (1954) of this level.

    A ratio r lies in the interval if the mean over probes of above - r below is not different from 0 by Student's test.
    Unlike the interval of a bootstrap, it stays right if the sum below is hardly known. If that sum is not different
    from 0, no ratio is known, and the interval goes from -inf to inf.

    Args:
        above, below: What each probe adds to the two sums, shape (probes,).
    """
    both = np.array([above, below], dtype=float)
    count = both.shape[1]
    value = float(both[0].sum() / both[1].sum()) if both[1].any() else np.nan
    if count < 2:
        return Estimate(value, -np.inf, np.inf, count)
    limit = stats.t.ppf((1 + level) / 2, count - 1) ** 2 / count
    (aa, ab), (_, bb) = np.outer(both.mean(axis=1), both.mean(axis=1)) - limit * np.cov(both)
    if bb <= 0:  # r is in the interval if bb r^2 - 2 ab r + aa <= 0
        return Estimate(value, -np.inf, np.inf, count)
    half = np.sqrt(max(ab**2 - aa * bb, 0.0))
    return Estimate(value, float((ab - half) / bb), float((ab + half) / bb), count)


def share(rows: pd.DataFrame, strata: Sequence[str], level: float = LEVEL) -> dict[str, float | None]:
    """Projection of groups that were trained on, as a share of that of held out ones with the same `strata`.

    A group counts by the share of the other half in its probe and stratum, so that both halves of a stratum weigh the
    same, and a stratum with one half does not count.

    Args:
        rows: Replayed groups, as `prepared` returns them.
        strata: Columns that are equal in both halves.
        level: That of the interval.

    Returns:
        Of the groups that count: their number in each half, the mean TV distance of each half, and ratio, low and high.
    """
    stratum = ["probe", *strata]
    half = rows.groupby([*stratum, "trained"])["uid"].transform("size")
    weight = 1 - half / rows.groupby(stratum)["uid"].transform("size")
    rows = rows.assign(weight=weight, projection=weight * rows["projection"], tv=weight * rows["tv"])[weight > 0]
    sums = rows.groupby(["probe", "trained"])[["weight", "projection", "tv"]].sum().unstack("trained")
    sums = sums.reindex(columns=pd.MultiIndex.from_product([["weight", "projection", "tv"], [False, True]]))
    found = over_probes(sums["projection", True], sums["projection", False], level)
    result: dict[str, float | None] = {}
    for name, trained in (("trained on", True), ("held out", False)):
        result[name] = int((rows["trained"] == trained).sum())
        result[f"tv {name}"] = sums["tv", trained].sum() / sums["weight", trained].sum()
    return result | {"ratio": found.value, "low": found.low, "high": found.high}


def shares(rows: pd.DataFrame) -> pd.DataFrame:
    """`share` at equal age, which is an experiment, and at equal age and TV distance, for all settings and each."""
    return pd.DataFrame([
        {"at equal": name, "setting": setting, **share(each, strata)}
        for name, strata in EQUAL.items()
        for setting, each in by_setting(rows)
    ])  # fmt: skip


def shares_by_age(rows: pd.DataFrame) -> pd.DataFrame:
    """`share` at equal age for each of AGES, for all settings and each. The design has no such question."""
    return pd.DataFrame([
        {"ages": f"{first} to {last}", "setting": setting,
         **share(each[each["age"].between(first, last)], EQUAL["age"])}
        for first, last in AGES
        for setting, each in by_setting(rows)
    ])  # fmt: skip


def trend(rows: pd.DataFrame) -> Estimate:
    """Slope of the projection of held out groups over the bin of their TV distance, within their probes.

    Args:
        rows: Replayed groups, as `prepared` returns them.
    """
    rows = rows[~rows["trained"]]
    further = rows["bin"] - rows.groupby("probe")["bin"].transform("mean")
    sums = pd.DataFrame({"above": further * rows["projection"], "below": further**2}).groupby(rows["probe"]).sum()
    sums = sums[sums["below"] > 0]
    return over_probes(sums["above"], sums["below"])


def trends(rows: pd.DataFrame) -> pd.DataFrame:
    """`trend` for all settings and each: a row with setting, held out (groups), change, low and high."""
    result = []
    for setting, each in by_setting(rows):
        found = trend(each)
        groups = int((~each["trained"]).sum())
        result.append(
            {"setting": setting, "held out": groups, "change": found.value, "low": found.low, "high": found.high}
        )
    return pd.DataFrame(result)


def by_distance(rows: pd.DataFrame) -> pd.DataFrame:
    """Projection of each half beside that of fresh groups with the same mean rewards: `replay_probe.ratios` of each."""
    rows, fresh = rows.assign(step=rows["probe"]), rows["source"] == "fresh"
    halves = {"held out": ~rows["trained"], "trained on": rows["trained"]}
    result = [
        ratios(rows[fresh | half], np.random.default_rng(0)).assign(half=name).drop(columns="bound", errors="ignore")
        for name, half in halves.items()
    ]
    table = pd.concat(result, ignore_index=True)
    return table[["half", *table.columns.drop("half")]]
