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
from bapo_openrlhf.methods.base import Method
from bapo_openrlhf.methods.prompt_replay import PromptReplay
from bapo_openrlhf.record.state_file import load_state, save_state

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


class TestOptions:
    def test_defaults(self):
        method = prompt_replay(9)
        assert isinstance(method, Method) and method.asynchronous and method.candidates == 1
        assert (method.replay_share, method.lowest, method.highest) == (F(1, 2), F(1, 4), F(3, 4))
        assert (method.cooldown, method.most_uses, method.reevaluate_every, method.places) == (10, 15, 1, 4)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"replay_share": F(-1, 5)}, r"replay_share is -1/5; it must be in \[0, 1\]"),
            ({"replay_share": F(6, 5)}, r"replay_share is 6/5; it must be in \[0, 1\]"),
            ({"highest": F(0)}, r"highest is 0; it must be in \(0, 1\)"),
            ({"highest": F(1)}, r"highest is 1; it must be in \(0, 1\)"),
            ({"lowest": F(0)}, "lowest is 0; it must be above 0 and at most highest, 3/4"),
            ({"lowest": F(7, 8)}, "lowest is 7/8; it must be above 0 and at most highest, 3/4"),
            ({"cooldown": -1}, "cooldown is -1; it must be at least 0"),
            ({"most_uses": -1}, "most_uses is -1; it must be at least 0"),
        ],
    )
    def test_out_of_range(self, changes, message):
        with pytest.raises(ValueError, match=message):
            prompt_replay(**changes)

    def test_bounds_are_in_range(self):
        for changes in ({"replay_share": F(0)}, {"replay_share": F(1)}, {"lowest": F(3, 4)}, {"highest": F(1, 4)},
                        {"cooldown": 0}, {"most_uses": 0}):  # fmt: skip
            prompt_replay(**changes)

    @pytest.mark.parametrize(
        ("capacity", "options", "places"),
        [(8, {}, 4), (9, {}, 4), (9, {"replay_share": F(3, 4)}, 6), (10, {"replay_share": 0.3}, 3),
         (1, {}, 0), (8, {"replay_share": F(1)}, 8)],
    )  # fmt: skip
    def test_how_many_are_named(self, make_group, capacity, options, places):
        method = prompt_replay(capacity, cooldown=0, **options)
        run(method, 0, [make_group(4, prompt=prompt) for prompt in PROMPTS])
        assert method.begin_step(1) == PROMPTS[:places]


class TestNamed:
    def test_nearest_to_a_half_then_the_lower_rate(self, make_group):
        """Rates 6/8, 3/8, 4/8, 5/8, 2/8: 4/8 first, 3/8 before 5/8, 2/8 before 6/8."""
        method = prompt_replay(10, cooldown=1)
        run(method, 0, [make_group(right, prompt=p) for right, p in zip((6, 3, 4, 5, 2), (A, B, C, D, E), strict=True)])
        assert method.begin_step(1) == [C, B, D, E, A]

    def test_rates_are_compared_as_fractions(self, make_group):
        """2/5 and 3/5 are equally near; as floats 3/5 could be nearer."""
        method = prompt_replay(cooldown=1)
        run(method, 0, [make_group(3, size=5, prompt=A), make_group(2, size=5, prompt=B)])
        assert method.begin_step(1) == [B, A]

    def test_then_fewer_uses_then_the_id(self, make_group):
        method = prompt_replay(2, cooldown=1)
        run(method, 0, [make_group(4, prompt=prompt) for prompt in (C, B, A)])
        named = [
            run(method, step, (), lambda p, step=step: make_group(4, prompt=p, step=step))[0][0] for step in (1, 2)
        ]
        assert named == [A, B] and method.begin_step(3) == [C]

    @pytest.mark.parametrize(
        ("right", "stored"), [(1, False), (2, True), (6, True), (7, False), (0, False), (8, False), ([0.5] * 4, True)]
    )
    def test_the_ends_of_the_window_are_in_it(self, make_group, right, stored):
        method = prompt_replay(cooldown=1)
        run(method, 0, [make_group(right, prompt=A)])
        assert method.begin_step(1) == ([A] if stored else [])
        assert method.metrics()["again/stored"] == stored

    def test_a_newer_group_replaces_the_rate(self, make_group):
        method = prompt_replay(cooldown=1)
        run(method, 0, [make_group(4, prompt=A), make_group(1, prompt=B)])
        run(method, 1, [make_group(8, prompt=A, step=1), make_group(4, prompt=B, step=1)], lambda p: None)
        assert method.begin_step(2) == [B]

    @pytest.mark.parametrize("cooldown", [0, 1, 2, 5])
    def test_cooldown_from_a_fresh_group_and_from_a_repeated_one(self, make_group, cooldown):
        method = prompt_replay(cooldown=cooldown, most_uses=0)
        run(method, 3, [make_group(4, prompt=A, step=3)])
        result = [step for step in range(4, 20) if run(method, step, (), lambda p: make_group(3, prompt=p))[0]]
        assert result == list(range(3 + max(cooldown, 1), 20, max(cooldown, 1)))

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

    def test_fresh_groups_are_no_uses(self, make_group):
        method = prompt_replay(cooldown=0, most_uses=1)
        for step in range(4):
            method.build_batch(step, [make_group(4, prompt=A, step=step)], [])
        assert method.begin_step(4) == [A]

    def test_uses_are_remembered_outside_the_window(self, make_group):
        method = prompt_replay(cooldown=0, most_uses=1)
        run(method, 0, [make_group(4, prompt=A)])
        assert run(method, 1, (), lambda p: make_group(8, prompt=p, step=1))[0] == [A]
        run(method, 2, [make_group(4, prompt=A, step=2)])
        assert method.begin_step(3) == []

    @pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (0, [])])
    def test_only_in_steps_that_re_evaluate(self, make_group, every, steps):
        method = prompt_replay(cooldown=0, reevaluate_every=every)
        assert method.begin_step(0) == []
        run(method, 0, [make_group(4, prompt=A)])
        assert [s for s in range(1, 7) if run(method, s, (), lambda p: make_group(4, prompt=p))[0]] == steps

    def test_a_prompt_without_a_group_waits_for_another_cooldown(self, make_group):
        """It counts as a use, so a prompt whose reward always fails leaves in the end."""
        method = prompt_replay(cooldown=3, most_uses=2)
        run(method, 0, [make_group(4, prompt=A)])
        assert [step for step in range(1, 12) if run(method, step)[0]] == [3, 6]


