"""Prefixes: which responses wait, where they are cut, how the share moves, and that nothing is lost."""

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction as F

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.adapt.prefixes import Prefixes, PrefixShare, by_prefix
from bapo_openrlhf.record.state_file import load_state, save_state

RNG = np.random.Generator(np.random.PCG64(3))
RIGHT = {0: None, 1: "right", 2: "right", 3: None, 4: None, 5: None, 6: "wrong", 7: "wrong", 8: None}


def outcome(group):
    """A response as it would be cut by a share of 1/2, without the prompt."""
    return [response.token_ids[3:].tolist() for response in group.responses]


@pytest.mark.parametrize(("right", "kind"), RIGHT.items())
def test_a_start_is_a_minority_response_of_an_unbalanced_group(make_group, right, kind):
    """Of 8: one or two right ones are few, and so are one or two wrong ones. The others are balanced or all equal."""
    group = make_group(right, response_tokens=6)
    prefixes, drawn = Prefixes(4, F(1, 2)), Counter()
    for _ in range(40):
        prefixes.store([group], RNG)
        for prompt in prefixes.take(1):
            assert prompt.id == group.prompt.id and prefixes.back(prompt) == kind
            drawn[prompt.prefix] += 1
    minority = {"right": range(right), "wrong": range(right, 8), None: ()}[kind]
    assert set(drawn) == {tuple(outcome(group)[place][:3]) for place in minority}
    assert len(prefixes) == 0


def test_other_rewards_have_a_best_and_a_worst_response(make_group):
    for rewards, kind, place in (([0.1, 0.4, 0.2, 0.2], "right", 1), ([0.9, 1.0, 0.75, 0.8], "wrong", 2)):
        group, prefixes = make_group(rewards, response_tokens=4), Prefixes(4, F(1, 4))
        prefixes.store([group], RNG)
        [prompt] = prefixes.take(1)
        assert prompt.prefix == tuple(outcome(group)[place][:1]) and prefixes.back(prompt) == kind
    equal = make_group([0.2] * 4)
    prefixes.store([equal, replace(group, prompt=replace(group.prompt, prefix=(1,)))], RNG)
    assert len(prefixes) == 0  # no minority, and one that began with a prefix itself
    prefixes.store([make_group(1, response_tokens=1)], RNG)
    assert len(prefixes) == 0  # nothing would be left to generate
    prefixes.store([make_group(right, size=10) for right in (3, 7)], RNG)
    assert len(prefixes) == 0  # both ends of what is balanced


@given(st.fractions(F(1, 20), F(19, 20)), st.integers(2, 300))
def test_a_part_of_the_response_is_left(share, tokens):
    length = PrefixShare(share, helps=True, moves=True).length(tokens)
    assert length == sorted((1, math.floor(share * tokens), tokens - 1))[1]


@example([0.0] * 20, True, True, 10)  # it changes whenever it may
@example([1.0] * 99, False, True, 3)
@given(
    st.lists(st.integers(0, 8).map(lambda right: right / 8), max_size=60), st.booleans(), st.booleans(),
    st.integers(1, 19),
)  # fmt: skip
def test_the_share_moves_as_the_authors_write(means, helps, moves, first):
    """EMA with 0.05, dead zone of 0.03 around 0.5, changes of 0.05, 5 steps of rest: from the numbers of all steps."""
    steered, twentieths, last = PrefixShare(F(first, 20), helps=helps, moves=moves), first, -99
    for step, mean in enumerate(means):
        steered.observe(mean)
        weights = [0.05 * 0.95 ** (step - at) for at in range(step + 1)]
        average = 0.5 * 0.95 ** (step + 1) + sum(w * m for w, m in zip(weights, means, strict=False))
        assert steered.average == pytest.approx(average)
        if moves and step - last > 5 and abs(steered.average - 0.5) > 0.03:
            easier = steered.average < 0.5
            twentieths += 1 if easier == helps else -1
            twentieths, last = min(max(twentieths, 1), 19), step
        assert steered.share == F(twentieths, 20)


def test_many_failures_make_the_prefix_longer_and_a_wrong_one_shorter(make_group):
    prefixes = Prefixes(8, F(1, 2))
    for step in range(3):
        for right in (1, 7):
            prefixes.store([make_group(right, prompt=f"{step} {right}", response_tokens=40)], RNG)
        taken = prefixes.take(2)
        prefixes.review([make_group(0, prompt=prompt) for prompt in taken])
    assert [len(prompt.prefix) for prompt in taken] == [22, 18]  # one change of 1/20 after the second step
    assert prefixes.metrics()["prefix/share_worked"] == 0.5


