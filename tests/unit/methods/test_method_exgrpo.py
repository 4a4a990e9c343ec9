"""ExGRPO after arXiv 2510.02245: draws against closed forms, a second implementation driven side by side."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction as F

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import names

from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods.exgrpo import ExGRPO


def exgrpo(**options) -> ExGRPO:
    return ExGRPO(**{"capacity": 8, "group_size": 4} | options)


@pytest.fixture(scope="session")
def make(make_group):
    """`make([0, 1], "a", entropies=[1, 2])`: a group of prompt a with these rewards; its responses know its uid.

    A response of entropy h has two tokens with log-probs -h - 1/4 and -h + 1/4.
    """

    def build(rewards, prompt, *, entropies=None, **where):
        group = make_group([float(r) for r in rewards], prompt=prompt, **where)
        responses = tuple(
            replace(response, extras={"uid": group.uid}, log_probs=np.array([-h - 0.25, -h + 0.25]))
            for response, h in zip(group.responses, entropies or [1] * group.size, strict=True)
        )
        return replace(group, responses=responses)

    return build


def test_entropy_is_per_token(make, make_group):
    """Of a long response with little entropy a token, and a short one with much, the first is stored."""
    method = exgrpo()
    group = make([1, 1, 0, 0], "a")
    long = make_group([1.0], response_tokens=9).responses[0]
    long = replace(long, log_probs=np.full(9, -0.5), extras={"uid": 77})
    group = replace(group, responses=(group.responses[0], long, *group.responses[2:]))
    method.build_batch(0, [group], [])
    (item,) = method.store.values()
    assert names(item.group) == [(77, 0)]


class TestDraw:
    def test_a_bucket_by_its_weight_then_a_prompt_of_it_without_replacement(self, make):
        """G = 4: buckets 1, 2 and 3 have the weights e^-1/2, 1 and e^-1/2; two prompts are in bucket 1.

        Chi-square over the 12 ordered pairs, 11 degrees of freedom.
        """
        method, buckets = exgrpo(seed=2), {"a": 1, "b": 1, "c": 2, "d": 3}
        method.build_batch(0, [make([1] * right + [0] * (4 - right), text) for text, right in buckets.items()], [])
        weight = {1: math.exp(-0.5), 2: 1.0, 3: math.exp(-0.5)}

        def chance(text, left):
            of_buckets = Counter(buckets[each] for each in left)
            return weight[buckets[text]] / sum(weight[k] for k in of_buckets) / of_buckets[buckets[text]]

        draws = 6_000
        seen = Counter(tuple(prompt.text for prompt in method.draw(2)) for _ in range(draws))
        assert set(seen) == set(itertools.permutations("abcd", 2))
        wanted = {(x, y): draws * chance(x, "abcd") * chance(y, {*"abcd"} - {x}) for x, y in seen}
        assert sum((seen[pair] - n) ** 2 / n for pair, n in wanted.items()) < 31.3  # 99.9 % point

    def test_buckets_far_from_the_middle_of_a_large_group(self, make):
        method = exgrpo(group_size=200)
        method.build_batch(0, [make([1] + [0] * 199, "a")], [])
        assert [prompt.text for prompt in method.draw(1)] == ["a"]  # its weight is e^-4900


def test_side_by_side_with_a_plain_implementation(make):
    """The store with all successes by prompt: (entropy, age, uid, place, policy step). The least is drawn from it."""
    met: Counter[str] = Counter()

    @settings(max_examples=4 * settings.default.max_examples, derandomize=True, database=None)
    @given(st.data())
    def check(data):
        size, capacity = data.draw(st.integers(2, 4)), data.draw(st.integers(3, 9))
        share = data.draw(st.sampled_from([F(1, 2), F(1, 3), F(1), F(0)]))
        start = data.draw(st.sampled_from([F(0), F(0), F(1, 4), F(1, 2)]))
        every = data.draw(st.sampled_from([1, 1, 1, 2, 0]))
        options = {"group_size": size, "experience_share": share, "start_above": start}
        options |= {"reevaluate_every": every, "capacity": capacity}
        method, ledger, delay = exgrpo(**options), Ledger(), data.draw(st.integers(1, 3))
        on, solved, successes, retired = False, {}, {}, set()

        def generate(text, step, policy):
            values = st.sampled_from([0, 1]) | st.sampled_from([0, 1, 1, 2, "0.5"])
            rewards = data.draw(st.lists(values, min_size=size, max_size=size))
            entropies = data.draw(st.lists(st.integers(1, 4), min_size=size, max_size=size))
            return make(rewards, text, entropies=entropies, step=step, weights_version=policy)

        def enter(group):
            text, right = group.prompt.text, [member for member in members(group) if member[-1] >= 1]
            if len(right) == size:
                retired.add(text)
            elif right:
                solved[text] = len(right)
                known = [item[2:] for item in successes.setdefault(text, [])]
                for member in right:
                    if member[1:4] not in known:
                        successes[text].append((member[0], len(known), *member[1:4]))
                        known.append(member[1:4])

        def members(group):
            """(entropy, uid, place, policy step, reward) of each response."""
            return [
                (-float(np.mean(r.log_probs)), *name, group.weights_version_of(r), r.reward)
                for name, r in zip(names(group), group.responses, strict=True)
            ]

        for step in range(data.draw(st.integers(3, 9))):
            prompts = [prompt.text for prompt in method.begin_step(step)]
            held = [text for text in solved if text not in retired]
            due = on and every and step and step % every == 0
            wanted = min(len(held), math.floor(share * capacity)) if due else 0
            assert len(prompts) == len(set(prompts)) == wanted and set(prompts) <= set(held)
            policy = step - step % delay
            texts = data.draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=5))
            fresh = [generate(text, step, policy) for text in texts]
            hard = [generate(text, step, step) for text in prompts if data.draw(st.integers(0, 5))]
            batch = method.build_batch(step, fresh, hard)
            ledger.settle(fresh + hard, batch)

            after = {g.uid: g for g in batch.reevaluated + batch.solved + batch.cut if g.prompt.text in prompts}
            mixed, ages = [], []
            for group in hard:
                best = min(successes[group.prompt.text])[2:]
                actual = after[group.uid]
                origin = [member[1:4] for member in members(actual)]
                assert origin == [best, *((group.uid, place, step) for place in range(1, size))]
                mixed.append(actual)
                ages.append(step - best[2])
            signal = [g for g in mixed if len({r.reward for r in g.responses}) > 1]
            informative = [g for g in fresh if len({r.reward for r in g.responses}) > 1]
            assert [g.uid for g in batch.solved] == [g.uid for g in mixed if g not in signal]
            assert batch.reevaluated == signal
            assert len(batch) == min(len(signal) + len(informative), capacity)
            left = [g for g in informative if g not in batch.fresh]
            assert not left or not batch.fresh or min(g.variance for g in batch.fresh) >= max(g.variance for g in left)
            for group in fresh + mixed:
                enter(group)
            flags = [r.reward >= 1 for g in fresh for r in g.responses]
            on = on or (bool(flags) and F(sum(flags), len(flags)) > start)
            metrics = method.metrics()
            assert method.started == metrics["experience/started"] == on
            assert metrics["experience/pass_rate"] == pytest.approx(sum(flags) / len(flags))
            assert metrics.get("exchange/age_mean") == (pytest.approx(sum(ages) / len(ages)) if ages else None)
            assert metrics["groups/reevaluation_attempts"] == len(hard)
            held = {text: count for text, count in solved.items() if text not in retired}
            assert {item.group.prompt.text: item.solved for item in method.store.values()} == held
            assert len(method.retired) == metrics["experience/retired"] == len(retired)
            assert metrics["experience/prompts"] == len(held)
            kept = [r for item in method.store.values() for r in item.group.responses]
            assert metrics["experience/bytes"] == sum(4 * (len(r.token_ids) + len(r.log_probs)) for r in kept)
            met.update({"mixed": len(signal), "solved": len(batch.solved), "cut": len(batch.cut)})

    check()
    assert min(met.values()) > 3 and len(met) == 3, met
