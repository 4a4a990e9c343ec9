"""MoPPS: posteriors worked by hand, Thompson draws against closed forms, and a second implementation side by side."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from fractions import Fraction as F

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.difficulty import SuccessCounts, successes
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods import Method
from bapo_openrlhf.methods.mopps import MoPPS

A, B, C, D = (Prompt(text) for text in "ABCD")


def mopps(**changes) -> MoPPS:
    return MoPPS(**{"capacity": 8, "group_size": 8, **changes})


def run(method: MoPPS, fresh: Sequence[Group], step: int = 0) -> Batch:
    """One step; each of its groups ends in exactly one list of the batch."""
    assert method.begin_step(step) == []
    batch = method.build_batch(step, fresh, [])
    Ledger().settle(fresh, batch)
    assert (batch.reevaluated, batch.replayed, batch.unimproved, batch.solved) == ([], [], [], [])
    return batch


def posterior(method: MoPPS, prompt: Prompt) -> list[float]:
    """a and b."""
    return method.posteriors.of([prompt])[0][0].tolist()


def seen(method: MoPPS, make_group, **rewards: Sequence[float]) -> None:
    """Show the method one group of each prompt, by its text."""
    run(method, [make_group(given, prompt=text) for text, given in rewards.items()])


class TestOptions:
    def test_defaults(self):
        method = mopps()
        assert isinstance(method, Method)
        assert (method.candidates, method.posteriors.decay, method.target) == (8, 0.5, 0.5)
        assert (posterior(method, A), method.filter) == ([1, 1], "range")
        assert {p.kind for p in inspect.signature(MoPPS).parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}

    @pytest.mark.parametrize(
        ("name", "value", "allowed"),
        [
            ("candidates", 0, "at least 1"),
            ("decay", -0.1, r"in \[0, 1\]"),
            ("decay", 1.5, r"in \[0, 1\]"),
            ("decay", float("nan"), r"in \[0, 1\]"),
            ("target", -0.5, r"in \[0, 1\]"),
            ("target", 1.1, r"in \[0, 1\]"),
            ("prior_a", 0.0, "finite and above 0"),
            ("prior_b", -1.0, "finite and above 0"),
            ("prior_a", float("inf"), "finite and above 0"),
            ("prior_b", float("nan"), "finite and above 0"),
        ],
    )
    def test_out_of_range(self, name, value, allowed):
        with pytest.raises(ValueError, match=f"{name} is {value}; it must be {allowed}"):
            mopps(**{name: value})

    def test_bounds_are_in_range(self):
        for name, value in (("candidates", 1), ("decay", 0.0), ("decay", 1.0), ("target", 0.0), ("target", 1.0)):
            mopps(**{name: value})


class TestPosterior:
    def test_two_groups_by_hand(self, make_group):
        """3 of 8, then 8 of 8: a = 1/2 + 1/2 + 3 = 4, then 2 + 1/2 + 8; b = 1/2 + 1/2 + 5 = 6, then 3 + 1/2 + 0."""
        method = mopps()
        run(method, [make_group(3, prompt=A)])
        assert posterior(method, A) == [4, 6]
        run(method, [make_group(8, prompt=A)])
        assert posterior(method, A) == [10.5, 3.5]

    @pytest.mark.parametrize(
        ("decay", "expected"), [(1.0, [2 + 3 + 1, 3 + 5 + 7]), (0.0, [2 + 1, 3 + 7]), (0.25, [2.75 + 1, 4.25 + 7])]
    )
    def test_decay_is_towards_the_prior(self, make_group, decay, expected):
        """Prior (2, 3); 3 of 8, then 1 of 8. With 1/4: (5 + 3 * 2) / 4 + 1 and (8 + 3 * 3) / 4 + 7."""
        method = mopps(decay=decay, prior_a=2.0, prior_b=3.0)
        run(method, [make_group(3, prompt=A)])
        assert posterior(method, A) == [5, 8]
        run(method, [make_group(1, prompt=A)])
        assert posterior(method, A) == expected

    def test_changes_with_a_prompts_own_groups_alone(self, make_group):
        method = mopps()
        run(method, [make_group(3, prompt=B)])
        for _ in range(3):
            run(method, [make_group(8, prompt=A), make_group(0, prompt=C)])
        assert (posterior(method, B), posterior(method, D)) == ([4, 6], [1, 1])

    def test_groups_of_one_prompt_in_one_step_count_one_after_the_other(self, make_group):
        method = mopps()
        run(method, [make_group(3, prompt=A), make_group(2, prompt=B), make_group(8, prompt=A)])
        assert (posterior(method, A), posterior(method, B)) == ([10.5, 3.5], [3, 7])

    def test_groups_that_are_not_trained_on_count_as_well(self, make_group):
        method = mopps(capacity=1)
        run(method, [make_group(right, prompt=text) for right, text in ((0, "A"), (8, "B"), (4, "C"), (1, "D"))])
        assert [posterior(method, prompt) for prompt in (A, B, C, D)] == [[1, 9], [9, 1], [5, 5], [2, 8]]

    def test_rewards_are_clipped_to_0_and_1_and_added_up(self, make_group):
        """-2 is 0, 7 is 1, 0.25 is a quarter: s = 0 + 1 + 0.25 + 0.5 of n = 4."""
        group = make_group([-2.0, 7.0, 0.25, 0.5], prompt=A)
        assert successes(group) == F(7, 4)
        method = mopps()
        run(method, [group])
        assert posterior(method, A) == [2.75, 3.25]

    def test_label_and_images_make_another_prompt(self, make_group):
        method = mopps()
        run(method, [make_group(8, prompt=Prompt("A", label="1"))])
        assert [posterior(method, p) for p in (Prompt("A", "1"), A, Prompt("A", "1", ["x.png"]))] == [
            [9, 1],
            [1, 1],
            [1, 1],
        ]

    def test_16_bytes_a_prompt(self, make_group):
        one, prompts = make_group([1.0, 0.0]).responses, [Prompt(f"problem {number}") for number in range(10_000)]
        counts = SuccessCounts(0.5, 1.0, 1.0)
        for start in range(0, 10_000, 2_500):
            counts.update([Group(0, prompt, one, 0, 0) for prompt in prompts[start : start + 2_500]])
        last = make_group([1.0, 1.0]).responses
        counts.update([Group(0, prompts[7_777], last, 0, 0)])
        state = counts.state_dict()
        assert sum(array.nbytes for array in state.values()) == 16 * 10_000
        assert (state["rows"].dtype, state["rows"].shape, len(counts)) == (np.float32, (10_000, 2), 10_000)
        result, known = counts.of([prompts[0], prompts[7_777], prompts[9_999], A])
        assert result.tolist() == [[2, 2], [3.5, 1.5], [2, 2], [1, 1]]
        assert known.tolist() == [True, True, True, False]


class TestChoice:
    def certain(self, make_group, **changes) -> MoPPS:
        """A, B, C, D with success probability 1/8, 3/8, 5/8, 7/8, and a standard deviation below 0.02."""
        method = mopps(**changes)
        run(
            method, [make_group(100 * k, size=800, prompt=text) for k, text in ((1, "A"), (3, "B"), (5, "C"), (7, "D"))]
        )
        return method

    @pytest.mark.parametrize(
        ("target", "nearest"), [(0.5, [1, 2]), (0.0, [0, 1]), (1.0, [2, 3]), (0.8, [2, 3]), (0.3, [0, 1])]
    )
    def test_nearest_the_target(self, make_group, target, nearest):
        method = self.certain(make_group, target=target)
        assert method.choose_prompts(9, [A, B, C, D], 2) == nearest

    def test_positions_are_those_of_the_candidates(self, make_group):
        method = self.certain(make_group)
        assert method.choose_prompts(9, [C, A, D, A, B], 2) == [0, 4]
        assert method.choose_prompts(9, [D, A, A, C], 1) == [3]
        assert method.choose_prompts(9, [C, C, A, C], 3) == [0, 1, 3]  # a prompt may be there more than once

    def test_all_where_there_are_no_more_than_needed(self, make_group):
        method = mopps()
        assert method.choose_prompts(0, [A, B, C], 3) == [0, 1, 2]
        assert method.choose_prompts(0, [A, B], 5) == [0, 1]
        assert method.choose_prompts(0, [], 0) == []

    def test_draws_come_from_the_posterior(self, make_group):
        """A: Beta(3, 1), B: Beta(1, 1). Distances from 1/2 have the densities 1.5 + 6 d^2 and 2 on [0, 1/2].

        So B is nearer with probability: integral of 2 d (1.5 + 6 d^2) = 0.375 + 0.1875 = 0.5625. By the means, 3/4 and
        1/2, B would always be; by draws from two Beta(1, 1), half of the time.
        """
        method = mopps(decay=1.0, seed=5)
        seen(method, make_group, A=[1.0, 1.0])
        assert posterior(method, A) == [3, 1]
        times = 6000
        nearer = sum(method.choose_prompts(0, [A, B], 1) == [1] for _ in range(times))
        assert abs(nearer / times - 0.5625) < 4.5 * (0.5625 * 0.4375 / times) ** 0.5

    def test_unseen_prompts_have_equal_chances(self):
        method, times = mopps(seed=2), 3000
        taken = np.zeros(4)
        for _ in range(times):
            taken[method.choose_prompts(0, [A, B, C, D], 2)] += 1
        assert np.all(np.abs(taken / times - 0.5) < 4.5 * (0.25 / times) ** 0.5)

    def test_the_seed_decides(self):
        prompts = [Prompt(str(number)) for number in range(64)]

        def choices(seed):
            method = mopps(seed=seed)
            return [method.choose_prompts(step, prompts, 8) for step in range(3)]

        assert choices(1) == choices(1) != choices(2)


class TestBatch:
    def test_informative_groups_are_trained_on(self, make_group):
        fresh = [make_group(right) for right in (0, 1, 4, 8, 7)] + [make_group([0.5] * 4), make_group([0.5, 0.25])]
        kept = [fresh[1], fresh[2], fresh[4], fresh[6]]
        assert run(mopps(), fresh) == Batch(fresh=kept, filtered=[fresh[0], fresh[3], fresh[5]])

    def test_uninformative_ones_may_stay(self, make_group):
        fresh = [make_group(right) for right in (0, 4, 8)]
        assert run(mopps(filter="none"), fresh) == Batch(fresh=fresh)

    @pytest.mark.parametrize(("capacity", "kept"), [(4, 4), (3, 3), (2, 2), (1, 1), (0, 0), (9, 4)])
    def test_cut_to_the_capacity(self, make_group, capacity, kept):
        """Variances 7/64, 16/64, 12/64, 15/64: the lowest leave first."""
        method = mopps(capacity=capacity)
        fresh = [make_group(right) for right in (1, 4, 2, 5)]
        order = [1, 3, 2, 0][:kept]
        batch = run(method, fresh)
        assert batch.fresh == [fresh[index] for index in sorted(order)]
        assert batch.cut == [group for index, group in enumerate(fresh) if index not in order]

    def test_uninformative_ones_are_the_first_to_leave(self, make_group):
        fresh = [make_group(right) for right in (0, 4, 8, 1)]
        batch = run(mopps(capacity=2, filter="none"), fresh)
        assert batch == Batch(fresh=[fresh[1], fresh[3]], cut=[fresh[0], fresh[2]])

    def test_an_empty_step(self):
        method = mopps()
        assert run(method, []) == Batch()
        assert method.metrics() == {"prompts/known": 0}


class TestMetrics:
    def test_by_hand(self, make_group):
        method = mopps()
        assert method.metrics() == {}
        run(method, [make_group(3, prompt=A), make_group(8, prompt=B)])  # both from Beta(1, 1)
        assert method.metrics() == {
            "prompts/known": 2,
            "prompts/predicted": 0.5,
            "prompts/unseen_share": 1.0,
        }
        run(
            method, [make_group(2, prompt=A), make_group(8, prompt=C), make_group(0, prompt=D), make_group(7, prompt=B)]
        )
        assert method.metrics() == pytest.approx(
            {
                "prompts/known": 4,
                "prompts/predicted": (0.4 + 0.5 + 0.5 + 0.9) / 4,  # A: Beta(4, 6), B: Beta(9, 1)
                "prompts/unseen_share": 0.5,
                "prompts/prediction_error": (0.15 + 0.025) / 2,  # 0.4 - 2/8 and 0.9 - 7/8
            },
            rel=1e-6,
        )


class TestState:
    def test_it_is_a_copy(self, make_group):
        method, other = mopps(), mopps()
        seen(method, make_group, A=[1.0, 0.0])
        state = method.state_dict()
        other.load_state_dict(state)
        seen(method, make_group, A=[1.0, 1.0])
        assert posterior(other, A) == [2, 2]
        seen(other, make_group, A=[0.0, 0.0])
        assert state["posteriors"]["rows"].tolist() == [[2, 2]]


class Reference:
    """MoPPS once more: a dictionary of exact fractions, and loops."""

    def __init__(self, capacity: int, seed: int, decay: F, prior: tuple[F, F], target: float) -> None:
        self.capacity, self.decay, self.prior, self.target = capacity, decay, prior, target
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.beta: dict[str, tuple[F, F]] = {}

    def choose(self, prompts: Sequence[Prompt], count: int) -> list[int]:
        pairs = [self.beta.get(prompt.text, self.prior) for prompt in prompts]
        draws = [self.rng.beta(float(a), float(b)) for a, b in pairs]
        ranked = sorted(range(len(prompts)), key=lambda at: abs(draws[at] - self.target))
        return sorted(ranked[:count])

    def step(self, groups: Sequence[Group]) -> tuple[set[int], set[int], set[int]]:
        """Uids that are trained on, filtered and cut."""
        for group in groups:
            a, b = self.beta.get(group.prompt.text, self.prior)
            right = wrong = F(0)
            for response in group.responses:
                share = F(min(1.0, max(0.0, response.reward)))
                right, wrong = right + share, wrong + 1 - share
            self.beta[group.prompt.text] = (
                self.decay * a + (1 - self.decay) * self.prior[0] + right,
                self.decay * b + (1 - self.decay) * self.prior[1] + wrong,
            )
        kept = [group for group in groups if len({response.reward for response in group.responses}) > 1]
        filtered = {group.uid for group in groups} - {group.uid for group in kept}
        kept.sort(key=lambda group: (-np.var([r.reward for r in group.responses]).round(12), -group.uid))
        size = min(len(kept), self.capacity)
        return {group.uid for group in kept[:size]}, filtered, {group.uid for group in kept[size:]}


class TestSideBySide:
    @given(data=st.data())
    def test_equals_the_reference(self, make_group, data):
        """Decays and rewards are binary fractions with few digits, so that float32 has each posterior exactly."""
        capacity, size = data.draw(st.integers(1, 9)), data.draw(st.integers(2, 6))
        seed, target = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([0.5, 0.25, 1.0]))
        decay = data.draw(st.sampled_from([F(0), F(1, 4), F(1, 2), F(1)]))
        prior = data.draw(st.sampled_from([(F(1), F(1)), (F(1, 2), F(2))]))
        method = mopps(
            capacity=capacity,
            group_size=size,
            seed=seed,
            decay=float(decay),
            prior_a=float(prior[0]),
            prior_b=float(prior[1]),
            target=target,
        )
        reference = Reference(capacity, seed, decay, prior, target)
        ledger, pool = Ledger(), [Prompt(text) for text in "abcdefghijkl"]
        for step in range(data.draw(st.integers(1, 5))):
            drawn = [pool[at] for at in data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=20))]
            count = data.draw(st.integers(1, len(drawn)))
            chosen = method.choose_prompts(step, drawn, count)
            assert chosen == reference.choose(drawn, count)
            assert len(set(chosen)) == count
            rewards = st.lists(st.sampled_from([0.0, 1.0, 0.0, 1.0, 0.25, -1.0, 3.0]), min_size=size, max_size=size)
            fresh = [make_group(data.draw(rewards), prompt=drawn[at], step=step) for at in chosen]
            batch = method.build_batch(step, fresh, [])
            ledger.settle(fresh, batch)
            result = tuple({group.uid for group in groups} for groups in (batch.fresh, batch.filtered, batch.cut))
            assert result == reference.step(fresh)
            for prompt in pool:
                assert posterior(method, prompt) == [float(x) for x in reference.beta.get(prompt.text, reference.prior)]
