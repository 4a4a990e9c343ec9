"""The union of X1, X2 and X3, and how it is made to fit (Eq. 7, Prop. A.3)."""

import itertools
from collections import Counter
from dataclasses import fields

from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import uids

from bapo_openrlhf.adapt.batch import Batch, drop, fill, highest_variance
from bapo_openrlhf.adapt.vocabulary import SOURCES

X4 = ("demonstrations", "fine_tuned")  # they have no groups
LISTS = [field.name for field in fields(Batch) if field.name not in X4]


def test_sources_come_in_order_and_what_is_not_trained_on_is_no_part(make_group):
    a, b, c, d, e = (make_group(4, uid=uid) for uid in range(5))
    others = {name: [make_group(4)] for name in LISTS if name not in SOURCES}
    batch = Batch(prefixed=[e], fresh=[b, a], reevaluated=[d], replayed=[c], **others)
    assert len(others) == 9 and len(batch) == 5
    assert batch.with_sources() == [
        ("fresh", b), ("fresh", a), ("reevaluated", d), ("replayed", c), ("prefixed", e)
    ]  # fmt: skip


class TestFill:
    @given(data=st.data())
    @settings(max_examples=3 * settings.default.max_examples, derandomize=True, database=None)
    def test_by_brute_force(self, make_group, data):
        """Over all ways to fill it: all but X3 as many and as varied as possible, then as much of X3 as fits.

        Of equal variances, those of the newer policy stay, and then the later groups.
        """
        keep = data.draw(st.lists(st.booleans(), max_size=5))
        counts = st.integers(0, 4)
        capacity, limit = data.draw(st.integers(0, 8)), data.draw(st.none() | counts)

        def groups(first, count):
            return [
                make_group(data.draw(counts), size=4, uid=first + n, weights_version=data.draw(st.integers(0, 1)))
                for n in range(count)
            ]

        fresh, hard = groups(0, len(keep)), groups(20, data.draw(counts))
        begun, old = groups(30, data.draw(st.integers(0, 2))), groups(40, data.draw(counts))
        asked = []

        def replay(free):
            assert free % 4 == 0
            asked.append(free // 4)
            return old[: free // 4]

        most_fresh = None if limit is None else 4 * limit
        batch = fill(4 * capacity, fresh, keep, hard, prefixed=begun, most_fresh=most_fresh, replay=replay)

        def varied(groups, size):
            return max(itertools.combinations(groups, min(size, len(groups))), key=rank, default=())

        def rank(groups):
            return sorted(((group.variance, group.weights_version, group.uid) for group in groups), reverse=True)

        x1 = [group for group, kept in zip(fresh, keep, strict=True) if kept]
        selected = varied([*varied(x1, capacity if limit is None else limit), *hard, *begun], capacity)
        chosen = batch.fresh + batch.reevaluated + batch.prefixed
        assert chosen == [group for group in (*x1, *hard, *begun) if group in selected]
        assert not set(uids(batch.prefixed)) - set(uids(begun))
        assert asked == [capacity - len(selected)] and batch.replayed == old[: capacity - len(selected)]
        assert Counter(uids(chosen + batch.filtered + batch.cut)) == Counter(uids(fresh + hard + begun))

    def test_groups_of_several_sizes(self, make_group):
        """Variances 1/4, 2/9 and 3/16 of groups of 8, 3 and 4: what does not fit any more makes room for a smaller."""
        eight, three, four = make_group(4), make_group(1, size=3), make_group(1, size=4)
        for free, kept in ((15, [eight, three, four]), (14, [eight, three]), (12, [eight, three]), (10, [eight]),
                           (7, [three, four]), (6, [three]), (2, [])):  # fmt: skip
            assert highest_variance([eight, three, four], free) == kept
            batch = fill(free, [eight, three], [True] * 2, [four])
            assert batch.fresh + batch.reevaluated == kept
            assert batch.responses == sum(group.size for group in kept) <= free


@given(data=st.data())
@settings(max_examples=4 * settings.default.max_examples, derandomize=True, database=None)
def test_drop_by_brute_force(make_group, data):
    """Against moving the unfit one by one: nothing else leaves, however many are left."""
    sizes = [data.draw(st.integers(0, 7 if name in SOURCES else 2)) for name in LISTS]
    order = iter(data.draw(st.permutations(range(sum(sizes)))))
    rights = (data.draw(st.lists(st.integers(0, 8), min_size=size, max_size=size)) for size in sizes)
    batch = Batch(*([make_group(right, uid=next(order)) for right in of_list] for of_list in rights))
    before = {name: list(getattr(batch, name)) for name in LISTS}
    trained = uids(group for _, group in batch.with_sources())
    some = st.sets(st.integers(0, sum(sizes)) | st.sampled_from(trained or [0]), max_size=8)
    too_far, nonfinite = data.draw(some), data.draw(some)

    result = drop(batch, too_far=too_far, nonfinite=nonfinite)

    expected = {name: list(groups) for name, groups in before.items()}
    for name in SOURCES:
        for group in before[name]:
            if group.uid in nonfinite or group.uid in too_far:
                why = "unused" if name == "replayed" else "nonfinite" if group.uid in nonfinite else "too_far"
                expected[name].remove(group)
                expected[why].append(group)

    for name in LISTS:
        kept = len(before[name])
        if name in SOURCES:
            assert getattr(result, name) == expected[name]  # in their order
        else:
            assert getattr(result, name)[:kept] == before[name]
            assert sorted(uids(getattr(result, name))) == sorted(uids(expected[name]))
    assert {name: getattr(batch, name) for name in LISTS} == before  # the batch handed in is as it was
