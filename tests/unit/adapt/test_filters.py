"""Fresh filters (Definition 3.1, first term; Appendix A.3; RAGEN-2)."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_rules import exact_variance

from bapo_openrlhf.adapt import filters
from bapo_openrlhf.adapt.filters import has_signal, informative
from bapo_openrlhf.methods import BAPO


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


class TestSignal:
    @pytest.mark.parametrize("size", [2, 3, 8])
    def test_binary_1_over_G_and_G_minus_1_over_G_are_in_0_and_1_are_out(self, make_group, size):
        verdicts = [has_signal(make_group(right, size=size)) for right in range(size + 1)]
        assert verdicts == [False] + [True] * (size - 1) + [False]

    @pytest.mark.parametrize(("rewards", "expected"), [
        ([0.1] * 8, False),  # equal, though the mean is inside [1/G, (G-1)/G]
        ([0.0] * 7 + [0.01], True),  # differ, though the mean is below 1/G
        ([1.0] * 7 + [0.99], True),  # differ, though the mean is above (G-1)/G
        ([-1.0, 1.0], True),
        ([5.0, 7.0], True),
        ([1.0, 0.99999994, 1.0], False),  # two orders of one sum in float32
    ])  # fmt: skip
    def test_other_rewards_have_signal_when_they_differ(self, make_group, rewards, expected):
        assert has_signal(make_group(rewards)) is expected


class TestBetween:
    @given(
        rewards=st.lists(st.sampled_from([0, 0.25, 0.5, 1, 1.5, -1]), min_size=1, max_size=6),
        ends=st.tuples(*[st.sampled_from([-math.inf, -1, 0, 0.25, 0.5, 0.75, 1, math.inf])] * 2),
    )
    def test_is_openrlhfs_condition_for_groups_whose_rewards_differ(self, make_group, rewards, ends):
        """All numbers are sums of powers of 2, so that OpenRLHF's mean of floats is exact too."""
        low, high = ends
        average = sum(rewards) / len(rewards) if len(rewards) in (1, 2, 4) else Fraction(sum(rewards)) / len(rewards)
        expected = low < average < high and min(rewards) < max(rewards)
        group = make_group([float(reward) for reward in rewards])
        assert has_signal(group, ends) is informative(group.rewards, ends) is expected
        assert filters.range_filter(ends)([group], generator()) == [expected]

    def test_ends_are_the_numbers_that_were_written(self, make_group):
        group = make_group([0.0] * 7 + [1.0] * 3)
        for ends, expected in (("0.3", "1"), False), (("0", "0.3"), False), (("0.29", "0.31"), True):
            assert has_signal(group, tuple(map(Fraction, ends))) is expected


@pytest.mark.parametrize(("size", "mean", "std"), [(8, 0.5, 0.2), (5, 0.3, 0.1)])
def test_the_keep_rate_of_the_gaussian_is_the_density_over_its_peak(make_group, size, mean, std):
    keep, rng, draws = filters.gaussian_filter(mean, std), generator(seed=1), 10_000
    for right in range(size + 1):
        rate = np.mean(keep([make_group(right, size=size)] * draws, rng))
        z = (right / size - mean) / std
        weight = math.exp(-z * z / 2) if 0 < right < size else 0.0
        tolerance = 4.5 * math.sqrt(weight * (1 - weight) / draws)
        assert abs(rate - weight) <= tolerance, (right, rate, weight)


class TestUniform:
    @pytest.mark.parametrize(("size", "count"), [(256, 154), (1, 1), (2, 1)])
    def test_count_is_the_nearest(self, make_group, size, count):
        mask = filters.uniform_filter([make_group(0)] * size, generator())
        assert (len(mask), sum(mask)) == (size, count)

    def test_every_group_is_kept_equally_often_whatever_its_rewards(self, make_group):
        groups = [make_group(right) for right in (0, 8, 4, 0, 8, 1, 7, 0, 8, 3)]
        rng, draws = generator(seed=3), 6_000
        masks = np.array([filters.uniform_filter(groups, rng) for _ in range(draws)])
        assert (masks.sum(axis=1) == 6).all()
        # 6 of 10 without replacement: inclusions have variance pq and covariance -pq / (n - 1), so this is chi-square
        # with n - 1 = 9 degrees of freedom; 27.9 is its 99.9 % point.
        statistic = ((masks.sum(axis=0) - 0.6 * draws) ** 2).sum() / (draws * 0.6 * 0.4 * 10 / 9)
        assert statistic < 27.9


def smallest_subset(rewards, uids, share):
    """Of all subsets with enough variance: the smallest, then the one with most variance, then that of lowest uids."""
    variances = [exact_variance(each) for each in rewards]
    enough = share * sum(variances)
    subsets = itertools.chain.from_iterable(
        itertools.combinations(range(len(uids)), size) for size in range(len(uids) + 1)
    )
    sums = [(places, sum((variances[place] for place in places), Fraction(0))) for places in subsets]
    found = [
        (len(places), -total, sorted(uids[place] for place in places)) for places, total in sums if total >= enough
    ]
    return min(found)[2]


@given(
    rights=st.lists(st.integers(0, 4), max_size=7),
    more=st.lists(st.sampled_from([0.0, 0.3, 0.5, 1.0]), min_size=4, max_size=4),
    share=st.sampled_from([Fraction(k, 12) for k in range(1, 13)]),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=2 * settings.default.max_examples, derandomize=True, database=None)
def test_top_p_is_the_smallest_subset_with_enough_variance(make_group, rights, more, share, order):
    """Few responses make many ties, and the groups do not come in the order of their numbers."""
    rewards = [[1.0] * right + [0.0] * (4 - right) for right in rights] + [more]
    uids = order.sample(range(100), len(rewards))
    groups = [make_group(each, uid=uid) for each, uid in zip(rewards, uids, strict=True)]
    exact = [[Fraction(str(reward)) for reward in each] for each in rewards]
    kept = smallest_subset(exact, uids, share)
    assert filters.top_p_filter(share)(groups, generator()) == [uid in kept for uid in uids]


def test_filters_have_names(make_group):
    groups = [make_group(right) for right in (0, 1, 1, 4, 8, 8)] * 4
    options = {"gaussian_mean": 0.125, "gaussian_std": 0.001, "top_p_share": Fraction(1, 2)}
    for name, kept in {"range": 12, "none": 24, "uniform": 14, "gaussian": 8, "top_p": 4}.items():
        fresh_filter = BAPO(capacity=1, group_size=8, filter=name, **options).fresh_filter
        assert sum(fresh_filter(groups, generator())) == kept and fresh_filter([], generator()) == []
    with pytest.raises(KeyError):
        BAPO(capacity=1, group_size=8, filter="median")
