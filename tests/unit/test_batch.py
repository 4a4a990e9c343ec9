"""The union of X1, X2 and X3, and how it is made to fit (Eq. 7, Prop. A.3)."""

from __future__ import annotations

import itertools

import pytest

from bapo_openrlhf.adapt.batch import Batch, cut_to, replay_room


def uids(groups) -> list[int]:
    return [group.uid for group in groups]


class TestBatch:
    def test_an_empty_batch(self):
        assert len(Batch()) == 0 and Batch().with_sources() == []

    def test_sources_come_in_order_and_what_was_cut_is_no_part(self, make_group):
        a, b, c, d, e = (make_group(4, uid=uid) for uid in range(5))
        batch = Batch(fresh=[b, a], reevaluated=[d], replayed=[c], cut=[e])
        assert len(batch) == 4
        assert batch.with_sources() == [("fresh", b), ("fresh", a), ("reevaluated", d), ("replayed", c)]

    def test_two_batches_share_nothing(self, make_group):
        Batch().fresh.append(make_group(4))
        assert Batch().fresh == []


class TestCut:
    def test_nothing_is_cut_when_it_fits(self, make_group):
        fresh, reevaluated = [make_group(1), make_group(0)], [make_group(4)]
        for size in (3, 4, 100):
            batch = cut_to(size, fresh, reevaluated)
            assert (batch.fresh, batch.reevaluated, batch.replayed, batch.cut) == (fresh, reevaluated, [], [])
        assert batch.fresh is not fresh and batch.reevaluated is not reevaluated

    def test_the_highest_variance_stays_in_its_order(self, make_group):
        # variances in 64ths: 1 -> 7, 2 -> 12, 3 -> 15, 4 -> 16, 6 -> 12, 7 -> 7
        fresh = [make_group(right, uid=uid) for uid, right in enumerate((7, 3, 1, 4))]
        reevaluated = [make_group(right, uid=10 + uid) for uid, right in enumerate((2, 4, 6))]
        batch = cut_to(3, fresh, reevaluated)
        assert (uids(batch.fresh), uids(batch.reevaluated)) == ([1, 3], [11])
        assert sorted(uids(batch.cut)) == [0, 2, 10, 12]

    @pytest.mark.parametrize(("right", "size"), [(1, 5), (1, 6), (2, 10), (3, 10)])
    def test_equal_variances_are_equal(self, make_group, right, size):
        # k and G - k right have one variance; computed with floats, the two differ in the last digit
        old = make_group(right, size=size, uid=0, policy_step=1)
        new = make_group(size - right, size=size, uid=1, policy_step=2)
        assert uids(cut_to(1, [old, new], []).fresh) == [1]
        old = make_group(size - right, size=size, uid=0, policy_step=1)
        new = make_group(right, size=size, uid=1, policy_step=2)
        assert uids(cut_to(1, [old, new], []).fresh) == [1]

    def test_ties_go_to_the_newer_policy_and_then_to_the_later_group(self, make_group):
        fresh = [make_group(4, uid=uid, step=5, policy_step=3) for uid in (7, 9, 8)]
        reevaluated = [make_group(4, uid=uid, step=5, policy_step=5) for uid in (1, 2)]
        expected = [[2], [2, 1], [2, 1, 9], [2, 1, 9, 8]]
        for size, kept in enumerate(expected, start=1):
            batch = cut_to(size, fresh, reevaluated)
            assert sorted(uids(batch.fresh) + uids(batch.reevaluated)) == sorted(kept)

    def test_variance_counts_more_than_recency(self, make_group):
        old, new = make_group(4, uid=0, policy_step=0), make_group(3, uid=1, policy_step=9)
        assert uids(cut_to(1, [old], [new]).fresh) == [0]

    def test_to_nothing(self, make_group):
        batch = cut_to(0, [make_group(4, uid=1)], [make_group(4, uid=2)])
        assert len(batch) == 0 and uids(batch.cut) == [1, 2]


def test_room_by_brute_force():
    """Over all small cases: the most groups that Eq. 7 allows and that make the union a multiple; else none."""
    for capacity, selected, available, quantum in itertools.product(range(13), range(16), range(8), (1, 2, 3, 4, 5)):
        if capacity % quantum:
            continue
        fits = [
            count
            for count in range(available + 1)
            if selected + count <= capacity and (selected + count) % quantum == 0
        ]
        assert replay_room(capacity, selected, available, quantum) == max(fits, default=0)


@pytest.mark.parametrize(
    ("capacity", "selected", "available", "quantum", "room"),
    [
        (8, 5, 10, 1, 3),  # B - |X1| - |X2|
        (8, 5, 2, 1, 2),  # |B_high|
        (8, 8, 10, 1, 0),
        (8, 9, 10, 1, 0),
        (8, 0, 10, 1, 8),
        (8, 0, 0, 1, 0),
        (8, 5, 2, 2, 1),  # 5 + 1 = 6
        (8, 5, 2, 4, 0),  # neither 6 nor 7 is a multiple: X1 and X2 will be cut to 4
        (8, 5, 3, 4, 3),
        (8, 4, 3, 4, 0),
        (12, 4, 7, 4, 4),
    ],
)
def test_room_by_hand(capacity, selected, available, quantum, room):
    assert replay_room(capacity, selected, available, quantum) == room
