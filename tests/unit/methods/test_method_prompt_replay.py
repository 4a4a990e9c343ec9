"""Prompt Replay: which prompts come again, by hand and side by side with the independent rules."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction as F

import pytest
import reference_rules as rules
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods.prompt_replay import PromptReplay

# In the order of their ids, which decides between equal prompts.
PROMPTS = sorted((Prompt(f"prompt {number}", label=str(number)) for number in range(12)), key=lambda prompt: prompt.id)
A, B, C, D, E, *_ = PROMPTS


def prompt_replay(capacity: int = 8, **options) -> PromptReplay:
    return PromptReplay(capacity=capacity, **{"group_size": 8} | options)


def run(method: PromptReplay, step: int, fresh=(), again=lambda prompt: None) -> tuple[list[Prompt], Batch]:
    """One step; each of its groups ends in exactly one list of the batch."""
    named = method.begin_step(step)
    groups = [(prompt, again(prompt)) for prompt in named]
    hard = [group for _, group in groups if group]
    method.unanswered([prompt for prompt, group in groups if not group])
    batch = method.build_batch(step, list(fresh), hard)
    Ledger().settle([*fresh, *hard], batch)
    assert batch.replayed == []
    return named, batch


class TestNamed:
    @pytest.mark.parametrize("most", [1, 2, 3, 0])
    def test_uses(self, make_group, most):
        """A prompt that is used up does not come back. Its fresh groups change nothing."""
        method = prompt_replay(cooldown=0, most_uses=most)
        run(method, 0, [make_group(4, prompt=A)])
        uses = sum(len(run(method, step, (), lambda p: make_group(4, prompt=p))[0]) for step in range(1, 9))
        assert uses == (most or 8)
        assert (method.metrics()["again/used_up"], method.metrics()["again/stored"]) == ((1, 0) if most else (0, 1))
        run(method, 9, [make_group(4, prompt=A, step=9)])
        assert bool(method.begin_step(10)) == (most == 0)

    @pytest.mark.parametrize(("every", "steps"), [(3, [3, 6]), (0, [])])
    def test_only_in_steps_that_re_evaluate(self, make_group, every, steps):
        method = prompt_replay(cooldown=0, reevaluate_every=every)
        assert method.begin_step(0) == []
        run(method, 0, [make_group(4, prompt=A)])
        assert [s for s in range(1, 7) if run(method, s, (), lambda p: make_group(4, prompt=p))[0]] == steps


def test_lists_of_a_batch(make_group):
    method = prompt_replay(16, cooldown=1)
    named = PROMPTS[:6]
    run(method, 0, [make_group(4, prompt=prompt) for prompt in named])
    rights = dict(zip(named, (3, 0, 8, 7, [0.25] * 8, [0.5] * 8), strict=True))
    fresh = [make_group(right, step=1) for right in (1, 0)]
    _, batch = run(method, 1, fresh, lambda prompt: make_group(rights[prompt], prompt=prompt, step=1))
    assert (batch.fresh, batch.filtered) == ([fresh[0]], [fresh[1]])
    lists = (batch.reevaluated, batch.unimproved, batch.solved)
    assert [[group.prompt for group in groups] for groups in lists] == [[A, D], [B, E], [C, named[5]]]
    assert method.metrics() == {
        "groups/reevaluation_attempts": 6,
        "again/stored": 3,
        "again/used_up": 0,
    }


# --- Side by side ----------------------------------------------------------------------------------------------------


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
        theirs = rules.PromptReplay(prompts=capacity, fraction=share, cooldown=cooldown, max_uses=most,
                                    window=window, largest_share=1.0)  # fmt: skip
        coming: dict[int, list[Prompt]] = {}  # named prompts by the step that gets their groups
        for step in range(data.draw(st.integers(6, 10))):
            expected = [PROMPTS[n] for n, replayed in theirs.choose(step, iter(())) if replayed] if step else []
            assert method.begin_step(step) == expected
            coming[step + ahead] = expected
            right = st.sampled_from([size // 2, *range(size + 1)])
            fresh = [
                make_group(data.draw(right), size=size, prompt=PROMPTS[n], step=step)
                for n in data.draw(st.lists(st.sampled_from(range(7)), min_size=1, max_size=6))
            ]
            due = coming.pop(step, [])
            failed = [prompt for prompt in due if data.draw(st.sampled_from([False] * 5 + [True]))]
            again = [
                make_group(data.draw(right), size=size, prompt=prompt, step=step)
                for prompt in due
                if prompt not in failed
            ]
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
            for name in ("reevaluated", "unimproved", "solved", "cut"):
                met[name] += len(getattr(batch, name))
            met.update(named=len(expected), failed=len(failed))
        ledger.check()

    check()
    assert min(met[end] for end in ("reevaluated", "unimproved", "solved", "cut", "named", "failed")) >= 5, met