class TestAhead:
    def test_a_named_prompt_is_not_named_again_until_its_group_comes(self, make_group):
        """Generation is 3 steps ahead: the groups of the prompts named in step t come to step t + 3."""
        method = prompt_replay(4, cooldown=2)
        method.build_batch(0, [make_group(4, prompt=A), make_group(3, prompt=B)], [])
        assert [method.begin_step(step) for step in (1, 2)] == [[], [A, B]]
        method.build_batch(2, [make_group(4, prompt=A, step=2)], [])  # a fresh group meanwhile
        assert [method.begin_step(step) for step in (3, 4, 5)] == [[], [], []]
        method.unanswered([B])
        batch = method.build_batch(5, [], [make_group(5, prompt=A, step=5)])
        assert len(batch.reevaluated) == 1
        assert [method.begin_step(step) for step in (6, 7)] == [[], [B, A]]  # 3/8 before 5/8

    def test_a_failure_is_noted_once(self, make_group):
        method = prompt_replay(cooldown=1)
        run(method, 0, [make_group(4, prompt=A)])
        assert run(method, 1)[0] == method.begin_step(2) == [A]  # it failed in step 1, and is away in step 2
        method.build_batch(2, [], [])
        assert method.begin_step(3) == []


class TestBatch:
    def test_lists(self, make_group):
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

    def test_cut_to_the_capacity(self, make_group):
        """Variances 16, 15 and 12 of 64 for 4, 3 and 2 of 8: the lowest leave."""
        method = prompt_replay(2, cooldown=1)
        run(method, 0, [make_group(4, prompt=A)])
        fresh = [make_group(right, step=1) for right in (2, 4)]
        _, batch = run(method, 1, fresh, lambda prompt: make_group(3, prompt=prompt, step=1))
        assert (batch.fresh, batch.cut) == ([fresh[1]], [fresh[0]])
        assert [group.prompt for group in batch.reevaluated] == [A]

    def test_the_filter_is_of_the_fresh_groups(self, make_group):
        method = prompt_replay(filter="none", cooldown=1)
        run(method, 0, [make_group(4, prompt=A)])
        fresh = [make_group(8, step=1)]
        _, batch = run(method, 1, fresh, lambda prompt: make_group(8, prompt=prompt, step=1))
        assert batch.fresh == fresh and len(batch.solved) == 1


class TestState:
    def test_prompts_that_are_away_stay_away(self, make_group, tmp_path):
        method, other = prompt_replay(cooldown=0), prompt_replay(cooldown=0)
        method.build_batch(0, [make_group(1, size=3, prompt=A)], [])  # 1/3 is no short decimal number
        assert method.begin_step(1) == [A]
        save_state(tmp_path, method.state_dict())
        other.load_state_dict(load_state(tmp_path))
        assert other.begin_step(2) == [] and other.known == method.known
        other.build_batch(2, [], [make_group(3, prompt=A, step=2)])
        assert other.begin_step(3) == [A]

    def test_a_state_does_not_change_later(self, make_group):
        method, other = prompt_replay(cooldown=0), prompt_replay(cooldown=0)
        run(method, 0, [make_group(3, prompt=A)])
        state = method.state_dict()
        run(method, 1, [make_group(8, prompt=A, step=1)])
        other.load_state_dict(state)
        assert other.begin_step(1) == [A]


# --- Side by side ----------------------------------------------------------------------------------------------------


def test_side_by_side_with_the_rules(make_group):
    """Random runs, with stops, groups that fail, and generation up to 2 steps ahead. Every group is counted."""
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
            if data.draw(st.booleans()):
                state, method = method.state_dict(), prompt_replay(capacity, seed=9, **options)
                method.load_state_dict(state)
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
