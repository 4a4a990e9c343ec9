"""ARPO after arXiv 2505.16282: a second implementation driven side by side, and limits."""

from collections import Counter
from fractions import Fraction as F

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import names, run

from bapo_openrlhf.methods.arpo import ARPO


def arpo(capacity: int = 8, **options) -> ARPO:
    return ARPO(capacity=capacity, **{"group_size": 8} | options)


class TestExchange:
    @pytest.mark.parametrize(("rewards", "failed"), [
        (["0.2", "0.2"], False),  # the mean is no longer below 0.2
        (["0.19", "0.19"], True),
        (["0.1", "0"], False),  # the standard deviation is 0.05, no longer below
        (["0.09", "0"], True),
    ])  # fmt: skip
    def test_when_a_group_has_failed(self, make, rewards, failed):
        assert arpo().has_failed(make(rewards, "a")) is failed

    def test_other_limits(self, make):
        method = arpo(mean_below=F(1, 2), std_below=F(1, 2), success_above=F(1, 2))
        assert method.has_failed(make([0, "0.9"], "a"))  # 0.45 and 0.45
        assert not method.has_failed(make([0, 1], "a"))
        run(method, 0, [make(["0.1", "0.5", 0, 1], "a", uid=5)])
        assert [names(group) for group in method.cache] == [[(5, 3)]]

    def test_draws_are_uniform(self, make):
        """Which of 4 successes of two groups, over many draws: chi-square with 3 degrees of freedom."""
        method, draws = arpo(seed=3), 2_000
        run(method, 0, [make([1, 1, 0], "a", uid=0), make([0, 1, 1], "a", uid=1)])
        fresh = [make([0, 0, 0], "a", step=1) for _ in range(draws)]
        method.max_responses = 3 * draws
        seen = Counter(names(group)[0] for group in run(method, 1, fresh).fresh)
        assert set(seen) == {(0, 0), (0, 1), (1, 1), (1, 2)}
        assert sum((count - draws / 4) ** 2 / (draws / 4) for count in seen.values()) < 16.3  # 99.9 % point


def test_the_filter_sees_the_group_after_the_exchange(make):
    """A gaussian filter of mean 1/4 keeps what has this mean for certain."""
    method = arpo(filter="gaussian", gaussian_mean=0.25, gaussian_std=0.01)
    run(method, 0, [make([1, 0, 0, 0], "a")])
    batch = run(method, 1, [make([0] * 4, "a", step=1), make([1, 1, 0, 0], "a", step=1)])
    assert [group.mean for group in batch.fresh] == [F(1, 4)]
    assert [group.mean for group in batch.filtered] == [F(1, 2)]


def test_side_by_side_with_a_plain_implementation(make):
    """Successes as a list of (uid, place, policy step) by prompt; which one is drawn is the generator's choice."""
    met: Counter[str] = Counter()

    @settings(max_examples=3 * settings.default.max_examples, derandomize=True, database=None)
    @given(st.data())
    def check(data):
        size, delay = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
        options = {"group_size": size, "successes": data.draw(st.integers(1, 5))}
        capacity = data.draw(st.integers(1, 5))
        method, stored = arpo(capacity, **options), {}
        values = st.sampled_from([0, 0, 0, 0, 1]) | st.sampled_from(["0.1", "0.15", 0, "0.09", -1, 2])
        rewards = st.lists(values, min_size=size, max_size=size)
        for step in range(data.draw(st.integers(2, 7))):
            texts = data.draw(st.lists(st.sampled_from("abc"), max_size=5))
            policy = step - step % delay
            fresh = [make(data.draw(rewards), text, step=step, weights_version=policy) for text in texts]
            batch = run(method, step, fresh)

            after = {group.uid: group for group in batch.fresh + batch.filtered + batch.cut}
            kept, ages, failures = 0, [], 0
            for group, text in zip(fresh, texts, strict=True):
                numbers = [F(str(response.reward)) for response in group.responses]
                mean = sum(numbers) / size
                failed = mean < F("0.2") and sum((n - mean) ** 2 for n in numbers) / size < F("0.0025")
                failures += failed
                result = after[group.uid]
                assert names(result)[1:] == names(group)[1:]
                assert [result.weights_version_of(r) for r in result.responses[1:]] == [policy] * (size - 1)
                first = (*names(result)[0], result.weights_version_of(result.responses[0]))
                if failed and stored.get(text):
                    assert first in stored[text]
                    ages.append(step - first[2])
                else:
                    assert result is group
                signal = len({response.reward for response in result.responses}) > 1
                kept += signal
                assert (result in batch.filtered) == (not signal)
            assert len(batch.fresh) == min(kept, capacity) and not batch.replayed + batch.reevaluated
            spreads = [sorted((g.variance for g in part), reverse=True) for part in (batch.fresh, batch.cut)]
            assert not spreads[0] or not spreads[1] or spreads[0][-1] >= spreads[1][0]
            metrics = method.metrics()
            assert (metrics["exchange/groups"], metrics["exchange/failed"]) == (len(ages), failures)
            assert metrics.get("exchange/age_mean") == (pytest.approx(sum(ages) / len(ages)) if ages else None)
            for group, text in zip(fresh, texts, strict=True):
                new = [
                    (*name, policy)
                    for name, r in zip(names(group), group.responses, strict=True)
                    if F(str(r.reward)) > F("0.1")
                ]
                stored[text] = (stored.get(text, []) + new)[-options["successes"] :]
            assert method.metrics()["cache/responses"] == sum(map(len, stored.values()))
            met.update({"exchanged": len(ages), "cut": len(batch.cut), "failed": failures - len(ages)})

    check()
    assert min(met.values()) > 5 and len(met) == 3, met
