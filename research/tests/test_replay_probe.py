"""Projections of made-up probes, whose ratio is known."""

import numpy as np
import pandas as pd
import pytest
import replay_probe


def probes(*, helps: float, noise: float = 0, steps: int = 40, seed: int = 0, unit: float = 0.5) -> pd.DataFrame:
    """Groups whose projection is `unit` times their mean on average if fresh, and `helps` times that if replayed."""
    rng, rows = np.random.default_rng(seed), []
    for step in range(steps):
        for source, share, tv in (("fresh", 1.0, 0.01), ("replayed", helps, 0.05)):
            for mean in (0.25, 0.5) if source == "replayed" else (0.25, 0.25, 0.25, 0.5, 0.75):
                norm = rng.uniform(1, 3)
                projection = unit * share * mean + noise * rng.normal()
                rows.append({"setting": "one", "step": step, "source": source, "age": 2, "tv": tv, "mean": mean,
                             "cosine": projection / norm, "norm": norm})  # fmt: skip
    return pd.DataFrame(rows)


@pytest.mark.parametrize("helps", [1.0, 0.4, -0.5])
def test_the_ratio_is_that_of_groups_with_the_same_mean(helps):
    [row] = replay_probe.ratios(probes(helps=helps), np.random.default_rng(0)).to_dict("records")
    assert (row["low_tv"], row["high_tv"], row["groups"]) == (0.04, 0.08, 80)
    assert [row["ratio"], row["low"], row["high"]] == pytest.approx([helps] * 3)


def test_each_setting_counts_by_its_groups_and_not_by_the_length_of_its_gradients():
    long = probes(helps=-0.5, unit=50).assign(setting="other", step=range(40, 320))
    rows = pd.concat([probes(helps=1.0), long[long["source"] == "fresh"], long[long["source"] == "replayed"][:40]])
    [row] = replay_probe.ratios(rows, np.random.default_rng(0)).to_dict("records")
    assert row["ratio"] == pytest.approx((80 * 1.0 - 40 * 0.5) / 120)


@pytest.mark.parametrize(("cases", "least", "most"), [(20, 16, 20), pytest.param(100, 88, 99, marks=pytest.mark.slow)])
def test_the_interval_covers_the_ratio_in_about_95_of_100_cases(cases, least, most):
    rng, covered = np.random.default_rng(0), 0
    for seed in range(cases):
        [row] = replay_probe.ratios(probes(helps=0.4, noise=0.1, seed=seed), rng).to_dict("records")
        covered += row["low"] < 0.4 < row["high"]
    assert least <= covered <= most


def test_the_bound_is_that_of_equation_36_without_the_surrogate():
    [row] = replay_probe.ratios(probes(helps=1), np.random.default_rng(0)).to_dict("records")
    sigma = np.sqrt(np.array([0.25 * 0.75, 0.25]))
    assert row["bound"] == pytest.approx(np.mean(-2 * 0.05 / sigma), rel=1e-4)


def test_groups_without_a_gradient_and_small_bins_are_left_out():
    rows = probes(helps=1, steps=replay_probe.FEWEST // 2)
    assert len(replay_probe.ratios(rows, np.random.default_rng(0))) == 1
    rows.loc[rows.index[-1], "cosine"] = None
    assert replay_probe.ratios(rows, np.random.default_rng(0)).empty
