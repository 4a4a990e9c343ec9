"""The review of a batch, against its conditions group by group."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.review import Review, review
from bapo_openrlhf.adapt.shift import BORROWED, Gap, TokenSums

STEP = 9  # today's
BEFORE = Gap(0.01, 0.02, step=4)  # measured in step 4


def review_of(batch: Batch, log_ratios: list[float], gap: Gap = BEFORE, **limits: float | None) -> Review:
    """The review of a batch of responses of one token in step 9."""
    tokens = np.array(log_ratios, dtype=float).reshape(-1, 1)
    sums = TokenSums.of(tokens, np.ones(tokens.shape, dtype=bool))
    return review(batch, np.array(log_ratios), sums, STEP, gap, **{"since": STEP} | limits)


def uids(groups: list) -> list[int]:
    return [group.uid for group in groups]


SOURCES = ("fresh", "reevaluated", "replayed")


class TestReview:
    @given(data=st.data())
    @settings(max_examples=2 * settings.default.max_examples, derandomize=True, database=None)
    def test_against_the_conditions_group_by_group(self, make_group, data):
        size, batch = data.draw(st.integers(1, 4)), Batch()
        log_ratio = st.floats(-3, 3) | st.sampled_from([0.0, -1000.0, 1000.0, math.nan, math.inf, -math.inf])
        ratios = {}
        for source in SOURCES:
            for _ in range(data.draw(st.integers(0, 4))):
                policy = data.draw(st.sampled_from([5, 9])) if source == "fresh" else 9 if source != "replayed" else 6
                group = make_group(data.draw(st.integers(0, size)), size=size, step=9, weights_version=policy)
                getattr(batch, source).append(group)
                ratios[group.uid] = data.draw(st.lists(log_ratio, min_size=size, max_size=size))
        limit = st.none() | st.sampled_from([0.0, 0.25, 1.0]) | st.floats(0, 9)
        limits = {"max_shift_fresh": data.draw(limit), "max_shift_replayed": data.draw(limit)}
        before = batch.with_sources()
        result = review_of(batch, [ratio for _, group in before for ratio in ratios[group.uid]], **limits)

        broken = {group.uid for _, group in before if not all(map(math.isfinite, ratios[group.uid]))}
        sound = [(source, group) for source, group in before if group.uid not in broken]
        # the gap, from what today's weights generated
        from_current = [r for _, group in sound if group.weights_version == STEP for r in ratios[group.uid]]
        square = np.mean(np.square(from_current)) if from_current else BEFORE.square
        with np.errstate(over="ignore"):
            lost = [max(0.0, 1.0 - np.exp(ratio)) for ratio in from_current]
        if from_current:
            assert (result.gap.square, result.gap.step) == (pytest.approx(square), STEP)
            assert result.gap.tv == pytest.approx(np.mean(lost))
        else:
            assert result.gap is BEFORE
        # the shift of each group that older weights generated, with what it borrows from its source
        shifts = {group: 0.0 for _, group in sound}
        for name in SOURCES:
            older = [group for source, group in sound if source == name and group.weights_version != STEP]
            mean = np.mean([r**2 - square for group in older for r in ratios[group.uid]]) if older else 0.0
            for group in older:
                moved = sum(r**2 - square for r in ratios[group.uid])
                shifts[group] = max(0.0, (moved + BORROWED * mean) / (size + BORROWED))
        assert result.shifts == pytest.approx(shifts, rel=1e-9, abs=1e-9)
        far = set()
        for source, group in sound:
            of_source = limits.get(f"max_shift_{source}")  # none for re-evaluated groups
            if of_source is not None:
                if abs(shifts[group] - of_source) < 1e-9:
                    return  # rounding decides; equality is tested below
                far |= {group.uid} if shifts[group] > of_source else set()
        after = result.batch
        unfit = broken | far
        fit = [group for _, group in before if group.uid not in unfit]
        staying = [group for _, group in after.with_sources()]
        assert uids(staying) == uids(fit)  # whatever their number is
        # positions of the samples that stay, in the order of the batch before
        order = uids([group for _, group in before])
        assert result.kept == [position * size + row for position, uid in enumerate(order) if uid in uids(staying)
                         for row in range(size)]  # fmt: skip
        assert [order[position // size] for position in result.kept[::size]] == uids(staying)
        # and where the others went
        uids_before = uids(batch.fresh + batch.reevaluated)
        assert set(uids(after.nonfinite)) == broken & set(uids_before)
        assert set(uids(after.too_far)) == (far - broken) & set(uids_before)
        assert set(uids(after.unused)) == set(uids(batch.replayed)) - set(uids(staying))
        assert after.cut == []
        assert result.nonfinite == len(broken)
        # the mean over all tokens of the fresh groups
        excess = [r**2 - square if group.weights_version != STEP else 0.0
                  for source, group in sound if source == "fresh" for r in ratios[group.uid]]  # fmt: skip
        assert result.rollout_shift == pytest.approx(max(0.0, np.mean(excess)) if excess else 0.0, rel=1e-9, abs=1e-9)

    @pytest.mark.parametrize("source", SOURCES)
    @pytest.mark.parametrize(
        ("limit", "stays"), [(None, True), (1.0, True), (0.5, True), (0.4999, False), (0.0, False)]
    )
    def test_the_limit_itself_is_allowed(self, make_group, source, limit, stays):
        # the shift is (1 + 0.5) / 2 - 0.25, exactly
        group = make_group(
            1, size=2, step=9 if source != "replayed" else 7, weights_version=9 if source == "reevaluated" else 6
        )
        name = "max_shift_replayed" if source == "replayed" else "max_shift_fresh"
        log_ratios, gap = [1.0, -math.sqrt(0.5)], Gap(0.25)
        actual = review_of(Batch(**{source: [group]}), log_ratios, gap, **{name: limit})
        wanted = stays or source == "reevaluated"
        assert actual.kept == ([0, 1] if wanted else [])
        assert len(actual.batch) == wanted
        assert actual.rollout_shift == pytest.approx(0.5 if source == "fresh" else 0.0, abs=1e-15)

    def test_in_a_mixed_group_each_response_counts_with_its_own_policy(self, make_group):
        # the first response is of step 5, the other is of today, and differs only by rounding
        old, group = make_group(1, step=5), make_group(0, size=2, step=9)
        mixed = group.exchange(0, old.standalone(old.responses[0]))
        for source, limit, stays in (
            ("fresh", 0.5, True),
            ("fresh", 0.47, False),
            ("reevaluated", 0.0, True),  # no limit is of X2
        ):
            result = review_of(Batch(**{source: [mixed]}), [-1.0, -0.2], max_shift_fresh=limit)
            assert result.kept == ([0, 1] if stays else [])
            assert result.shifts[mixed] == pytest.approx((1 - 0.04) / 2) and result.gap.square == pytest.approx(0.04)
            assert result.distances[mixed] == pytest.approx(-math.expm1(-1) / 2)
        # and the other way round: with an old policy behind the group, that one counts
        delayed = replace(mixed, weights_version=6)
        assert review_of(Batch(fresh=[delayed]), [-1.0, -0.2], max_shift_fresh=0.5).kept == []

    def test_of_an_empty_batch(self):
        batch = Batch()
        assert review_of(batch, []) == Review(batch, [], 0, BEFORE, 0.0, {}, {})

    def test_the_distance_of_each_group_is_kept_also_if_it_is_too_far(self, make_group):
        fresh = [make_group(1, size=2, step=9, weights_version=policy) for policy in (6, 9, 6)]
        replayed = [make_group(1, size=2, step=8, weights_version=6)]
        log_ratios = [-1000.0, 0.0, -0.1, -0.1, math.nan, 0.0, math.log(0.5), 1.0]
        result = review_of(
            Batch(fresh=fresh, replayed=replayed), log_ratios, max_shift_fresh=0.1, max_shift_replayed=0.1
        )
        assert result.distances == pytest.approx({fresh[0]: 0.5, fresh[1]: 0.0, replayed[0]: 0.25})
        assert result.batch.too_far == [fresh[0]] and result.batch.unused == replayed
