"""PODS: which responses of a group stay, against all subsets, and what becomes of the others."""

from collections import Counter
from fractions import Fraction as F

import pytest
import reference_rules as rules
from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import places, rewards_of, run, uids

from bapo_openrlhf.adapt.batch import drop
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods.pods import PODS, most_varied


def pods(capacity: int = 8, **options) -> PODS:
    return PODS(capacity=capacity, **{"group_size": 8, "keep": 4} | options)


@settings(max_examples=2 * settings.default.max_examples, derandomize=True, database=None)
@given(
    rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=8)
    | st.lists(st.sampled_from([-1.5, -0.25, 0.0, 0.5, 0.75, 2.0]), min_size=2, max_size=8),
    data=st.data(),
)
def test_what_stays_is_a_best_subset(rewards, data):
    size = data.draw(st.integers(2, len(rewards)))
    chosen = most_varied([F(reward) for reward in rewards], size)
    assert tuple(chosen) in rules.pods_subsets(rewards, size)  # in order, each once


@pytest.mark.parametrize(("rewards", "size", "stay"), [
    ("0 1 1", 2, [0, 1]),
    ("0.01 0.05 0.01 0.05", 3, [1, 2, 3]),  # as floats, two low ones have a larger variance than two high ones
    ("0 0 0 0 1 1 1 1", 5, [0, 1, 2, 6, 7]),
])  # fmt: skip
def test_of_equal_variances_the_first_in_the_authors_order_stays(rewards, size, stay):
    """They try only the highest, then only the lowest, and then one high one more each time.

    Source: YixuanEvenXu/pods, trainer/maxvargrpo_trainer.py, lines 515-525, commit 187f43b.
    """
    assert most_varied([F(reward) for reward in rewards.split()], size) == stay


def test_the_filter_sees_all_that_was_generated(make_group):
    """A gaussian filter of mean 1/8 keeps what has this mean before the choice; 2 of 4 are kept right below 1/2."""
    method = pods(filter="gaussian", gaussian_mean=0.125, gaussian_std=0.01)
    fresh = [make_group(1), make_group(4)]
    batch = run(method, 0, fresh)
    assert uids(batch.fresh) == [fresh[0].uid] and batch.filtered == [fresh[1]]


def test_a_fourth_of_the_group_stays_by_default():
    """The paper's runs: 16 of 64, 32 of 128."""
    kept = [PODS(capacity=4, group_size=size).kept for size in (2, 8, 11, 12, 64, 128)]
    assert kept == [2, 2, 2, 3, 16, 32]


@given(st.data())
def test_every_response_is_counted_over_random_runs(make_group, data):
    size = data.draw(st.integers(2, 6))
    keep, capacity = data.draw(st.integers(2, size)), data.draw(st.integers(1, 5))
    method, ledger, met = pods(capacity, group_size=size, keep=keep), Ledger(), Counter()
    for step in range(data.draw(st.integers(1, 5))):
        fresh = [make_group(rewards, step=step) for rewards in data.draw(st.lists(rewards_of(size), max_size=8))]
        batch, wholes = method.build_batch(step, fresh, []), {group.uid: group for group in fresh}
        lost = set(data.draw(st.lists(st.sampled_from(uids(batch.fresh)), max_size=2))) if batch.fresh else set()
        for group in batch.fresh:
            positions = most_varied(wholes[group.uid].rewards, keep)
            assert places(group) == positions and group.baseline == group.rewards
        batch = drop(batch, nonfinite=lost)
        ledger.settle(fresh, batch)
        signal = sum(len(set(group.rewards)) > 1 for group in fresh)
        trained = min(signal, capacity * size // keep)
        cut = signal - trained
        assert (len(batch.fresh) + len(batch.nonfinite), len(batch.cut)) == (trained, cut)
        alive = trained - len(lost)
        met.update(fresh=alive * keep, dropped=alive * (size - keep), cut=cut * size, nonfinite=len(lost) * size)
        met.update(filtered=(len(fresh) - signal) * size, generated=len(fresh) * size)
    assert +ledger.responses == +met
    ledger.check()
