"""What is drawn into a terminal."""

import numpy as np
import pytest

from bapo_openrlhf.workbench.pages.text import many, size
from bapo_openrlhf.workbench.watch import curve


def dots(lines):
    """Heights of the dots in each column, from above."""
    result = {}
    for row, text in enumerate(lines):
        for column, char in enumerate(text):
            bits = ord(char) - 0x2800 if char != " " else 0
            # Unicode 2800: dots 1-3 and 7 are the left column from above, 4-6 and 8 the right one.
            for bit, (x, y) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]):
                if bits >> bit & 1:
                    result.setdefault(2 * column + x, set()).add(4 * row + y)
    return result


@pytest.mark.parametrize("count", [1, 2, 7, 500])
def test_the_curve_goes_through_the_values(count):
    rng = np.random.default_rng(count)
    values = rng.random(count).tolist()
    columns, height = 40, 6
    wide, tall = 2 * columns, 4 * height
    actual = dots(curve(values, 0.0, 1.0, columns, height))
    assert sorted(actual) == list(range(wide))
    expected = np.interp(np.linspace(0, count - 1, wide), range(count), values)
    for x, value in enumerate(expected):
        exact = (1 - value) * (tall - 1)
        assert any(abs(y - exact) <= 0.5 + 1e-9 for y in actual[x])
        heights = sorted(actual[x])
        assert heights == list(range(heights[0], heights[-1] + 1)), "no gaps"
        if x:
            gap = min(abs(a - b) for a in actual[x] for b in actual[x - 1])
            assert gap <= 1


def test_sizes_and_counts():
    assert [size(count) for count in (512, 1024, 2**50)] == ["512 B", "1.0 KiB", "1024.0 TiB"]
    assert [many(count, "step") for count in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
