"""The review of a batch, against its conditions group by group."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import uids

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.review import Review, review
from bapo_openrlhf.adapt.shift import Gap, TokenSums, group_shifts, shift

STEP = 9  # today's
BEFORE = Gap(0.01, 0.02, step=4)  # measured in step 4


def sums_of(log_ratios: list[float]) -> TokenSums:
    """The sums of responses of one token."""
    tokens = np.array(log_ratios, dtype=float).reshape(-1, 1)
    return TokenSums.of(tokens, np.ones(tokens.shape, dtype=bool))


def review_of(batch: Batch, log_ratios: list[float], gap: Gap = BEFORE, **limits: float | None) -> Review:
    """The review of a batch of responses of one token in step 9."""
    return review(batch, np.array(log_ratios), sums_of(log_ratios), STEP, gap, **{"since": STEP} | limits)


SOURCES = ("fresh", "reevaluated", "replayed")


@given(data=st.data())
@settings(max_examples=2 * settings.default.max_examples, derandomize=True, database=None)
def test_against_the_conditions_group_by_group(make_group, data):
    """Also of groups with a stored response, which counts with its own policy. Shifts have their own tests."""
    size, batch = data.draw(st.integers(1, 4)), Batch()
    log_ratio = st.floats(-3, 3) | st.sampled_from([0.0, -1000.0, 1000.0, math.nan, math.inf, -math.inf])
    ratios, current, old = {}, {}, make_group(1, step=5)
    for source in SOURCES:
        for _ in range(data.draw(st.integers(0, 4))):
            policy = data.draw(st.sampled_from([5, 9])) if source == "fresh" else 9 if source != "replayed" else 6
            group = make_group(data.draw(st.integers(0, size)), size=size, step=9, weights_version=policy)
            current[group.uid] = [policy == STEP] * size
            if data.draw(st.booleans()):
                group, current[group.uid][0] = group.exchange(0, old.standalone(old.responses[0])), False
            getattr(batch, source).append(group)
            ratios[group.uid] = data.draw(st.lists(log_ratio, min_size=size, max_size=size))
    limit = st.none() | st.sampled_from([0.0, 0.25, 1.0]) | st.floats(0, 9)
    limits = {"max_shift_fresh": data.draw(limit), "max_shift_replayed": data.draw(limit)}
    before = batch.with_sources()
    result = review_of(batch, [ratio for _, group in before for ratio in ratios[group.uid]], **limits)

    broken = {group.uid for _, group in before if not all(map(math.isfinite, ratios[group.uid]))}
    sound = [(source, group) for source, group in before if group.uid not in broken]
    rows = {group: list(zip(ratios[group.uid], current[group.uid], strict=True)) for _, group in sound}
    # the gap, from what today's weights generated
    on_policy = [ratio for members in rows.values() for ratio, now in members if now]
    with np.errstate(over="ignore"):
        lost = {group: [0.0 if now else max(0.0, 1.0 - np.exp(r)) for r, now in rows[group]] for group in rows}
        gap_tv = np.maximum(0.0, 1.0 - np.exp(on_policy))
    if on_policy:
        assert (result.gap.square, result.gap.step) == (pytest.approx(np.mean(np.square(on_policy))), STEP)
        assert result.gap.tv == pytest.approx(gap_tv.mean())
    else:
        assert result.gap is BEFORE
    assert result.distances == pytest.approx({group: np.mean(distances) for group, distances in lost.items()})
    # the shift of each group, with what it borrows from its source, and that of the fresh ones together
    shifts = {}
    for name in SOURCES:
        members = [group for source, group in sound if source == name]
        sums = sums_of([ratio for group in members for ratio in ratios[group.uid]])
        from_current = np.array([now for group in members for now in current[group.uid]], dtype=bool)
        of_source = group_shifts(sums, from_current, [size] * len(members), result.gap)
        shifts |= dict(zip(members, of_source.tolist(), strict=True))
        if name == "fresh":
            assert result.rollout_shift == pytest.approx(shift(sums, from_current, result.gap), rel=1e-9, abs=1e-9)
    assert result.shifts == pytest.approx(shifts, rel=1e-9, abs=1e-9)
    far = set()
    for source, group in sound:
        of_source = limits.get(f"max_shift_{source}")  # none for re-evaluated groups
        if of_source is not None:
            if abs(shifts[group] - of_source) < 1e-9:
                return  # rounding decides; equality is tested below
            far |= {group.uid} if shifts[group] > of_source else set()
    after = result.batch
    staying = [group.uid for _, group in before if group.uid not in broken | far]
    assert uids([group for _, group in after.with_sources()]) == staying  # whatever their number is
    # positions of the samples that stay, in the order of the batch before
    order = uids([group for _, group in before])
    assert result.kept == [position * size + row for position, uid in enumerate(order) if uid in staying
                     for row in range(size)]  # fmt: skip
    # and where the others went
    uids_before = uids(batch.fresh + batch.reevaluated)
    assert set(uids(after.nonfinite)) == broken & set(uids_before)
    assert set(uids(after.too_far)) == (far - broken) & set(uids_before)
    assert set(uids(after.unused)) == set(uids(batch.replayed)) - set(staying)
    assert after.cut == [] and result.nonfinite == len(broken)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("limit", "stays"), [(0.5, True), (0.4999, False)])
def test_the_limit_itself_is_allowed(make_group, source, limit, stays):
    # the shift is (1 + 0.5) / 2 - 0.25, exactly
    group = make_group(1, size=2, step=7, weights_version=9 if source == "reevaluated" else 6)
    name = "max_shift_replayed" if source == "replayed" else "max_shift_fresh"
    actual = review_of(Batch(**{source: [group]}), [1.0, -math.sqrt(0.5)], Gap(0.25), **{name: limit})
    assert actual.kept == ([0, 1] if stays or source == "reevaluated" else [])
    assert actual.rollout_shift == pytest.approx(0.5 if source == "fresh" else 0.0, abs=1e-15)


def test_of_an_empty_batch():
    batch = Batch()
    assert review_of(batch, []) == Review(batch, [], 0, BEFORE, 0.0, {}, {})
