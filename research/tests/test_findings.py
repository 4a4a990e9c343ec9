"""Limits of shifts and of X2, and the shares in workbench/planning/constants.py, follow from the records."""

import io
import json
import tarfile

import numpy as np
import pandas as pd
import pytest
import replay_probe
from folders import RESULTS

from bapo_openrlhf.flags.cautions import MOST_X2
from bapo_openrlhf.workbench.findings import FARTHEST_SHIFT, STALEST_SHIFT
from bapo_openrlhf.workbench.planning.constants import Constants
from bapo_openrlhf.workbench.study.statistics import mean_interval

MAP = RESULTS / "map"
HALF = 0.5  # of what a fresh group is worth: below it, a replayed group has stopped helping (study_design.md)


@pytest.fixture(scope="module")
def pairs():
    """Heights of the arms with group-relative advantages, a column for each setting and arm, by seed."""
    table = pd.read_csv(MAP / "pairs.csv").query("path == 'group'")
    return table.pivot_table(index="seed", columns=["setting", "label"], values="height")


def rows_of(study, file, run):
    """The lines of a file of each run whose name begins with `run`, from the kept records."""
    with tarfile.open(MAP / f"{study}.tar.xz") as records:
        members = [one for one in records if one.name.startswith(run) and one.name.endswith(f"/{file}")]
        texts = [io.TextIOWrapper(records.extractfile(one), encoding="utf-8") for one in members]
        return [json.loads(line) for text in texts for line in text]


def test_most_x2_lies_between_a_share_that_cost_nothing_and_one_that_did(pairs):
    """X2 asks 4 prompts at 8 in small batches, and 32 at 32 in the centre, in every fourth step."""
    free, cost = 4 / 8 / 4, 32 / 32 / 4
    assert free < MOST_X2 < cost
    small, base = (pairs[name]["BAPO without X2"] - pairs[name]["BAPO"] for name in ("small batches", "centre"))
    assert mean_interval(small.dropna()).low < 0 < mean_interval(base.dropna()).low
    assert base.mean() == pytest.approx(2.6, abs=0.05)  # what the comment says
    signal = pd.read_csv(MAP / "signal.csv").set_index(["setting", "label"])["responses"]
    for setting, share in (("small batches", free), ("centre", cost)):
        assert signal[setting]["BAPO"] / signal[setting]["BAPO without X2"] - 1 == pytest.approx(share, rel=0.1)


def test_the_farthest_shift_is_where_every_setting_is_below_a_half():
    """From a TV distance on, the projection is below a half in each setting; the shift is that of groups there."""
    probes = pd.read_parquet(MAP / "probes.parquet")
    tables = [
        replay_probe.ratios(rows, np.random.default_rng(0))
        for _, rows in probes.assign(step=probes.groupby(["setting", "seed", "step"]).ngroup()).groupby("setting")
    ]
    worth = pd.concat(tables).groupby("low_tv")["ratio"].max()
    above = worth.index[worth >= HALF]
    limit = worth.index[worth.index > above.max()].min()
    assert limit == 0.04
    shifts = pd.read_csv(MAP / "shift.csv")
    nearest = shifts.loc[(shifts["tv"] - limit).abs().idxmin(), "shift"]
    assert float(f"{FARTHEST_SHIFT:.1e}") == float(f"{nearest:.1e}")


def test_the_stalest_shift_is_half_of_one_that_cost_points(pairs):
    """Of BAPO with v = 8. Its TV distances become shifts as those of single groups do (shift.csv)."""
    shifts = pd.read_csv(MAP / "shift.csv")
    steps = rows_of("map_delay", "metrics.jsonl", "bapo-group")
    seen = np.array([row["tv/fresh"] for row in steps if row.get("tv/fresh") is not None])
    assert len(seen) == 5 * 64
    shift = np.exp(np.interp(seen, shifts["tv"], np.log(shifts["shift"]))).mean()
    assert pytest.approx(shift / 2, rel=0.05) == STALEST_SHIFT
    lost = (pairs["small batches"]["BAPO"] - pairs["more delay"]["BAPO"]).dropna()  # v = 2 against v = 8
    assert mean_interval(lost).low > 0 and lost.mean() == pytest.approx(3.5, abs=0.2)


def test_the_defaults_of_a_plan_are_those_of_the_first_study():
    shares = json.loads((RESULTS / "plan.json").read_text())["shares"]
    for name in ("signal_share", "gaussian_share", "replayable_share", "hard_share", "leaving_share", "improved_share"):
        assert getattr(Constants(), name) == pytest.approx(shares[name], abs=6e-4), name
