"""The analysis of part 4, on made-up probes: against arithmetic by hand and simulations whose truth is known."""

from itertools import product

import age_or_distance
import numpy as np
import pandas as pd
import pytest
from scipy import stats

STUDIES = 40  # simulated ones of a kind
RATES = {"rate 2e-5": (0.014, 0.9), "rate 1e-4": (0.07, 0.5)}  # TV distance of a step, and the noise of a projection


def simulated(seed: int, *, worth: float = 1.0, moved: float = 1.0, falls: float = 10.0) -> pd.DataFrame:
    """Probes of four runs as in the study, with about the TV distances and the noise of the map's probes.

    Projections fall with the TV distance. All groups of a probe share the reference and its errors, and all groups of
    one step and age what their step has done.

    Args:
        seed: Of all draws.
        worth: Projection of a group that was trained on, as a share of that of a held out one at the same TV distance.
        moved: TV distance of a group that was trained on, as a share of that of a held out one.
        falls: How fast projections fall with the TV distance.
    """
    rng = np.random.default_rng(seed)
    age = np.tile(np.repeat(np.arange(8), 16), 7)  # a step of 16 prompts of each age; those of age 0 are fresh
    step, size = np.repeat(np.arange(9, 65, 8), 8 * 16), len(age)
    uid, frames = np.arange(size), []
    trained, fresh = uid % 2 == 0, age == 0
    for setting, (speed, noise) in RATES.items():
        for run in (91, 92):
            level, shared = (np.repeat(draw, 8 * 16) for draw in (rng.lognormal(0, 0.5, 7), rng.normal(0, 0.1, 7)))
            of_step = np.repeat(rng.normal(1, 0.3, 7 * 8), 16)
            tv = np.minimum(speed * age * rng.lognormal(0, 0.7, size) * np.where(trained, moved, 1), 0.95)
            mean = rng.integers(1, 8, size) / 8
            expected = np.exp(-falls * tv) * of_step * np.where(trained & ~fresh, worth, 1) + shared
            projection = 25 * (level * (1.3 - 0.6 * mean) * expected + noise * rng.normal(size=size))
            norm = rng.uniform(50, 200, size)
            rows = {"setting": setting, "seed": run, "step": step, "uid": uid, "age": age, "tv": tv, "mean": mean,
                    "source": np.where(fresh, "fresh", "replayed"), "cosine": projection / norm,
                    "norm": norm}  # fmt: skip
            frames.append(pd.DataFrame(rows)[(rng.random(size) < 0.75) & (trained | ~fresh)])  # those with a signal
    return pd.concat(frames, ignore_index=True)


def intervals(**truth: float) -> np.ndarray:
    """(low, high) of both shares and of the trend in many simulated studies, shape (STUDIES, 3, 2)."""
    result = []
    for seed in range(STUDIES):
        rows = age_or_distance.prepared(simulated(seed, **truth)).query("source == 'replayed'")
        shares = [age_or_distance.share(rows, strata) for strata in age_or_distance.EQUAL.values()]
        trend = age_or_distance.trend(rows)
        result.append([*((one["low"], one["high"]) for one in shares), (trend.low, trend.high)])
    return np.array(result)


def covered(found: np.ndarray, value: float) -> int:
    """How many of some intervals, shape (N, 2), contain a value."""
    return int(((found[:, 0] <= value) & (value <= found[:, 1])).sum())


# ── simulations ──


@pytest.mark.parametrize("falls", [0.0, 10.0])
def test_without_an_effect_about_95_of_100_intervals_contain_1(falls):
    """Both for projections that fall with the TV distance and for those that do not, whose trend is 0."""
    found = intervals(falls=falls)
    for share in (found[:, 0], found[:, 1]):
        assert covered(share, 1.0) > 0.87 * STUDIES
    if falls:
        assert (found[:, 2, 1] < 0).all()
    else:
        assert covered(found[:, 2], 0.0) > 0.87 * STUDIES


def test_an_effect_is_found_at_equal_age_and_at_equal_distance():
    found = intervals(worth=0.5)
    assert (found[:, :2, 1] < 1).mean() > 0.95
    for share in (found[:, 0], found[:, 1]):
        assert covered(share, 0.5) > 0.87 * STUDIES


def test_an_effect_that_the_distance_shows_is_found_only_at_equal_age():
    """Groups that were trained on are farther away, and at the same distance worth as much."""
    found = intervals(moved=1.6)
    assert (found[:, 0, 1] < 1).mean() > 0.8
    assert covered(found[:, 1], 1.0) > 0.87 * STUDIES


# ── arithmetic ──


def test_the_interval_has_the_ratios_that_students_test_does_not_reject():
    rng = np.random.default_rng(0)
    below = rng.normal(2.0, 1.0, 12)
    above = 0.5 * below + rng.normal(0, 0.5, 12)
    found = age_or_distance.over_probes(above, below)
    assert found.value == pytest.approx(above.sum() / below.sum()) and found.low < found.value < found.high
    for end in (found.low, found.high):
        assert stats.ttest_1samp(above - end * below, 0).pvalue == pytest.approx(0.05)
    assert stats.ttest_1samp(above - found.value * below, 0).pvalue == pytest.approx(1)


