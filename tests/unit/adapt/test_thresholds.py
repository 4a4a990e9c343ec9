"""Eq. 8: c2 and c3 move linearly with the average reward."""

from __future__ import annotations

from fractions import Fraction as F

import pytest

from bapo_openrlhf.adapt.thresholds import AdaptiveThresholds, Interval

C2, C3 = Interval(F(1, 8), F(4, 8)), Interval(F(2, 8), F(5, 8))  # Table 3


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

    @pytest.mark.parametrize(
        ("reward", "clipped"), [(F(-5), F(0)), (F(-1, 100), F(0)), (F(101, 100), F(1)), (F(9), F(1))]
    )
    def test_rewards_outside_0_and_1_stop_at_the_ends(self, reward, clipped):
        moving = thresholds()
        moving.update(reward)
        assert moving.average_reward == clipped
        assert moving.c2 == (C2.low if clipped == 0 else C2.high)

    def test_a_new_one_goes_on_from_the_state_of_the_old(self):
        old, new = thresholds(), thresholds()
        for reward in (None, F(1, 3)):
            old.update(reward)
            new.load_state_dict(old.state_dict())
            assert (new.average_reward, new.c2, new.c3) == (old.average_reward, old.c2, old.c3)

    @pytest.mark.parametrize("direction", ["", "up", "EQ8"])
    def test_unknown_direction_is_an_error(self, direction):
        with pytest.raises(ValueError, match="direction"):
            thresholds(direction=direction)
