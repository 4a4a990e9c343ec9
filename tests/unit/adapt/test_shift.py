"""The shift and the gap, against their definitions and by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.shift import BORROWED, Gap, TokenSums, group_shifts, on_policy, shift


def sums_of(log_ratios: np.ndarray) -> TokenSums:
    return TokenSums.of(log_ratios, np.ones(log_ratios.shape, dtype=bool))


MASK = np.array([[1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]], dtype=bool)
LOGS = np.array([[0.5, -0.25, 0.0, 1.0], [0.0, -2.0, 0.125, 0.0], [0.0, 0.0, 0.0, 0.0]])


class TestTokenSums:
    def test_by_hand(self):
        sums = TokenSums.of(LOGS, MASK)
        assert sums.tokens.tolist() == [3, 2, 0]
        assert sums.squares == pytest.approx([0.25 + 0.0625 + 1.0, 4.0 + 0.015625, 0.0])
        assert sums.k3 == pytest.approx([
            math.exp(0.5) - 1.5 + math.exp(-0.25) - 0.75 + math.e - 2, math.exp(-2) + 1 + math.exp(0.125) - 1.125, 0.0
        ])  # fmt: skip

    def test_a_weight_outside_of_a_half_and_five_is_counted(self):
        log_ratios = np.log([[0.499, 0.501, 1.0, 4.99], [5.01, 1e9, 1e-9, 2.0]])
        assert sums_of(log_ratios).outside.tolist() == [1, 3]

    def test_k3_is_the_kl_divergence_of_alpha_from_pi(self):
        alpha, pi = np.array([4, 2, 1, 1]) / 8, np.array([0.1, 0.2, 0.3, 0.4])
        sums = sums_of(np.repeat(np.log(pi / alpha), [4, 2, 1, 1])[None])  # tokens in exact proportion
        assert sums.k3.sum() / sums.tokens.sum() == pytest.approx(np.sum(alpha * np.log(alpha / pi)))

    def test_a_small_k3_is_exact_and_a_large_one_is_finite(self):
        assert sums_of(np.array([[1e-7]])).k3.item() == pytest.approx(5e-15, rel=1e-2)
        with np.errstate(all="raise", under="ignore"):
            assert sums_of(np.array([[1000.0]])).k3.item() == math.expm1(20) - 1000
            assert sums_of(np.array([[-1000.0]])).k3.item() == 999.0


class TestGap:
    def test_by_hand(self):
        gap = Gap().measured(7, LOGS.sum(-1), TokenSums.of(LOGS, MASK))
        assert gap.square == pytest.approx((1.3125 + 4.015625) / 5)
        assert gap.tv == pytest.approx((0 + 1 - math.exp(-1.875) + 0) / 3)
        assert gap.kl == pytest.approx(np.mean([math.exp(r) - 1 - r for r in LOGS[MASK]]))
        assert gap.absolute == pytest.approx((0.5 + 0.25 + 1.0 + 2.0 + 0.125) / 5)
        assert gap.cut_share == 1 / 5  # the token of e^-2
        assert gap.metrics(9) == {
            **{"gap/square": gap.square, "gap/tv": gap.tv, "gap/kl": gap.kl, "gap/absolute": gap.absolute},
            **{"gap/cut_share": gap.cut_share, "gap/tokens": 5, "gap/age": 2},
        }
        assert Gap(**gap.state_dict()) == gap and Gap().metrics(9) == {}

    def test_stays_as_it_is_without_on_policy_responses(self):
        before = Gap(0.5, 0.25, step=3)
        for rows in ([], [2]):  # the last one has no tokens
            assert before.measured(7, LOGS[rows].sum(-1), TokenSums.of(LOGS, MASK).at(rows)) is before

    @pytest.mark.parametrize(("absolute", "wanted"), [(0.004, 0.01), (0.03, 0.06)])
    def test_explains_twice_as_much_of_the_first_ratio(self, absolute, wanted):
        assert Gap(absolute=absolute).explained == pytest.approx(wanted)


def one_by_one(log_ratios: list[list[float]], current: list[bool], sizes: list[int], square: float) -> list[float]:
    """The shift of each group by its definition, token by token."""
    excess = [[0.0 if now else r * r - square for r in row] for row, now in zip(log_ratios, current, strict=True)]
    old = [value for row, now in zip(excess, current, strict=True) if not now for value in row]
    result, start = [], 0
    for size in sizes:
        rows, flags = excess[start : start + size], current[start : start + size]
        start += size
        values = [value for row, now in zip(rows, flags, strict=True) if not now for value in row]
        mean = (math.fsum(values) + BORROWED * math.fsum(old) / len(old)) / (len(values) + BORROWED) if values else 0.0
        result.append(max(0.0, mean * len(values) / sum(map(len, rows))))
    return result


class TestShift:
    @given(data=st.data())
    @settings(max_examples=2 * settings.default.max_examples, derandomize=True, database=None)
    def test_of_groups_against_the_definition(self, data):
        sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
        log_ratio = st.floats(-3, 3)
        rows = [data.draw(st.lists(log_ratio, min_size=1, max_size=5)) for _ in range(sum(sizes))]
        current = [data.draw(st.booleans()) for _ in rows]
        square = data.draw(st.floats(0, 2))
        width = max(map(len, rows))
        mask = np.array([[place < len(row) for place in range(width)] for row in rows])
        padded = np.array([row + [0.0] * (width - len(row)) for row in rows])
        sums, gap = TokenSums.of(padded, mask), Gap(square)
        result = group_shifts(sums, np.array(current), sizes, gap)
        assert result == pytest.approx(one_by_one(rows, current, sizes, square), rel=1e-9, abs=1e-12)
        excess = [r * r - square for row, now in zip(rows, current, strict=True) if not now for r in row]
        whole = max(0.0, math.fsum(excess) / sum(map(len, rows)))
        assert shift(sums, np.array(current), gap) == pytest.approx(whole, rel=1e-9, abs=1e-12)

    def test_of_nothing(self):
        nothing = TokenSums(*np.zeros((len(TokenSums._fields), 0)))
        assert shift(nothing, np.zeros(0, dtype=bool), Gap()) == 0
        assert group_shifts(nothing, np.zeros(0, dtype=bool), [], Gap()).shape == (0,)
        empty = TokenSums(*np.zeros((len(TokenSums._fields), 2)))  # two responses without a token
        assert shift(empty, np.zeros(2, dtype=bool), Gap()) == 0
        assert group_shifts(empty, np.zeros(2, dtype=bool), [1, 1], Gap()).tolist() == [0, 0]


def test_on_policy_asks_for_each_response(make_group):
    old, group = make_group(1, step=5), make_group(0, size=3, step=9, weights_version=9)
    mixed = group.exchange(1, old.standalone(old.responses[0]))
    assert on_policy([mixed, replace(group, weights_version=8)], 9).tolist() == [True, False, True, False, False, False]
    assert on_policy([mixed], 6).tolist() == [True, False, True]  # today's weights are those of step 6 still
    assert on_policy([], 9).shape == (0,)
