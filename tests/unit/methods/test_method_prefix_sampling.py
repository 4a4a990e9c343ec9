"""Prefix Sampling, and BAPO with prefixes: what is stored, trained on and counted, on random streams."""

from fractions import Fraction as F

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_step import uids

from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.adapt.thresholds import Interval
from bapo_openrlhf.methods import BAPO
from bapo_openrlhf.methods.bapo_demonstrations import DemonstratingBAPO
from bapo_openrlhf.methods.prefix_sampling import PrefixSampling
from bapo_openrlhf.record.state_file import load_state, save_state

G = 8
STREAM = st.lists(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, G)), max_size=5), min_size=2, max_size=7)


def informative(group) -> bool:
    return 0 < group.mean < 1


def groups_for(method, step, make_group, right):
    """The groups of the prompts that the method names. The prefix of each is a part of its own response."""
    again = [
        make_group(right(n), prompt=prompt, step=step, prompt_tokens=3 + len(prompt.prefix), response_tokens=4)
        for n, prompt in enumerate(method.begin_step(step))
    ]
    assert len({(group.prompt.id, group.prompt.prefix) for group in again}) == len(again)
    return again


@given(stream=STREAM, seed=st.integers(0, 99))
def test_prefix_sampling_generates_once_for_each_unbalanced_group(make_group, stream, seed):
    method, ledger, waiting = PrefixSampling(capacity=4, group_size=G, filter="none"), Ledger(), {}
    draw = np.random.default_rng(seed)
    for step, rows in enumerate(stream):
        again = groups_for(method, step, make_group, lambda n: int(draw.integers(0, G + 1)))
        assert {group.prompt.text: len(group.prompt.prefix) for group in again} == {name: 3 for name in waiting}
        assert all(group.prompt.prefix in waiting[group.prompt.text] for group in again)
        fresh = [make_group(right, prompt=name, step=step, response_tokens=6) for name, right in rows]
        batch = method.build_batch(step, fresh, again)
        ledger.settle([*fresh, *again], batch)
        signal = [group for group in again if informative(group)]
        assert set(uids(batch.prefixed)) | set(uids(batch.cut)) >= set(uids(signal)) >= set(uids(batch.prefixed))
        assert uids(batch.unsteered) == [group.uid for group in again if not informative(group)]
        if 8 * (len(fresh) + len(signal)) <= 32:
            assert batch.prefixed == signal and batch.fresh == fresh
        assert not batch.reevaluated and not batch.replayed and batch.responses <= 32
        waiting = {}
        for group in fresh:
            few = {1: [0], 2: [0, 1], 6: [6, 7], 7: [7]}.get(int(8 * group.mean))
            if few:
                waiting.pop(group.prompt.text, None)
                waiting[group.prompt.text] = [tuple(group.responses[n].token_ids[3:6].tolist()) for n in few]


def test_prompts_wait_for_the_step_of_a_re_evaluation(make_group):
    method = PrefixSampling(capacity=4, group_size=G, reevaluate_every=2)
    method.build_batch(0, [make_group(1, response_tokens=6)], [])
    assert [len(method.begin_step(step)) for step in (1, 2)] == [0, 1]


def bapo(**options):
    values = {
        "capacity": 5, "group_size": G, "reevaluate_every": 1, "max_reevaluated_prompts": 6, "buffer_size": 4,
        "c2": Interval(F(1, 8), F(1, 2)), "c3": Interval(F(1, 2), F(7, 8)), "prefix_share": F(1, 2),
    }  # fmt: skip
    return BAPO(**values | options)


def state_parts(method):
    """The parts of a state that a group with a prefix must not move."""
    state = method.state_dict()
    groups = [(row["uid"], row["prompt"]["text"]) for row in state["replay"]["groups"]]
    return state["hard"], state["thresholds"], groups, dict(method.replay.counts)


