"""What batches were made of, on made-up runs: by hand, and against simulations whose truth is known."""

from types import SimpleNamespace

import dose
import numpy as np
import pandas as pd
import pytest


def results(**tables):
    """Stand-in for the results of a study with one arm and two runs."""
    arm = SimpleNamespace(name="arm-group")
    return SimpleNamespace(arms=[arm], labels={"arm-group": "arm"}, **tables)


def test_each_group_counts_once():
    """A step without replayed groups has no TV distance, and plain GRPO counts no groups at all."""
    rows = [
        ("arm-group", 1, 4, np.nan, np.nan, 0.01, np.nan),
        ("arm-group", 1, 2, 1, 1, 0.04, 0.5),
        ("arm-group", 2, 2, 1, 3, 0.04, 0.1),
        ("other-group", 1, 9, 9, 9, 0.9, 0.9),
    ]
    columns = ["arm", "seed", "groups/fresh", "groups/reevaluated", "groups/replayed", "tv/fresh", "tv/replayed"]
    steps = pd.DataFrame(rows, columns=columns).assign(**{"rollouts/step": 64.0})
    [row] = dose.doses(results(steps=steps)).to_dict("records")
    assert row == pytest.approx({
        "label": "arm", "responses": 96, "groups": 7, "X2, %": 100 * 2 / 14, "X3, %": 100 * 4 / 14,
        "TV fresh": (4 * 0.01 + 4 * 0.04) / 8, "TV X3": (0.5 + 3 * 0.1) / 4,
    })  # fmt: skip
    steps[["groups/fresh", "groups/reevaluated", "groups/replayed"]] = np.nan
    assert dose.doses(results(steps=steps)).empty


@pytest.mark.parametrize("prompts", [2, 8])
def test_the_share_between_prompts_is_unbiased(prompts):
    """Chances of 0.3 and 0.7: their variance is 0.04, and that within them 0.21. The first half of a run is noise."""
    rng, runs = np.random.default_rng(0), []
    for seed in (1, 2):
        steps = np.repeat(np.arange(1, 4001), prompts)
        means = rng.binomial(8, rng.choice([0.3, 0.7], len(steps))) / 8
        means[steps <= 2000] = 0.5
        groups = pd.DataFrame({"step": steps, "mean": means, "responses": 8, "state": "fresh"})
        left_out = pd.DataFrame({"step": np.arange(2001, 4001), "mean": 0.0, "responses": 8, "state": "filtered"})
        both = pd.concat([groups, left_out])
        runs.append(SimpleNamespace(seed=seed, run=SimpleNamespace(groups=both)))
    [row] = dose.between_prompts(results(by_arm={"arm-group": runs})).to_dict("records")
    assert row["steps"] == 4000 and row["share"] == pytest.approx(100 * 0.04 / 0.25, abs=1.5)


def test_one_prompt_or_groups_of_two_sizes_say_nothing():
    assert dose.components(pd.Series([0.5]), pd.Series([8])) is None
    assert dose.components(pd.Series([0.5, 1.0]), pd.Series([8, 4])) is None