@pytest.mark.parametrize(("above", "below"), [([1.0, 2.0, 1.5], [1.0, -2.0, 1.1]), ([1.0], [2.0])])
def test_a_ratio_to_what_may_be_0_is_not_known(above, below):
    found = age_or_distance.over_probes(above, below)
    assert (found.low, found.high) == (-np.inf, np.inf)


def line(uid: int, projection: float, *, step: int = 8, age: int = 1, tv: float = 0.01, setting: str = "one") -> dict:
    """A line of a probe."""
    return {"setting": setting, "seed": 91, "step": step, "uid": uid, "source": "replayed" if age else "fresh",
            "age": age, "tv": tv, "mean": 0.5, "cosine": projection / 4, "norm": 4.0}  # fmt: skip


def test_only_groups_of_one_probe_and_stratum_are_compared():
    lines = [
        line(0, 2.0, age=0), line(2, 4.0, age=0),  # the unit is 3
        line(4, 3.0), line(5, 6.0), line(7, 12.0),  # weights: 2/3 of the first, 1/3 of the others
        line(6, 300.0, age=2), line(9, -300.0, age=3),  # groups of one half only
        line(8, 3.0, age=4, tv=0.03), line(11, 3.0, age=4, tv=0.05),  # of one age, but not of one bin
        line(10, 12.0, step=16), line(13, 6.0, step=16),
    ]  # fmt: skip
    rows = age_or_distance.prepared(pd.DataFrame(lines)).query("source == 'replayed'")
    assert rows["projection"].iloc[0] == 1.0
    found = age_or_distance.share(rows, ["age", "bin"])
    assert (found["trained on"], found["held out"]) == (2, 3)
    assert found["ratio"] == pytest.approx((2 / 3 * 1 + 1 / 2 * 4) / (1 / 3 * 2 + 1 / 3 * 4 + 1 / 2 * 2))
    found = age_or_distance.share(rows, ["age"])
    assert (found["trained on"], found["held out"]) == (3, 4)
    assert found["ratio"] == pytest.approx((2 / 3 * 1 + 1 / 2 * 1 + 1 / 2 * 4) / (2 / 3 * 3 + 1 / 2 * 1 + 1 / 2 * 2))
    assert found["tv trained on"] == pytest.approx((0.01 * (2 / 3 + 1 / 2) + 0.03 / 2) / (2 / 3 + 1))
    assert found["tv held out"] == pytest.approx((0.01 * (2 / 3 + 1 / 2) + 0.05 / 2) / (2 / 3 + 1))


def test_each_age_counts_in_its_own_row():
    """What having been trained on costs grows with the age, in one probe of each of two steps."""
    worth = dict(zip(range(1, 8), (0.9, 0.8, 0.7, 0.4, 0.3, 0.2, 0.1), strict=True))
    uids = {half: [uid for uid in range(50) if age_or_distance.held_out(uid) == half] for half in (True, False)}
    rows = [line(uids[True][0], 1.0, step=step, age=0) | {"source": "fresh"} for step in (8, 16)]
    for step, age in product((8, 16), worth):
        rows += [line(uids[half][age], 1.0 if half else worth[age], step=step, age=age) for half in (True, False)]
    table = age_or_distance.shares_by_age(age_or_distance.prepared(pd.DataFrame(rows))).set_index(["ages", "setting"])
    assert table.loc[("1 to 3", "one"), "ratio"] == pytest.approx(0.8)
    assert table.loc[("4 to 7", "all settings"), "ratio"] == pytest.approx(0.25)
    assert list(table["held out"]) == [6, 6, 8, 8]


def test_the_trend_is_that_of_held_out_groups_within_a_probe():
    """Per bin: -1 in both probes, although the probe with farther groups has larger projections."""
    lines = [line(0, 1.0, age=0)]
    for step, first, level in ((8, 0, 5.0), (16, 3, 50.0)):
        lines += [line(2 * uid + 1 + step, level - uid, step=step, tv=(0.01, 0.03, 0.05, 0.1, 0.2, 0.5)[first + uid])
                  for uid in range(3)]  # fmt: skip
        lines += [line(2 * uid + 100, 9.0 * uid, step=step, tv=0.1 * uid) for uid in range(3)]  # trained on
    found = age_or_distance.trend(age_or_distance.prepared(pd.DataFrame(lines)).query("source == 'replayed'"))
    assert (found.value, found.low, found.high) == pytest.approx((-1, -1, -1))


# ── tables ──


def test_tables():
    probes = simulated(0, worth=0.5)
    tables = age_or_distance.tables(probes)
    shares, by_age, trends, by_distance = tables.values()
    assert list(shares["at equal"].unique()) == ["age", "age and TV distance"]
    assert set(shares["setting"]) == set(by_age["setting"]) == set(trends["setting"]) == {age_or_distance.ALL, *RATES}
    assert set(by_distance["half"]) == {"held out", "trained on"}
    for _, of_half in by_distance.groupby("half"):
        assert of_half["ratio"].iloc[0] > 3 * of_half["ratio"].iloc[-1]
    near = by_distance.set_index(["half", "low_tv"])["ratio"]
    assert near["held out", 0.0] > 1.4 * near["trained on", 0.0]
    assert age_or_distance.tables(probes.iloc[:0]) == {}
