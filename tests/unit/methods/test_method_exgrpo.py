"""ExGRPO after arXiv 2510.02245: hand-worked batches, and a second implementation driven side by side."""

from __future__ import annotations

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

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods.exgrpo import ExGRPO

STARTED = F(0)  # Pass@1 to be above: the first right response starts it


def exgrpo(capacity: int = 8, group_size: int = 4, **options) -> ExGRPO:
    return ExGRPO(capacity=capacity, group_size=group_size, **({"start_above": STARTED} | options))


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


def run(method: ExGRPO, step: int, fresh=(), again=lambda prompt: None) -> Batch:
    """One step; each of its groups ends in exactly one list of the batch.

    Args:
        again: the group that is generated for a drawn prompt.
    """
    hard = [again(prompt) for prompt in method.begin_step(step)]
    batch = method.build_batch(step, list(fresh), hard)
    Ledger().settle([*fresh, *hard], batch)
    return batch


def started(**options) -> ExGRPO:
    """A method that uses experience from step 1 on."""
    method = exgrpo(**options)
    method.started = True
    return method


def stored(method: ExGRPO) -> dict[str, tuple[int, tuple[int, int]]]:
    """By text: the bucket, and the stored success."""
    return {item.group.prompt.text: (item.solved, names(item.group)[0]) for item in method.store.values()}


class TestStore:
    def test_entropy_is_per_token(self, make, make_group):
        """Of a long response with little entropy a token, and a short one with much, the first is stored."""
        method = started()
        group = make([1, 1, 0, 0], "a")
        long = make_group([1.0], response_tokens=9).responses[0]
        long = replace(long, log_probs=np.full(9, -0.5), extras={"uid": 77})
        group = replace(group, responses=(group.responses[0], long, *group.responses[2:]))
        run(method, 0, [group])
        assert stored(method)["a"][1][0] == 77


class TestStart:
    def test_after_the_step_whose_pass_rate_is_above(self, make):
        """Of 8 responses 3 are right: 0.375 is above 0.35; experience is stored before, and used from the next step on.

        The authors' code collects it in every step, and mixes it into the batches after the switch.
        """
        method = exgrpo(start_above=F(7, 20))
        run(method, 0, [make([1, 0, 0, 0], "a"), make([0, 1, 0, 0], "b"), make([0, 0, 0, 0], "c")])
        assert method.metrics()["experience/started"] == 0 and list(stored(method)) == ["a", "b"]
        assert method.begin_step(1) == []
        method.build_batch(1, [make([1, 1, 0, 0], "d"), make([1, 0, 0, 0], "c")], [])
        assert method.metrics()["experience/started"] == 1 and method.metrics()["experience/pass_rate"] == 0.375
        named = method.begin_step(2)
        assert sorted(prompt.text for prompt in named) == ["a", "b", "c", "d"]
        method.build_batch(2, [], [make([0, 0, 0, 0], prompt) for prompt in named])
        assert method.metrics()["experience/started"] == 1  # for good

    def test_the_rate_itself_is_not_above(self, make):
        method = exgrpo(start_above=F(1, 4))
        run(method, 0, [make([1, 0, 0, 0], "a")])
        assert not method.started

    def test_a_step_without_fresh_groups_starts_nothing(self):
        method = exgrpo(start_above=F(0))
        run(method, 0)
        assert not method.started and "experience/pass_rate" not in method.metrics()


class TestDraw:
    def test_a_bucket_by_its_weight_then_a_prompt_of_it(self, make):
        """G = 4: buckets 1, 2 and 3 have the weights e^-1/2, 1 and e^-1/2; 3 prompts are in bucket 1, 1 in each other.

        Chi-square with 4 degrees of freedom.
        """
        method = started(seed=2)
        rights = zip((1, 1, 1, 2, 3), "abcde", strict=True)
        run(method, 0, [make([1] * right + [0] * (4 - right), text) for right, text in rights])
        side, total, draws = math.exp(-0.5), 1 + 2 * math.exp(-0.5), 6_000
        expected = {"a": side / 3, "b": side / 3, "c": side / 3, "d": 1, "e": side}
        seen = Counter(method.draw(1)[0].text for _ in range(draws))
        wanted = {text: draws * weight / total for text, weight in expected.items()}
        assert sum((seen[text] - n) ** 2 / n for text, n in wanted.items()) < 18.5  # 99.9 % point

    def test_two_of_three_without_replacement(self, make):
        """Buckets 1, 2 and 3 with one prompt each; chi-square over the 6 ordered pairs, 5 degrees of freedom."""
        method = started(seed=4)
        run(method, 0, [make([1] * k + [0] * (4 - k), text) for k, text in zip((1, 2, 3), "abc", strict=True)])
        weight, draws = {"a": math.exp(-0.5), "b": 1.0, "c": math.exp(-0.5)}, 6_000
        total = sum(weight.values())
        seen = Counter(tuple(prompt.text for prompt in method.draw(2)) for _ in range(draws))
        assert set(seen) == set(itertools.permutations("abc", 2))
        wanted = {(x, y): draws * weight[x] / total * weight[y] / (total - weight[x]) for x, y in seen}
        assert sum((seen[pair] - n) ** 2 / n for pair, n in wanted.items()) < 20.5  # 99.9 % point

    def test_buckets_far_from_the_middle_of_a_large_group(self, make):
        method = started(group_size=200)
        run(method, 0, [make([1] + [0] * 199, "a")])
        assert [prompt.text for prompt in method.draw(1)] == ["a"]  # its weight is e^-4900


