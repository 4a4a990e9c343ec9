"""Replay by the terms of Theorem 3.2: every subset by brute force, predictions by hand, and BAPO's other rules."""

import itertools
import math
import random
from fractions import Fraction as F

import pytest
from one_step import uids

from bapo_openrlhf.methods.bapo_bound import BoundBAPO

EPS = 1e-6


def bound_bapo(seed: int = 0, **changes) -> BoundBAPO:
    return BoundBAPO(**{"capacity": 6, "group_size": 4, "seed": seed, "reevaluate_every": 0, **changes})


def term(group, tv: float) -> float:
    """-2 TV / sigma in its other form, from the rewards themselves."""
    rewards = [response.reward for response in group.responses]
    mean = sum(rewards) / len(rewards)
    sigma = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards) + EPS)
    return -2 * tv / sigma


def method_with_groups(make_group, tv, *, rights=(1, 2, 3, 2, 1, 2), **changes):
    """A method that has stored groups of step 0 and has measured these distances in step 1; today is step 1."""
    method = bound_bapo(**changes)
    groups = [make_group(right, size=4, prompt=f"p{n}") for n, right in zip(range(len(tv)), rights, strict=False)]
    for group in groups:
        method.replay.add(group)
    method.observe_distances(1, dict(zip(groups, tv, strict=True)))
    method.step = 1
    return method, groups


class TestReplay:
    @pytest.mark.parametrize("seed", range(8))
    def test_no_subset_that_fits_has_larger_terms(self, make_group, seed):
        rng = random.Random(seed)
        tv = [rng.random() / 4 for _ in range(6)]
        method, groups = method_with_groups(make_group, tv)
        terms = {group.uid: term(group, distance) for group, distance in zip(groups, tv, strict=True)}
        enough = [group for group in groups if terms[group.uid] >= -1]
        for count in range(7):
            best = max(
                itertools.combinations(enough, min(count, len(enough))),
                key=lambda chosen: sum(terms[group.uid] for group in chosen),
            )
            drawn = method.draw_replay(count, lambda group: True)
            assert set(uids(drawn)) == set(uids(best)) and len(drawn) == len(best)
            assert method.metrics()["bound/below_least"] == 6 - len(enough)

    def test_of_equal_terms_the_variance_decides_then_the_policy(self, make_group):
        method = bound_bapo()  # nothing is measured, so all terms are 0
        groups = [make_group(right, size=4, prompt=f"{right} {policy}", step=2, weights_version=policy)
                  for right, policy in ((1, 2), (2, 0), (3, 1), (2, 1))]  # fmt: skip
        for group in groups:
            method.replay.add(group)
        method.step = 3
        assert uids(method.draw_replay(4, lambda group: True)) == uids(groups[n] for n in (3, 1, 0, 2))
        assert method.metrics() == {"bound/below_least": 0, "bound/tv_predicted": 0.0}

    @pytest.mark.parametrize(
        ("least", "stays"), [(-1.0, [0, 1, 3]), (-math.inf, [0, 1, 2, 3]), (-0.5, [0, 3]), (0.0, [3])]
    )
    def test_the_batch_is_not_filled_with_groups_below_the_least_bound(self, make_group, least, stays):
        """The terms are -0.4, -1 + 4e-7, -2.4 and 0. One at the bound is enough."""
        tv = [0.1, 0.25, 0.6, 0.0]
        method, groups = method_with_groups(make_group, tv, rights=(2, 2, 2, 2), least=least)
        batch = method.build_batch(1, [], [])
        assert sorted(uids(batch.replayed)) == uids(groups[n] for n in stays)
        assert method.metrics()["bound/below_least"] == 4 - len(stays)
        assert method.metrics()["bound/tv_predicted"] == pytest.approx(sum(tv[n] for n in stays) / len(stays))

    def test_the_smoothing_is_that_of_the_run(self, make_group):
        """-2 x 0.1 / sqrt(1/4 + 1/4) is -0.28, and -0.4 without it."""
        method, groups = method_with_groups(make_group, [0.1], rights=(2,), least=-0.3, eps=0.25)
        assert method.draw_replay(1, lambda group: True) == groups

    def test_only_what_is_accepted(self, make_group):
        method, groups = method_with_groups(make_group, [0.1, 0.05, 0.0], rights=(2, 2, 2))
        assert method.draw_replay(2, lambda group: group is not groups[1]) == [groups[2], groups[0]]
        assert method.draw_replay(0, lambda group: True) == []