def test_a_worked_solution_is_for_prompts_without_a_stored_response(make_group):
    prefixes = Prefixes(8, F(1, 2))
    mine, other, third = make_group(1, response_tokens=4), make_group(0), make_group(0)
    prefixes.store([mine], RNG)
    solutions = {group.prompt.id: np.arange(50, 60) for group in (mine, other)}
    hard = [group.prompt for group in (mine, other, third)]
    taken = prefixes.take(5, hard, solutions)
    assert [(prompt.text, len(prompt.prefix)) for prompt in taken] == [(mine.prompt.text, 2), (other.prompt.text, 5)]
    assert taken[1].prefix == (50, 51, 52, 53, 54)
    assert [prefixes.back(prompt) for prompt in taken] == ["right", "worked"]
    prefixes.store([mine], RNG)
    assert [prompt.text for prompt in prefixes.take(1, hard, solutions)] == [mine.prompt.text]


def test_groups_that_come_back_are_measured(make_group):
    prefixes = Prefixes(8, F(1, 4))
    groups = [make_group(1, prompt=name, response_tokens=8) for name in "abc"]
    prefixes.store(groups, RNG)
    taken = prefixes.take(3)
    back = [make_group(2 * n, size=4, prompt=prompt, response_tokens=3) for n, prompt in enumerate(taken)]
    signal, equal = prefixes.review(back)
    assert (signal, equal) == ([back[1]], [back[0], back[2]])
    assert prefixes.metrics()["prefix/token_share"] == pytest.approx(2 / (2 + 3))
    assert prefixes.metrics()["prefix/mean_reward"] == 0.5
    assert by_prefix([*back, groups[0]]) == ([groups[0]], back)
    prefixes.review([])
    assert "prefix/token_share" not in prefixes.metrics()


@given(data=st.data())
def test_one_start_for_each_prompt_oldest_first_and_none_is_lost(data, make_group, tmp_path_factory):
    """Against a list of what waits. The state goes through a file now and then."""
    capacity = data.draw(st.integers(1, 4))
    prefixes, rng = Prefixes(capacity, F(1, 2)), np.random.Generator(np.random.PCG64(1))
    waiting, out, counts = [], [], Counter()
    for _ in range(data.draw(st.integers(1, 8))):
        names = data.draw(st.lists(st.sampled_from("abcdef"), max_size=4))
        for name in names:
            kind = data.draw(st.sampled_from([1, 4, 7]))
            tokens = data.draw(st.integers(2, 9))
            prefixes.store([make_group(kind, prompt=name, response_tokens=tokens)], rng)
            if kind == 4:
                continue
            counts["added"] += 1
            counts["replaced"] += name in [entry[0] for entry in waiting]
            waiting = [entry for entry in waiting if entry[0] != name] + [(name, tokens // 2)]
            counts["evicted"] += len(waiting) > capacity
            waiting = waiting[-capacity:]
        count = data.draw(st.integers(0, 3))
        taken, expected, waiting = prefixes.take(count), waiting[:count], waiting[count:]
        assert [(prompt.text, len(prompt.prefix)) for prompt in taken] == expected
        counts["taken"] += len(expected)
        out += taken
        if data.draw(st.booleans()):
            folder = tmp_path_factory.mktemp("state")
            save_state(folder, prefixes.state_dict())
            prefixes = Prefixes(capacity, F(1, 3))
            prefixes.load_state_dict(load_state(folder))
        back = [out.pop(0) for _ in range(data.draw(st.integers(0, len(out))))]
        for prompt in back:
            prefixes.back(prompt)
        assert +prefixes.counts == +counts and len(prefixes) == len(waiting)
    prefixes.check()
    for prompt in out:
        prefixes.back(prompt)
    with pytest.raises(StopIteration):
        prefixes.back(Prompt("a", prefix=(1,)))


def test_the_oldest_starts_leave_if_a_resume_has_room_for_fewer(make_group):
    prefixes, rng = Prefixes(3, F(1, 2)), np.random.Generator(np.random.PCG64(1))
    prefixes.store([make_group(1, prompt=name) for name in "abc"], rng)
    smaller = Prefixes(2, F(1, 2))
    smaller.load_state_dict(prefixes.state_dict())
    assert smaller.counts == Counter(added=3, evicted=1)
    assert [prompt.text for prompt in smaller.take(3)] == ["b", "c"]


def test_a_start_that_is_lost_is_found(make_group):
    prefixes = Prefixes(2, F(1, 2))
    prefixes.store([make_group(1)], RNG)
    prefixes._entries.clear()
    with pytest.raises(RuntimeError, match="store of prefixes lost"):
        prefixes.metrics()


def test_a_prefix_changes_no_id():
    prompt = Prompt("a", "1")
    begun = replace(prompt, prefix=[1, 2])
    assert begun.id == prompt.id and begun.prefix == (1, 2) and begun != prompt