class TestExchange:
    def test_by_hand(self, make):
        """The success of step 1 (weights of step 0) takes the first place among what today's weights answer in 5."""
        method = started()
        run(method, 1, [make([0, 1, 1, 0], "a", entropies=[0, 3, 2, 0], step=1, weights_version=0, uid=10)])
        again = make([1, 0, 0, 0], "a", step=5, uid=20)
        batch = run(method, 5, [], lambda prompt: again)
        (group,) = batch.reevaluated
        assert names(group) == [(10, 2), (20, 1), (20, 2), (20, 3)]
        assert (group.uid, group.step, group.weights_version) == (20, 5, 5)
        assert [group.weights_version_of(response) for response in group.responses] == [0, 5, 5, 5]
        assert names(again)[0] == (20, 0)
        metrics = method.metrics()
        assert (metrics["exchange/age_mean"], metrics["groups/reevaluation_attempts"]) == (5, 1)
        assert stored(method) == {"a": (1, (10, 2))}  # 1 of 4 is right now, the stored one
        assert metrics["experience/prompts"] == 1 and metrics["experience/bytes"] == 28


# --- A second implementation -----------------------------------------------------------------------------------------


def test_side_by_side_with_a_plain_implementation(make):
    """The store with all successes by prompt: (entropy, age, uid, place, policy step). The least is drawn from it."""
    met: Counter[str] = Counter()

    @settings(max_examples=2 * settings.default.max_examples, derandomize=True, database=None)
    @given(st.data())
    def check(data):
        size, capacity = data.draw(st.integers(2, 4)), data.draw(st.integers(3, 9))
        share = data.draw(st.sampled_from([F(1, 2), F(1, 3), F(1), F(0)]))
        start = data.draw(st.sampled_from([F(0), F(0), F(1, 4), F(1, 2)]))
        every = data.draw(st.sampled_from([1, 1, 1, 2, 0]))
        options = {"group_size": size, "experience_share": share, "start_above": start}
        options |= {"reevaluate_every": every, "capacity": capacity}
        method, ledger, uids, delay = exgrpo(**options), Ledger(), itertools.count(), data.draw(st.integers(1, 3))
        on, solved, successes, retired = False, {}, {}, set()

        def generate(text, step, policy):
            values = st.sampled_from([0, 1]) | st.sampled_from([0, 1, 1, 2, "0.5"])
            rewards = data.draw(st.lists(values, min_size=size, max_size=size))
            entropies = data.draw(st.lists(st.integers(1, 4), min_size=size, max_size=size))
            return make(rewards, text, entropies=entropies, step=step, weights_version=policy, uid=next(uids))

        def enter(group, members):
            """Members: (entropy, uid, place, policy step, reward) of each response."""
            text, right = group.prompt.text, [member for member in members if member[-1] >= 1]
            if len(right) == size:
                retired.add(text)
            elif right:
                solved[text] = len(right)
                known = [item[2:] for item in successes.setdefault(text, [])]
                for member in right:
                    if member[1:4] not in known:
                        successes[text].append((member[0], len(known), *member[1:4]))
                        known.append(member[1:4])

        def members(group, uid_places):
            return [
                (-float(np.mean(r.log_probs)), *name, group.weights_version_of(r), r.reward)
                for name, r in zip(uid_places, group.responses, strict=True)
            ]

        for step in range(data.draw(st.integers(3, 9))):
            if data.draw(st.booleans()):
                state, method = method.state_dict(), exgrpo(**options)
                method.load_state_dict(state)
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
            mixed = []
            for group in hard:
                best = min(successes[group.prompt.text])[2:]
                actual = after[group.uid]
                origin = [
                    (*name, actual.weights_version_of(r))
                    for name, r in zip(names(actual), actual.responses, strict=True)
                ]
                assert origin == [best, *((group.uid, place, step) for place in range(1, size))]
                mixed.append(actual)
            signal = [g for g in mixed if len({r.reward for r in g.responses}) > 1]
            informative = [g for g in fresh if len({r.reward for r in g.responses}) > 1]
            assert [g.uid for g in batch.solved] == [g.uid for g in mixed if g not in signal]
            assert batch.reevaluated == signal
            assert len(batch) == min(len(signal) + len(informative), capacity)
            left = [g for g in informative if g not in batch.fresh]
            assert not left or not batch.fresh or min(g.variance for g in batch.fresh) >= max(g.variance for g in left)
            for group in fresh + mixed:
                enter(group, members(group, names(group)))
            flags = [r.reward >= 1 for g in fresh for r in g.responses]
            on = on or (bool(flags) and F(sum(flags), len(flags)) > start)
            assert method.started == on
            assert {t: k for t, (k, _) in stored(method).items()} == {
                t: k for t, k in solved.items() if t not in retired
            }
            assert len(method.retired) == method.metrics()["experience/retired"] == len(retired)
            kept = [r for item in method.store.values() for r in item.group.responses]
            assert method.metrics()["experience/bytes"] == sum(4 * (len(r.token_ids) + len(r.log_probs)) for r in kept)
            met.update({"mixed": len(signal), "solved": len(batch.solved), "cut": len(batch.cut)})

    check()
    assert min(met.values()) > 3 and len(met) == 3, met
