"""Age in syncs, importance ratios and TV distances of groups, against closed forms and exact sums."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.staleness import importance_summary, nonfinite, sync_age

STEPS = 40


@pytest.mark.parametrize("delay", range(1, 9))
def test_the_age_in_syncs_counts_the_multiples_in_between(delay):
    for weights_version, step in itertools.combinations_with_replacement(range(STEPS), 2):
        wanted = sum(t % delay == 0 for t in range(weights_version + 1, step + 1))
        assert sync_age(weights_version, step, delay) == wanted


def share(ratios: list[Fraction]) -> Fraction:
    """Kish's effective sample size by its definition, as a share."""
    return sum(ratios) ** 2 / (len(ratios) * sum(ratio * ratio for ratio in ratios))


class TestImportanceSummary:
    @given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=12), st.integers(-200, 200))
    @settings(max_examples=2 * settings.default.max_examples, derandomize=True, database=None)
    def test_matches_exact_arithmetic_at_any_scale(self, terms, scale):
        ratios = [Fraction(*term) for term in terms]
        logs = np.array([math.log(ratio) for ratio in ratios])
        result = importance_summary(logs)
        assert result["mean"] == pytest.approx(float(sum(ratios) / len(ratios)), rel=1e-12)
        assert result["max"] == pytest.approx(float(max(ratios)), rel=1e-12)
        assert result["effective_share"] == pytest.approx(float(share(ratios)), rel=1e-12)
        assert importance_summary(logs + scale)["effective_share"] == pytest.approx(float(share(ratios)), rel=1e-9)

    def test_at_both_ends(self):
        assert importance_summary(np.array([-1000.0, -1000.0])) == {"mean": 0.0, "max": 0.0, "effective_share": 1.0}
        cap = math.exp(20)
        with np.errstate(all="raise", under="ignore"):
            far, near = importance_summary(np.array([1000.0, -1000.0])), importance_summary(np.array([40.0, 30.0]))
        assert far == pytest.approx({"mean": cap / 2, "max": cap, "effective_share": 0.5})
        # the share is that of the ratios as they are: one of e^40 and e^30 is all there is
        share = 0.5 * (1 + math.exp(-10)) ** 2 / (1 + math.exp(-20))
        assert near == pytest.approx({"mean": cap, "max": cap, "effective_share": share})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", range(6))
def test_one_response_that_is_not_finite_is_enough(bad, position):
    log_ratios = np.linspace(-1000, 1000, 6)
    log_ratios[position] = bad
    result = nonfinite(log_ratios, [2, 4])
    assert result.dtype == bool and result.tolist() == [position < 2, position >= 2]
    assert nonfinite(np.array([]), []).shape == (0,)
