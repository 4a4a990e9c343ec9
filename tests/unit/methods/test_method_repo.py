"""RePO after arXiv 2506.09340: a second implementation driven side by side."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction as F

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import names, run
from reference_rules import exact_variance

from bapo_openrlhf.methods.repo import STRATEGIES, RePO


def repo(capacity: int = 8, group_size: int = 2, **options) -> RePO:
    return RePO(capacity=capacity, group_size=group_size, **options)


def rewards_of(group) -> list[float]:
    return [response.reward for response in group.responses]


def test_random_draws_are_uniform_and_without_replacement(make):
    """Which 2 of 4, over many draws: chi-square with 5 degrees of freedom."""
    method = repo(strategy="random", seed=3)
    for step, rewards in enumerate(([0, 4], [1, 2])):
        run(method, step, [make(rewards, "a", step=step)])
    cached, draws = list(method.cache), 3_000
    seen = Counter(tuple(rewards_of(method.replays(cached)[0])) for _ in range(draws))
    assert set(seen) == set(itertools.combinations([0, 4, 1, 2], 2))  # in the order of generation
    expected = draws / math.comb(4, 2)
    assert sum((count - expected) ** 2 / expected for count in seen.values()) < 20.5  # 99.9 % point


def test_the_default_cache_has_the_responses_of_two_groups():
    """As the authors: 16 with G = 8."""
    method = repo(group_size=3)
    assert (method.warm_up, method.cache.capacity) == (6, 6)


def test_a_replayed_group_has_the_range_of_its_rewards(make):
    ends = (F(-1), F(1))
    groups = [replace(make([-1, 1], "a", step=step, uid=step), reward_range=ends) for step in range(2)]
    method = repo(cache_responses=2)
    run(method, 0, groups[:1])
    (group,) = run(method, 1, groups[1:]).replayed
    assert group.reward_range == ends and group.mean == F(1, 2)


class Plain:
    """The rules once more, on tuples (uid, place, reward, step, policy step), by trying all subsets."""

    def __init__(self, *, capacity, group_size, strategy, cache_responses, warm_up):
        self.capacity, self.size, self.strategy = capacity, group_size, strategy
        self.cached, self.warm_up = cache_responses, warm_up
        self.cache: dict[str, list[tuple]] = {}

    def candidates(self, text: str) -> list[set[tuple]]:
        """What may be replayed of a prompt; with `random`, every choice that can come."""
        held = self.cache.get(text, [])
        if len(held) < self.warm_up:
            return []
        if self.strategy == "all":
            by_uid = [[item for item in held if item[0] == uid] for uid in sorted({item[0] for item in held})]
            return [set(group) for group in by_uid if len(group) == self.size]
        subsets = list(itertools.combinations(held, self.size))
        if self.strategy == "random":
            return [set(subset) for subset in subsets]

        def newness(subset):
            return sorted((held.index(item) for item in subset), reverse=True)

        def total(subset):
            return sum(item[2] for item in subset)

        def spread(subset):
            return sum((a[2] - b[2]) ** 2 for a in subset for b in subset)

        key = {
            "highest": lambda subset: (total(subset), newness(subset)),
            "recent": newness,
            "variance": lambda subset: (spread(subset), total(subset), newness(subset)),
        }[self.strategy]
        return [set(max(subsets, key=key))]

    def store(self, text: str, items: list[tuple]) -> None:
        self.cache[text] = (self.cache.get(text, []) + items)[-self.cached :]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_side_by_side_with_the_plain_implementation(make, strategy):
    met: Counter[str] = Counter()

    @settings(max_examples=3 * settings.default.max_examples, derandomize=True, database=None)
    @given(st.data())
    def check(data):
        size = data.draw(st.integers(2, 3))
        cached = data.draw(st.integers(size, 3 * size))
        options = {"group_size": size, "strategy": strategy, "cache_responses": cached}
        options |= {"capacity": data.draw(st.integers(1, 9)), "warm_up": data.draw(st.integers(size, cached))}
        method, plain = RePO(**options), Plain(**options)
        delay = data.draw(st.integers(1, 3))
        rewards = st.lists(st.sampled_from([0, 1]) | st.sampled_from([0, 1, 2, -1, 0.5]), min_size=size, max_size=size)
        for step in range(data.draw(st.integers(4, 9))):
            texts = data.draw(st.lists(st.sampled_from("abc"), max_size=6))
            where = {"step": step, "weights_version": step - step % delay}
            fresh = [make(data.draw(rewards), text, **where) for text in texts]
            batch = run(method, step, fresh)
            held = list(method.cache)
            assert method.metrics()["cache/responses"] == sum(len(group.responses) for group in held)
            assert method.metrics()["cache/bytes"] == sum(
                4 * (len(one.token_ids) + len(one.log_probs)) for group in held for one in group.responses
            )

            # X1 and what fits
            metrics = method.metrics()
            informative = [group for group in fresh if len(set(group.rewards)) > 1]
            offered = [(text, plain.candidates(text)) for text in dict.fromkeys(texts)]
            with_signal = [
                (text, items) for text, choices in offered for items in choices if len({item[2] for item in items}) > 1
            ]
            if strategy == "random":  # which, is the generator's choice; without signal it is no choice
                assert metrics["cache/drawn"] == sum(bool(choices) for _, choices in offered)
            else:
                assert metrics["cache/drawn"] == sum(len(choices) for _, choices in offered)
                assert metrics["cache/drawn"] - metrics["cache/without_signal"] == len(with_signal)
            available = metrics["cache/drawn"] - metrics["cache/without_signal"]
            total = min(len(informative) + available, plain.capacity)
            x1 = min(len(informative), total)
            assert (len(batch.fresh), len(batch.replayed)) == (x1, total - x1)
            assert {g.uid for g in batch.fresh + batch.cut} == {g.uid for g in informative}

            # X3
            allowed = [(text, frozenset(items)) for text, items in with_signal]
            result = []
            for group in batch.replayed:
                assert group.size == size and len(set(group.rewards)) > 1
                text = group.prompt.text
                held = {item[:2]: item for item in plain.cache[text]}
                items = [held[name] for name in names(group)]
                assert items == sorted(items, key=plain.cache[text].index)  # in the order of generation
                assert [item[2] for item in items] == rewards_of(group)
                assert group.uid == max(item[0] for item in items)
                assert (group.step, group.weights_version) == (min(i[3] for i in items), min(i[4] for i in items))
                assert [group.weights_version_of(response) for response in group.responses] == [i[4] for i in items]
                assert group.step < step and group.weights_version != step
                result.append((text, frozenset(items)))
            assert not Counter(result) - Counter(allowed)
            assert metrics["cache/no_room"] == available - len(result)
            assert len({g.uid for g in batch.replayed}) == len(batch.replayed)
            if strategy != "random":
                spreads, actual = (
                    sorted((exact_variance([item[2] for item in items]) for _, items in part), reverse=True)
                    for part in (allowed, result)
                )
                assert actual == spreads[: len(result)]

            for group in fresh:
                steps = group.step, group.weights_version
                items = [(group.uid, place, reward, *steps) for place, reward in enumerate(rewards_of(group))]
                plain.store(group.prompt.text, items)
            held = {text: [item[:2] for item in items] for text, items in plain.cache.items()}
            cache: dict[str, list] = {}
            for group in method.cache:
                cache.setdefault(group.prompt.text, []).extend(names(group))
            assert cache == held
            met.update({"replayed": len(result), "cut": len(batch.cut), "partly": len(result) < available})
            met["several steps"] += sum(len({item[3] for item in items}) > 1 for _, items in result)

    check()
    ends = {"replayed", "cut", "partly"} | ({"several steps"} if strategy not in ("all", "recent") else set())
    assert min(met[end] for end in ends) >= 2, met
