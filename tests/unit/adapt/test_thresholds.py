"""Eq. 8: c2 and c3 move linearly with the average reward."""

from fractions import Fraction as F

import pytest

from bapo_openrlhf.adapt.thresholds import AdaptiveThresholds, Interval

C2, C3 = Interval(F(1, 8), F(4, 8)), Interval(F(2, 8), F(5, 8))  # Table 3


# r = 0 gives low, r = 1 gives high; between, worked by hand: c2 = 1/8 + 3/8 r, c3 = 2/8 + 3/8 r
@pytest.mark.parametrize(
    ("reward", "c2", "c3"),
    [(F(0), F(1, 8), F(2, 8)), (F(1), F(4, 8), F(5, 8)), (F(1, 3), F(2, 8), F(3, 8)), (F(1, 10), F(13, 80), F(23, 80))],
)
def test_both_directions_by_hand(reward, c2, c3):
    printed, text = AdaptiveThresholds(C2, C3), AdaptiveThresholds(C2, C3, direction="text")
    printed.update(reward)
    text.update(1 - reward)  # the same position from the other end
    assert (printed.c2, printed.c3) == (text.c2, text.c3) == (c2, c3)


def test_unknown_direction_is_an_error():
    with pytest.raises(ValueError, match="direction"):
        AdaptiveThresholds(C2, C3, direction="up")
