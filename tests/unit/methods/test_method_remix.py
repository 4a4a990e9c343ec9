"""ReMix after arXiv 2507.06892: hand-worked batches, and brute force over all mixtures."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction as F

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import run, uids

from bapo_openrlhf.adapt.batch import Batch, drop
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods.remix import ReMix


def remix(capacity: int = 10, **options) -> ReMix:
    return ReMix(capacity=capacity, **{"group_size": 8} | options)


def sizes(batch: Batch) -> tuple[int, int, int]:
    return len(batch.fresh), len(batch.replayed), len(batch.cut)


def test_the_papers_mixture_by_hand(make_group):
    """p = 2/5, B = 10, 6 fresh groups a step: only 6 at first, 6 + 4 from then on."""
    method = remix()
    steps = [[make_group(4, step=step) for _ in range(6)] for step in range(4)]
    batches = [run(method, step, fresh) for step, fresh in enumerate(steps)]
    assert [sizes(batch) for batch in batches] == [(6, 0, 0), (6, 4, 0), (6, 4, 0), (6, 4, 0)]
    assert set(uids(batches[1].replayed)) <= set(uids(steps[0]))
    assert set(uids(batches[3].replayed)) <= set(uids(steps[1] + steps[2]))  # of the last two steps, N = 2
    assert method.metrics()["mix/replayed_share"] == 0.4


@pytest.mark.parametrize(
    ("share", "capacity", "fresh", "stored", "expected"),
    [
        ("2/5", 10, 10, 9, (6, 4)),  # the share is fixed: 4 fresh groups are too many
        ("2/5", 10, 10, 1, (9, 1)),  # too few are stored: fresh ones take their places
        ("2/5", 10, 3, 9, (3, 2)),  # 2 of 5; with 3 of 6 more than 2/5 would be replayed
        ("29/100", 100, 71, 99, (71, 29)),  # 0.29 * 100 is 28.99... in floats
        (0.29, 100, 71, 99, (71, 29)),
    ],
)
def test_mixtures_by_hand(make_group, share, capacity, fresh, stored, expected):
    share = share if isinstance(share, float) else F(share)
    method = remix(capacity, replay_share=share)
    run(method, 0, [make_group(4) for _ in range(stored)])
    batch = run(method, 1, [make_group(4, step=1) for _ in range(fresh)])
    assert sizes(batch) == (*expected, fresh - expected[0])


@settings(max_examples=4 * settings.default.max_examples)
@given(
    share=st.fractions(0, 1, max_denominator=20).filter(lambda share: share < 1),
    capacity=st.integers(1, 14),
    fresh=st.integers(0, 16),
    stored=st.integers(0, 16),
)
def test_the_mixture_is_the_largest_then_the_one_with_most_replays(share, capacity, fresh, stored):
    allowed = [
        (x1 + x3, x3)
        for x1, x3 in itertools.product(range(fresh + 1), range(stored + 1))
        if x1 + x3 <= capacity and x3 <= share * (x1 + x3)
    ]
    total, replayed = max(allowed)
    assert remix(capacity, replay_share=share).mix(fresh, stored) == (total - replayed, replayed)


class TestStore:
    def test_dropped_replays_stay_stored_and_balance(self, make_group):
        method = remix(replay_share=F(1, 2))
        old = make_group(4)
        run(method, 0, [old])
        fresh = [make_group(4, step=1)]
        batch = drop(method.build_batch(1, fresh, []), too_far={old.uid})
        assert (batch.replayed, batch.unused) == ([], [old])
        Ledger().settle(fresh, batch)
        assert list(method.replay) == [old, *fresh]

    def test_draws_are_uniform_and_without_replacement(self, make_group):
        """Which 2 of 5, over many steps: chi-square with 9 degrees of freedom."""
        method = remix(4, replay_share=F(1, 2), replay_steps=10**6, buffer_groups=5, seed=7)
        stored = [make_group(4) for _ in range(5)]
        run(method, 0, stored)
        fresh = [make_group(4, step=1) for _ in range(2)]
        draws, seen = 1_000, Counter()
        for _ in range(draws):
            state = method.state_dict()
            seen[tuple(uids(method.build_batch(1, fresh, []).replayed))] += 1
            method.load_state_dict(state | {"rng": method.rng.bit_generator.state})
        assert set(seen) == set(itertools.combinations(uids(stored), 2))
        expected = draws / math.comb(5, 2)
        assert sum((count - expected) ** 2 / expected for count in seen.values()) < 27.9  # 99.9 % point


def test_metrics_by_hand(make_group):
    """8 responses of 3 + 2 tokens: 5 ids and 2 log-probs of 4 bytes each are 28 bytes, 224 a group."""
    method = remix(replay_share=F(1, 2), replay_steps=1, buffer_groups=3)
    run(method, 0, [make_group(4), make_group(4)])
    run(method, 1, [make_group(4, step=1), make_group(4, step=1)])
    assert method.metrics() == {
        "buffer/replay": 3,
        "buffer/replay_bytes": 3 * 224,
        "buffer/replay_added": 4,
        "buffer/replay_evicted": 1,
        "buffer/replay_expired": 0,
        "buffer/replay_age_mean": pytest.approx(1 / 3),
        "mix/replayed_share": 0.5,
    }
    run(method, 9)
    metrics = method.metrics()
    assert metrics["buffer/replay_expired"] == 3 and not {"buffer/replay_age_mean", "mix/replayed_share"} & set(metrics)


@settings(derandomize=True, database=None)
@given(st.data())
def test_every_group_is_counted_over_random_runs(make_group, data):
    capacity = data.draw(st.integers(1, 10))
    share = data.draw(st.fractions(0, 1, max_denominator=6).filter(lambda share: share < 1))
    window, most = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 12))
    method = remix(capacity, replay_share=share, replay_steps=window, buffer_groups=most)
    ledger, known = Ledger(), []  # known: informative groups, oldest first
    for step in range(data.draw(st.integers(1, 8))):
        fresh = [make_group(right, step=step) for right in data.draw(st.lists(st.integers(0, 8), max_size=8))]
        method.begin_step(step)
        batch = method.build_batch(step, fresh, [])
        informative = [group for group in fresh if 0 < group.mean < 1]
        held = [group for group in known[-most:] if step - group.step <= window]
        x3 = len(batch.replayed)
        assert set(uids(batch.replayed)) <= set(uids(held)) and len(set(uids(batch.replayed))) == x3
        assert (len(batch.fresh), x3) == method.mix(len(informative), len(held))
        assert len(batch) <= capacity and x3 <= share * len(batch)
        assert not batch.cut or len(batch) == capacity
        ledger.settle(fresh, batch)
        known += informative
        assert uids(method.replay) == uids(group for group in known[-most:] if step - group.step <= window)
