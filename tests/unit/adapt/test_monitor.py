"""The numbers of the log on staleness and on Theorem 3.2, by hand and against a slow loop over responses."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_openrlhf.adapt.batch import Batch, Demonstration
from bapo_openrlhf.adapt.monitor import composition, off_policy, replay_ages, shifts
from bapo_openrlhf.adapt.shift import Gap, TokenSums

SOURCES = ("fresh", "reevaluated", "replayed")
NAMES = ("tv/{}", "importance/{}_mean", "importance/{}_max", "importance/{}_effective_share", "theory/bound_{}")


def mean(values):
    return sum(values) / len(values)


class TestOffPolicy:
    @given(
        sizes=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
        scale=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
        seed=st.integers(0, 10_000),
    )
    def test_matches_a_slow_loop(self, make_group, sizes, scale, seed):
        """Groups of several sizes, which may hold a part of what was generated. Those of other lists do not count."""
        rng = np.random.Generator(np.random.PCG64(seed))
        batch, eps = Batch(**{name: [make_group(1)] for name in ("filtered", "cut", "too_far", "unused")}), 1e-4
        for source, count in zip(SOURCES, sizes, strict=True):
            groups = [make_group(rng.integers(-4, 5, rng.integers(2, 6)) / 4) for _ in range(count)]
            parts = [group.keep(range(rng.integers(group.size) + 1), relative_to="generated") for group in groups]
            setattr(batch, source, parts)
        log_ratios = rng.normal(0.0, scale, batch.responses)
        constants = tuple(rng.uniform(0.5, 5.0, 3).tolist())
        wanted = {f"theory/k{number}": constant for number, constant in enumerate(constants, 1)}
        rest, total = iter(log_ratios.tolist()), 0.0
        for source, constant in zip(SOURCES, constants, strict=True):
            ratios, gains = [], []
            for group in getattr(batch, source):
                middle = mean(group.generated)
                deviation = math.sqrt(mean([(reward - middle) ** 2 for reward in group.generated]) + eps)
                for response in group.responses:
                    ratios.append(math.exp(next(rest)))
                    gains.append(ratios[-1] * (response.reward - middle) / deviation)
            if not ratios:
                continue
            tv = mean([max(0.0, 1.0 - ratio) for ratio in ratios])
            share = sum(ratios) ** 2 / (len(ratios) * sum(ratio**2 for ratio in ratios))
            numbers = (tv, mean(ratios), max(ratios), share, mean(gains) - 2 * constant * tv - 2 * tv)
            wanted |= {name.format(source): number for name, number in zip(NAMES, numbers, strict=True)}
            total += len(ratios) * numbers[-1]
        if sum(sizes):
            wanted["theory/bound"] = total / batch.responses
        assert off_policy(batch, log_ratios, constants, eps) == pytest.approx(wanted, rel=1e-9, abs=1e-12)

    def test_a_response_that_is_far_likelier_now_gives_large_numbers_and_no_infinite_ones(self, make_group):
        batch = Batch(replayed=[make_group([1.0, 0.0])])
        result = off_policy(batch, np.array([1000.0, 0.0]), (1.0, 1.0, 1.0), eps=1e-12)
        assert result["theory/bound_replayed"] == pytest.approx((math.exp(20) - 1) / 2)


class TestShifts:
    def test_by_hand(self, make_group):
        """A fresh group of today and one of step 7, and a replayed group of step 6; 2 responses of 2 tokens each."""
        fresh = [make_group(1, size=2, step=9, weights_version=policy) for policy in (9, 7)]
        batch = Batch(fresh=fresh, replayed=[make_group(1, size=2, step=7, weights_version=6)])
        log_ratios = np.array([[0.1, -0.1]] * 2 + [[0.3, 0.0]] * 2 + [[0.2, 0.2]] * 2)
        sums = TokenSums.of(log_ratios, np.ones((6, 2), dtype=bool))
        k3 = [np.mean(np.exp(part) - 1 - part) for part in (log_ratios[:4], log_ratios[4:])]
        assert shifts(batch, sums, 9, Gap(0.01)) == pytest.approx(
            {
                "shift/fresh": (0.09 / 2 - 0.01) / 2,  # half of the tokens are of today
                "kl/fresh": k3[0],
                "shift/replayed": 0.04 - 0.01,
                "kl/replayed": k3[1],
            }
        )


class TestComposition:
    def test_by_hand(self, make_group):
        batch = Batch(
            fresh=[make_group(3, size=4, response_tokens=2), make_group(1, size=4, response_tokens=7)],
            replayed=[make_group(1, size=4, response_tokens=6)],
            filtered=[
                *(make_group(right, size=4) for right in (0, 0, 0, 4, 4, 1)),
                make_group([0.5] * 4),
                make_group([2.0] * 4),
                make_group([0.1, 0.2, 0.1, 0.1]),
            ],
            cut=[make_group(2, size=4, response_tokens=50)],
            demonstrations=[Demonstration.of(make_group(0, size=4))],
        )
        assert composition(batch, 8 * 4, 0) == {
            "groups/capacity_used": (3 * 4 + 1) / (8 * 4),
            "filtered/none_right": 4,  # three without a right response, and one that is half right everywhere
            "filtered/all_right": 3,
            "filtered/by_draw": 2,
            "tokens/trained": 4 * (2 + 7 + 6),
            "length/fresh": 4.5,
            "length/replayed": 6.0,
        }

    def test_share_of_hard_prompts_that_improved(self, make_group):
        batch = Batch(
            reevaluated=[make_group(1, response_tokens=3)],
            unimproved=[make_group(0), make_group(0)],
            solved=[make_group(8)],
        )
        result = composition(batch, 4, 4)
        assert result["reevaluation/improved_share"] == 0.25 and result["length/reevaluated"] == 3.0
        assert composition(Batch(unimproved=[make_group(0)]), 4, 1)["reevaluation/improved_share"] == 0.0


def test_staleness_by_hand(make_group):
    """v = 5, step 11: the engines' weights are those of step 10. Only replayed groups count."""
    replayed = [
        make_group(4, step=10, weights_version=10),
        make_group(4, step=9, weights_version=4),  # generated ahead; syncs at 5 and 10 followed
        make_group(4, step=8, weights_version=8),  # re-evaluated, with weights of its own step
    ]
    old = [make_group(4, step=0, weights_version=0)]
    assert replay_ages(Batch(fresh=old, reevaluated=old, unused=old, replayed=replayed), 11, 5, [1, 2, 0]) == {
        "staleness/replayed_steps_mean": 2.0,  # 1, 2, 3
        "staleness/replayed_steps_max": 3,
        "staleness/replayed_syncs_mean": 1.0,  # 0, 2, 1
        "staleness/replayed_syncs_max": 2,
        "staleness/replayed_uses_mean": 1.0,
    }
    assert replay_ages(Batch(fresh=old), 9, 5, []) == {}
