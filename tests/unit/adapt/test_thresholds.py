"""Eq. 8: c2 and c3 move linearly with the average reward."""

from __future__ import annotations

from fractions import Fraction as F

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.rewards import as_fraction
from bapo_openrlhf.adapt.thresholds import AdaptiveThresholds, Interval

C2, C3 = Interval(F(1, 8), F(4, 8)), Interval(F(2, 8), F(5, 8))  # Table 3
unit = st.fractions(min_value=0, max_value=1, max_denominator=2560)


def thresholds(**settings) -> AdaptiveThresholds:
    return AdaptiveThresholds(C2, C3, **settings)


class TestEq8:
    # r = 0 gives low, r = 1 gives high; between, worked by hand: c2 = 1/8 + 3/8 r, c3 = 2/8 + 3/8 r
    @pytest.mark.parametrize(
        ("reward", "c2", "c3"),
        [
            (F(0), F(1, 8), F(2, 8)),
            (F(1), F(4, 8), F(5, 8)),
            (F(1, 3), F(2, 8), F(3, 8)),
            (F(2, 3), F(3, 8), F(4, 8)),
            (F(1, 2), F(5, 16), F(7, 16)),
            (F(1, 10), F(13, 80), F(23, 80)),
        ],
    )
    def test_both_directions_by_hand(self, reward, c2, c3):
        printed, text = thresholds(), thresholds(direction="text")
        printed.update(reward)
        text.update(1 - reward)  # the same position from the other end
        assert (printed.c2, printed.c3) == (c2, c3)
        assert (text.c2, text.c3) == (c2, c3)

    @pytest.mark.parametrize(("direction", "c2", "c3"), [("eq8", F(1, 8), F(2, 8)), ("text", F(4, 8), F(5, 8))])
    def test_before_any_reward_it_stands_where_no_reward_puts_it(self, direction, c2, c3):
        assert (thresholds(direction=direction).c2, thresholds(direction=direction).c3) == (c2, c3)
        seen = thresholds(direction=direction)
        seen.update(F(0))
        assert (seen.c2, seen.c3) == (c2, c3)

    @given(reward=unit, ends=st.lists(unit, min_size=4, max_size=4))
    @settings(derandomize=True, database=None)
    def test_matches_floats_and_stays_between_the_ends(self, reward, ends):
        low2, high2 = sorted(ends[:2])
        low3, high3 = sorted(ends[2:])
        moving = AdaptiveThresholds(Interval(low2, high2), Interval(low3, high3))
        moving.update(reward)
        r = float(reward)
        assert float(moving.c2) == pytest.approx(r * (float(high2) - float(low2)) + float(low2), abs=1e-12)
        assert float(moving.c3) == pytest.approx(r * (float(high3) - float(low3)) + float(low3), abs=1e-12)
        assert low2 <= moving.c2 <= high2 and low3 <= moving.c3 <= high3

    def test_tenths_are_exact(self):
        moving = AdaptiveThresholds(
            Interval(as_fraction("1/10"), as_fraction(0.7)), Interval(as_fraction("0.2"), as_fraction(0.8))
        )
        moving.update(F(1, 3))
        assert (moving.c2, moving.c3) == (F(3, 10), F(4, 10))

    @pytest.mark.parametrize(
        ("reward", "clipped"), [(F(-5), F(0)), (F(-1, 100), F(0)), (F(101, 100), F(1)), (F(9), F(1))]
    )
    def test_rewards_outside_0_and_1_stop_at_the_ends(self, reward, clipped):
        moving = thresholds()
        moving.update(reward)
        assert moving.average_reward == clipped
        assert moving.c2 == (C2.low if clipped == 0 else C2.high)

    @pytest.mark.parametrize("direction", ["", "up", "EQ8"])
    def test_unknown_direction_is_an_error(self, direction):
        with pytest.raises(ValueError, match="direction"):
            thresholds(direction=direction)


class TestAverage:
    def test_only_the_last_batch_counts(self):
        moving = thresholds()
        for reward in (F(1), F(1, 3), F(3, 7)):
            moving.update(reward)
            assert moving.average_reward == reward

    def test_no_fresh_groups_change_nothing(self):
        moving = thresholds()
        moving.update(None)
        assert moving.average_reward is None
        moving.update(F(3, 7))
        moving.update(None)
        assert moving.average_reward == F(3, 7)


class TestState:
    @pytest.mark.parametrize("rewards", [[], [F(1, 3)], [F(1, 3), F(2, 7), F(1)]])
    def test_goes_on_as_if_never_stopped(self, rewards):
        first, second = thresholds(direction="text"), thresholds(direction="text")
        for reward in rewards:
            first.update(reward)
        second.update(F(1))  # forgotten by the load
        second.load_state_dict(first.state_dict())
        assert second.average_reward == first.average_reward
        for reward in (F(1, 9), F(5, 6)):
            first.update(reward)
            second.update(reward)
            assert (second.average_reward, second.c2, second.c3) == (first.average_reward, first.c2, first.c3)
