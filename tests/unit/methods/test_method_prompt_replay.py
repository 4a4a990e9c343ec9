"""Prompt Replay: which prompts come again, by hand and side by side with the independent rules."""

from collections import Counter
from fractions import Fraction as F

import pytest
import reference_rules as rules
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods.prompt_replay import PromptReplay

# In the order of their ids, which decides between equal prompts.
PROMPTS = sorted((Prompt(f"prompt {number}", label=str(number)) for number in range(12)), key=lambda prompt: prompt.id)
A, B, C, D, E, *_ = PROMPTS


def prompt_replay(capacity: int = 8, **options) -> PromptReplay:
    return PromptReplay(capacity=capacity, **{"group_size": 8} | options)


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6]), (0, [])])
def test_only_in_steps_that_re_evaluate(make_group, every, steps):
    method, named = prompt_replay(cooldown=0, reevaluate_every=every), []
    method.build_batch(0, [make_group(4, prompt=A)], [])
    for step in range(1, 7):
        again = [make_group(4, prompt=prompt) for prompt in method.begin_step(step)]
        method.build_batch(step, [], again)
        named += [step] * len(again)
    assert named == steps


def test_lists_of_a_batch(make_group):
    method = prompt_replay(16, cooldown=1)
    method.build_batch(0, [make_group(4, prompt=prompt) for prompt in PROMPTS[:6]], [])
    named, rights = method.begin_step(1), (3, 0, 8, 7, [0.25] * 8, [0.5] * 8)
    again = [make_group(right, prompt=prompt, step=1) for right, prompt in zip(rights, named, strict=True)]
    fresh = [make_group(right, step=1) for right in (1, 0)]
    batch = method.build_batch(1, fresh, again)
    assert (batch.fresh, batch.filtered) == ([fresh[0]], [fresh[1]])
    lists = (batch.reevaluated, batch.unimproved, batch.solved)
    assert [[group.prompt for group in groups] for groups in lists] == [[A, D], [B, E], [C, PROMPTS[5]]]
    assert method.metrics() == {"groups/reevaluation_attempts": 6, "again/stored": 3, "again/used_up": 0}


def test_side_by_side_with_the_rules(make_group):
    """Random runs, with groups that fail, and generation up to 2 steps ahead. Every group is counted."""
    met: Counter[str] = Counter()

    @settings(derandomize=True, database=None)
    @given(st.data())
    def check(data):
        capacity, size = data.draw(st.integers(2, 9)), data.draw(st.sampled_from([2, 4, 5]))
        share = data.draw(st.sampled_from([F(1, 2), F(1), F(3, 4), F(1), F(0)]))
        cooldown, most = data.draw(st.sampled_from([1, 0, 2, 3])), data.draw(st.sampled_from([0, 3, 2, 1]))
        window = data.draw(st.sampled_from([(F(1, 100), F(99, 100)), (F(1, 4), F(3, 4)), (F(2, 5), F(1, 2))]))
        options = {"group_size": size, "replay_share": share, "cooldown": cooldown, "most_uses": most}
        options |= {"lowest": window[0], "highest": window[1]}
        method, ledger, ahead = prompt_replay(capacity, **options), Ledger(), data.draw(st.integers(0, 2))
        theirs = rules.PromptReplay(capacity, share, cooldown, most, window)
        coming: dict[int, list[Prompt]] = {}  # named prompts by the step that gets their groups
        right = st.sampled_from([size // 2, *range(size + 1)])

        def made(prompts, step):
            return [make_group(data.draw(right), size=size, prompt=prompt, step=step) for prompt in prompts]

        for step in range(data.draw(st.integers(6, 10))):
            expected = [PROMPTS[n] for n in theirs.choose(step)] if step else []
            assert method.begin_step(step) == expected
            coming[step + ahead] = expected
            fresh = made(data.draw(st.lists(st.sampled_from(PROMPTS[:7]), min_size=1, max_size=6)), step)
            due = coming.pop(step, [])
            failed = [prompt for prompt in due if data.draw(st.sampled_from([False] * 5 + [True]))]
            again = made([prompt for prompt in due if prompt not in failed], step)
            method.unanswered(failed)
            batch = method.build_batch(step, fresh, again)
            ledger.settle(fresh + again, batch, failed=[size] * len(failed))

            away = set(theirs.under_way)
            theirs.record(step, [(PROMPTS.index(group.prompt), group.mean) for group in fresh])
            theirs.under_way |= away  # a fresh group of a prompt does not end that its other group is under way
            theirs.record(step, [(PROMPTS.index(group.prompt), group.mean) for group in again])
            numbers = [PROMPTS.index(prompt) for prompt in failed]
            theirs.record(step, [(number, theirs.rate[number]) for number in numbers])
            signal = [group for group in fresh + again if len(set(group.rewards)) > 1]
            assert len(batch) == min(len(signal), capacity) and len(batch) + len(batch.cut) == len(signal)
            assert {group.uid for group in batch.reevaluated} <= {group.uid for group in again}
            used_up = sum(uses >= most > 0 for uses in theirs.uses.values())
            assert method.metrics()["again/used_up"] == used_up
            for name in ("reevaluated", "unimproved", "solved", "cut"):
                met[name] += len(getattr(batch, name))
            met.update(named=len(expected), failed=len(failed), used_up=used_up)
        ledger.check()

    check()
    assert min(met.values()) >= 5 and len(met) == 7, met