class TestPrediction:
    def test_mean_of_an_age_and_lines_through_zero(self, make_group):
        method = bound_bapo()
        assert [method.mean_distance(age) for age in (0, 1, 7)] == [0, 0, 0]
        old, older = (make_group(2, size=4, step=step) for step in (6, 2))  # 2 and 6 updates old in step 8
        method.observe_distances(8, {old: 0.1, older: 0.24, make_group(2, size=4, step=8): 0.5})
        method.observe_distances(8, {make_group(2, size=4, step=6): 0.3})
        result = {age: method.mean_distance(age) for age in range(9)}
        # 2: (0.1 + 0.3) / 2; 4 is as near to 2 as to 6, and takes the lower one
        assert result == pytest.approx(
            {0: 0, 1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4, 5: 0.24 * 5 / 6, 6: 0.24, 7: 0.24 * 7 / 6, 8: 0.24 * 8 / 6}
        )

    def test_an_actor_that_has_not_moved_says_nothing_of_an_age(self, make_group):
        """With --critic.freezing_steps a group gets older, and its distance stays 0."""
        method = bound_bapo(least=-math.inf, replay_steps=9)
        old, new = (make_group(2, size=4, step=step, prompt=str(step)) for step in (0, 2))
        for group in (old, new):
            method.replay.add(group)
        method.observe_distances(3, {old: 0.3, new: 0.0})
        assert method.mean_distance(3) == 0.3 and method.mean_distance(1) == pytest.approx(0.1)
        assert self.predicted(method, new, 3) == 0  # measured at age 1
        assert self.predicted(method, new, 5) == pytest.approx(0.3 - 0.1)

    def test_a_distance_may_be_0_by_chance(self, make_group):
        """A group of the same policy has another distance, so the actor has moved."""
        method, (group, _) = method_with_groups(make_group, [0.0, 0.1])
        assert method.mean_distance(1) == pytest.approx(0.05)
        assert self.predicted(method, group, 3) == pytest.approx(0.15 - 0.05)

    def predicted(self, method, group, step):
        method.step = step
        method.draw_replay(1, lambda other: other is group)
        return method.metrics().get("bound/tv_predicted")

    def test_a_measured_group_grows_as_the_mean_does_and_never_shrinks(self, make_group):
        method = bound_bapo(least=-math.inf, replay_steps=9)
        group, other, late = (make_group(2, size=4, step=0, prompt=name) for name in "abc")
        for one in (group, late):
            method.replay.add(one)
        method.observe_distances(1, {group: 0.05, other: 0.15})  # D(1) = 0.1
        assert self.predicted(method, group, 1) == pytest.approx(0.05)
        assert self.predicted(method, group, 3) == pytest.approx(0.05 + 0.3 - 0.1)
        assert self.predicted(method, late, 3) == pytest.approx(0.3)  # never measured: from 0 at age 0
        method.observe_distances(2, {other: 0.02})  # D(2) is below D(1)
        assert self.predicted(method, group, 2) == pytest.approx(0.05)
        method.observe_distances(3, {other: 0.9})
        assert self.predicted(method, group, 9) == 1  # 0.05 + 0.9 * 3 - 0.1
        method.observe_distances(3, {group: 0.4})  # D(3) = 0.65; the newer measurement counts
        assert self.predicted(method, group, 4) == pytest.approx(0.4 + 0.65 * 4 / 3 - 0.65)

    def test_only_distances_of_what_is_stored_are_kept(self, make_group):
        method, groups = method_with_groups(make_group, [0.1, 0.2])
        method.observe_distances(2, {make_group(2, size=4, step=0): 0.7})
        assert [row[0] for row in method.last] == uids(groups)
        method.replay.expire(99)
        method.observe_distances(99, {})
        assert method.last == [] and sorted(age for age, *_ in method.sums) == [1, 2]


class TestRules:
    def test_any_fresh_group_with_signal_is_stored(self, make_group):
        method = bound_bapo()
        groups = [make_group(right, size=4, prompt=f"p{right}") for right in range(5)] + [make_group([0.2, 0.7])]
        method.build_batch(0, groups, [])
        assert uids(method.replay) == uids([*groups[1:4], groups[5]])

    def test_any_signal_is_an_improvement_but_c1_says_what_is_hard(self, make_group):
        method = bound_bapo(c1=F(1, 4), reevaluate_every=1)
        failed = [make_group(0, size=4, prompt=f"p{n}") for n in range(4)]
        method.build_batch(0, failed, [])
        assert method.begin_step(1) == [group.prompt for group in failed]
        again = [make_group(n, size=4, prompt=f"p{place}", step=1) for place, n in enumerate((0, 1, 2, 4))]
        batch = method.build_batch(1, [], again)
        assert (batch.unimproved, batch.reevaluated, batch.solved) == ([again[0]], again[1:3], [again[3]])
        assert [group.prompt in method.hard for group in again] == [True, True, False, False]

    def test_theory_and_metrics_know_no_thresholds(self, make_group):
        method = bound_bapo(group_size=8, c1=F(0))
        sigma = math.sqrt(7 / 64 + EPS)
        assert method.constants() == pytest.approx(((1 - sigma) / sigma,) * 3)
        method.build_batch(0, [make_group(2)], [])
        assert not any("threshold" in name for name in method.metrics())
