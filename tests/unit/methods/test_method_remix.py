"""ReMix after arXiv 2507.06892: brute force over all mixtures."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import run, uids

from bapo_openrlhf.methods.remix import ReMix


def remix(capacity: int = 10, **options) -> ReMix:
    return ReMix(capacity=capacity, **{"group_size": 8} | options)


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


def test_a_share_is_the_number_that_was_written():
    assert remix(100, replay_share=0.29).mix(71, 99) == (71, 29)  # 0.29 * 100 is 28.99... in floats


@given(st.data())
def test_the_mixture_of_random_runs(make_group, data):
    capacity = data.draw(st.integers(1, 10))
    share = data.draw(st.fractions(0, 1, max_denominator=6).filter(lambda share: share < 1))
    window, most = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 12))
    method = remix(capacity, replay_share=share, replay_steps=window, buffer_groups=most)
    known = []  # known: informative groups, oldest first
    for step in range(data.draw(st.integers(1, 8))):
        fresh = [make_group(right, step=step) for right in data.draw(st.lists(st.integers(0, 8), max_size=8))]
        batch = run(method, step, fresh)
        informative = [group for group in fresh if 0 < group.mean < 1]
        held = [group for group in known[-most:] if step - group.step <= window]
        x3 = len(batch.replayed)
        assert set(uids(batch.replayed)) <= set(uids(held)) and len(set(uids(batch.replayed))) == x3
        assert (len(batch.fresh), x3) == method.mix(len(informative), len(held))
        assert len(batch) <= capacity and x3 <= share * len(batch)
        assert method.metrics().get("mix/replayed_share") == (x3 / len(batch) if len(batch) else None)
        assert not batch.cut or len(batch) == capacity
        known += informative
        assert uids(method.replay) == uids(group for group in known[-most:] if step - group.step <= window)