@given(stream=STREAM, seed=st.integers(0, 99), solved=st.sets(st.sampled_from("abcdef")))
def test_bapo_stores_what_it_would_without_groups_with_a_prefix(make_group, tmp_path_factory, stream, seed, solved):
    """A second BAPO has no prefixes, and gets only the other groups. What both store is equal after each step."""
    method, without = bapo(), bapo(prefix_share=F(0))
    draw, ledger = np.random.default_rng(seed), Ledger()
    for step, rows in enumerate(stream):
        solutions = {make_group(0, prompt=name).prompt.id: np.arange(70, 80) for name in solved}
        method.solutions = solutions
        before = {start.prompt.text for start in method.prefixes._entries.values()}
        unsolved = {entry.prompt.text for entry in method.hard.oldest(9) if entry.mean == 0}
        again = groups_for(method, step, make_group, lambda n: int(draw.integers(0, G + 1)))
        plain = [group for group in again if not group.prompt.prefix]
        begun = [group for group in again if group.prompt.prefix]
        assert len(begun) <= 3 and len(again) <= 6
        for group in begun:
            name = group.prompt.text
            worked = group.prompt.prefix == (70, 71, 72, 73, 74)
            assert name in (solved & unsolved - before if worked else before)
        without.begin_step(step)
        without.hard._in_flight = dict.fromkeys(group.prompt.id for group in plain)  # it may name more of them
        fresh = [make_group(right, prompt=name, step=step, response_tokens=6) for name, right in rows]
        batch = method.build_batch(step, fresh, again)
        without.build_batch(step, fresh, plain)
        ledger.settle([*fresh, *again], batch)
        assert state_parts(method) == state_parts(without)
        assert not {group.uid for group in method.replay} & set(uids(begun))
        assert all(group.prompt.prefix for group in (*batch.prefixed, *batch.unsteered))
        assert not any(group.prompt.prefix for group in (*batch.fresh, *batch.reevaluated, *batch.replayed))
        assert method.metrics()["groups/reevaluation_attempts"] == len(plain)
        folder = tmp_path_factory.mktemp("state")
        save_state(folder, method.state_dict())
        method = bapo()
        method.load_state_dict(load_state(folder))


def test_a_group_that_was_generated_again_gives_a_start_too(make_group):
    method, hard = bapo(), make_group(0, prompt="a")
    method.build_batch(0, [hard], [])
    [again] = method.begin_step(1)
    better = make_group(2, prompt=again, step=1, response_tokens=6)
    assert method.build_batch(1, [], [better]).reevaluated == [better]
    [begun] = method.begin_step(2)
    assert begun.prefix in [tuple(response.token_ids[3:6].tolist()) for response in better.responses[:2]]


@pytest.mark.parametrize("method", [PrefixSampling(capacity=4, group_size=G), bapo()])
def test_groups_may_come_in_a_later_step(make_group, method):
    """As with generation ahead: a prompt goes out again before its first group is back."""
    method.begin_step(0)
    method.build_batch(0, [make_group(1, prompt="a", response_tokens=6)], [])
    first = [prompt for prompt in method.begin_step(1) if prompt.prefix]
    method.build_batch(1, [make_group(7, prompt="a", step=1, response_tokens=8)], [])
    second = [prompt for prompt in method.begin_step(2) if prompt.prefix]
    assert [len(prompt.prefix) for prompt in (*first, *second)] == [3, 4]
    groups = [make_group(right, prompt=prompt) for right, prompt in ((0, first[0]), (4, second[0]))]
    batch = method.build_batch(2, [], groups)
    assert (batch.unsteered, batch.prefixed) == ([groups[0]], [groups[1]])


def test_no_demonstration_for_a_group_with_a_prefix(make_group):
    method = DemonstratingBAPO(capacity=4, group_size=G, reevaluate_every=1, failures=2, prefix_share=F(1, 2))
    hard = make_group(0, prompt="a")
    method.solutions = {hard.prompt.id: np.arange(10)}
    method.build_batch(0, [hard], [])
    batch = method.build_batch(1, [], [make_group(0, prompt=prompt, step=1) for prompt in method.begin_step(1)])
    assert (len(batch.unimproved), len(batch.unsteered), batch.demonstration) == (1, 1, [])
    assert method.failed == {hard.prompt.id: 1}


def test_the_share_stays_if_it_is_not_steered(make_group):
    method = PrefixSampling(capacity=4, group_size=G, prefix_share=F(1, 4), steered=False)
    for step in range(4):
        again = [make_group(0, prompt=prompt, step=step) for prompt in method.begin_step(step)]
        assert all(len(group.prompt.prefix) == 3 for group in again)
        method.build_batch(step, [make_group(1, prompt="a", step=step, response_tokens=12)], again)
    assert method.metrics()["prefix/share_right"] == 0.25
