"""The numbers of the log on staleness and on Theorem 3.2, by hand and against a slow loop over responses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Group, Prompt, Response
from bapo_openrlhf.adapt.monitor import composition, off_policy, replay_ages, shifts
from bapo_openrlhf.adapt.shift import Gap, TokenSums
from bapo_openrlhf.methods.luffy import LUFFY

SOURCES = ("fresh", "reevaluated", "replayed")
NAMES = ("tv/{}", "importance/{}_mean", "importance/{}_max", "importance/{}_effective_share", "theory/bound_{}")


def mean(values):
    return sum(values) / len(values)


class TestOffPolicy:
    @given(
        sizes=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
        group_size=st.integers(2, 5),
        scale=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
        seed=st.integers(0, 10_000),
    )
    @settings(derandomize=True, database=None)
    def test_matches_a_slow_loop(self, make_group, sizes, group_size, scale, seed):
        rng = np.random.Generator(np.random.PCG64(seed))
        batch, eps = Batch(), 1e-4
        for source, count in zip(SOURCES, sizes, strict=True):
            setattr(batch, source, [make_group(rng.integers(-4, 5, group_size) / 4) for _ in range(count)])
        log_ratios = rng.normal(0.0, scale, sum(sizes) * group_size)
        constants = tuple(rng.uniform(0.5, 5.0, 3).tolist())
        wanted = {f"theory/k{number}": constant for number, constant in enumerate(constants, 1)}
        rest = iter(log_ratios.tolist())
        for source, constant in zip(SOURCES, constants, strict=True):
            ratios, gains = [], []
            for group in getattr(batch, source):
                rewards = [response.reward for response in group.responses]
                deviation = math.sqrt(mean([(reward - mean(rewards)) ** 2 for reward in rewards]) + eps)
                for reward in rewards:
                    ratios.append(math.exp(next(rest)))
                    gains.append(ratios[-1] * (reward - mean(rewards)) / deviation)
            if not ratios:
                continue
            tv = mean([max(0.0, 1.0 - ratio) for ratio in ratios])
            share = sum(ratios) ** 2 / (len(ratios) * sum(ratio**2 for ratio in ratios))
            numbers = (tv, mean(ratios), max(ratios), share, mean(gains) - 2 * constant * tv - 2 * tv)
            wanted |= {name.format(source): number for name, number in zip(NAMES, numbers, strict=True)}
        if sum(sizes):
            terms = [wanted.get(f"theory/bound_{source}", 0.0) * n for source, n in zip(SOURCES, sizes, strict=True)]
            wanted["theory/bound"] = sum(terms) / sum(sizes)
        assert off_policy(batch, log_ratios, constants, eps) == pytest.approx(wanted, rel=1e-9, abs=1e-12)

    def test_groups_of_different_sizes_count_by_their_responses(self, make_group):
        batch = Batch(fresh=[make_group(1, size=2)], replayed=[make_group(2, size=6)])
        result = off_policy(batch, np.log([2.0, 0.5, 1.0, 3.0, 0.25, 1.0, 0.5, 2.0]), (1.0, 2.0, 3.0), eps=1e-6)
        shares = 2 / 8 * result["theory/bound_fresh"] + 6 / 8 * result["theory/bound_replayed"]
        assert result["theory/bound"] == pytest.approx(shares)

    def test_a_part_of_a_group_is_compared_with_all_that_was_generated(self, make_group):
        """The only right one of four, kept by itself: (1 - 1/4) / sqrt(3/16) is its advantage, and with ratio 1 the
        bound."""
        batch = Batch(replayed=[make_group(1, size=4).keep([0], relative_to="generated")])
        result = off_policy(batch, np.zeros(1), (1.0, 2.0, 3.0), eps=0.0)
        assert result["theory/bound_replayed"] == pytest.approx(0.75 / math.sqrt(3 / 16))

    def test_groups_that_left_the_batch_are_not_in_it(self, make_group):
        batch = Batch(reevaluated=[make_group(1, size=2)])
        before = off_policy(batch, np.log([2.0, 0.5]), (1.0, 2.0, 3.0), eps=1e-6)
        for name in ("filtered", "unimproved", "solved", "cut", "too_far", "nonfinite", "unused"):
            setattr(batch, name, [make_group(1, size=2)])
        assert off_policy(batch, np.log([2.0, 0.5]), (1.0, 2.0, 3.0), eps=1e-6) == before
        assert {name for name in before if "fresh" in name or "replayed" in name} == set()

    @pytest.mark.parametrize("log_ratio", [1000.0, 1e6])
    def test_a_response_that_is_far_likelier_now_gives_large_numbers_and_no_infinite_ones(self, make_group, log_ratio):
        batch = Batch(replayed=[make_group([1.0, 0.0])])
        result = off_policy(batch, np.array([log_ratio, 0.0]), (1.0, 1.0, 1.0), eps=1e-12)
        assert result["tv/replayed"] == 0.0
        assert result["importance/replayed_max"] == pytest.approx(math.exp(20))
        assert result["theory/bound_replayed"] == pytest.approx((math.exp(20) - 1) / 2)
        assert result["importance/replayed_effective_share"] == 0.5  # one of two responses is all that counts

    @pytest.mark.parametrize("log_ratio", [-1000.0, -1e6])
    def test_a_response_that_is_impossible_now(self, make_group, log_ratio):
        batch = Batch(replayed=[make_group([1.0, 0.0])])
        result = off_policy(batch, np.array([log_ratio, 0.0]), (1.0, 1.0, 1.0), eps=1e-12)
        assert (result["tv/replayed"], result["importance/replayed_mean"]) == (0.5, 0.5)

    def test_the_theory_says_nothing_of_another_method(self, make_group):
        result = off_policy(Batch(fresh=[make_group(1, size=2)]), np.zeros(2), (math.nan,) * 3, eps=1e-6)
        assert math.isnan(result["theory/bound_fresh"]) and result["tv/fresh"] == 0.0
        assert math.isnan(result["theory/bound"])


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

    def test_a_batch_of_nothing(self):
        nothing = TokenSums(*np.zeros((len(TokenSums._fields), 0)))
        assert shifts(Batch(), nothing, 9, Gap()) == {}


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
        )
        assert composition(batch, 8 * 4, 0) == {
            "groups/capacity_used": 3 / 8,
            "filtered/none_right": 4,  # three without a right response, and one that is half right everywhere
            "filtered/all_right": 3,
            "filtered/by_draw": 2,
            "tokens/trained": 4 * (2 + 7 + 6),
            "length/fresh": 4.5,
            "length/replayed": 6.0,
        }

    def test_a_demonstration_takes_a_place(self, make_group):
        method = LUFFY(capacity=4, group_size=4)
        group = make_group(0, size=3)
        method.solutions = {group.prompt.id}
        assert composition(method.build_batch(0, [group], []), 16, 0)["groups/capacity_used"] == 4 / 16

    def test_an_empty_batch(self):
        counts = ("groups/capacity_used", "filtered/none_right", "filtered/all_right", "filtered/by_draw")
        assert composition(Batch(), 8, 0) == dict.fromkeys((*counts, "tokens/trained"), 0)

    def test_share_of_hard_prompts_that_improved(self, make_group):
        batch = Batch(
            reevaluated=[make_group(1, response_tokens=3)],
            unimproved=[make_group(0), make_group(0)],
            solved=[make_group(8)],
        )
        result = composition(batch, 4, 4)
        assert result["reevaluation/improved_share"] == 0.25 and result["length/reevaluated"] == 3.0
        assert composition(Batch(unimproved=[make_group(0)]), 4, 1)["reevaluation/improved_share"] == 0.0

    def test_responses_of_several_turns_and_of_different_lengths(self):
        def response(*spans):
            actions = sum(end - start for start, end in spans)
            return Response(np.arange(12), spans, np.zeros(actions), 1.0)

        group = Group(0, Prompt("p"), (response((2, 4), (6, 11)), response((1, 2)), response()), 0, 0)
        result = composition(Batch(fresh=[group]), 1, 0)
        assert (result["tokens/trained"], result["length/fresh"]) == (8, pytest.approx(8 / 3))


class TestStaleness:
    def test_by_hand(self, make_group):
        # v = 5, step 11: the engines' weights are those of step 10
        replayed = [
            make_group(4, step=10, weights_version=10),
            make_group(4, step=9, weights_version=5),
            make_group(4, step=8, weights_version=8),  # re-evaluated, with weights of its own step
        ]
        assert replay_ages(Batch(replayed=replayed), 11, 5, [1, 2, 0]) == pytest.approx(
            {
                "staleness/replayed_steps_mean": 2.0,  # 1, 2, 3
                "staleness/replayed_steps_max": 3,
                "staleness/replayed_syncs_mean": 2 / 3,  # 0, 1, 1
                "staleness/replayed_syncs_max": 1,
                "staleness/replayed_uses_mean": 1.0,
            }
        )

    def test_syncs_are_counted_from_the_policy(self, make_group):
        """Generated ahead: the weights are those of step 0, and syncs at 2, 4 and 6 followed."""
        replayed = [make_group(4, step=5, weights_version=0)]
        assert replay_ages(Batch(replayed=replayed), 6, 2, [1])["staleness/replayed_syncs_mean"] == 3

    def test_is_of_replayed_groups_alone(self, make_group):
        old = [make_group(4, step=0, weights_version=0)]
        assert replay_ages(Batch(), 9, 5, []) == {}
        assert replay_ages(Batch(fresh=old, reevaluated=old, unused=old), 9, 5, []) == {}
