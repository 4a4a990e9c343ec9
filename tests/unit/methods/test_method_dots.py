"""DOTS: predictions and batches worked by hand, draws against closed forms, a second implementation side by side."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction as F

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_step import uids

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods import Method
from bapo_openrlhf.methods.dots import DOTS, HistoryPredictor

A, B, C, D, E = (Prompt(text) for text in "ABCDE")


def dots(**changes) -> DOTS:
    return DOTS(**{"capacity": 8, "group_size": 8, **changes})


def run(method: DOTS, fresh: Sequence[Group], step: int = 0) -> Batch:
    """One step; each of its groups ends in exactly one list of the batch."""
    assert method.begin_step(step) == []
    batch = method.build_batch(step, fresh, [])
    Ledger().settle(fresh, batch)
    assert (batch.reevaluated, batch.unimproved, batch.solved) == ([], [], [])
    return batch


def stored(method: DOTS) -> list[int]:
    return uids(method.replay)


def predicted(method: DOTS, *prompts: Prompt) -> list[float]:
    return method.predictor.predict(prompts)[0].tolist()


class TestOptions:
    def test_defaults(self):
        method = dots(capacity=512)
        assert isinstance(method, Method)
        assert (method.candidates, method.temperature, method.replay.capacity) == (8, 1e-3, 512)
        assert (method.replay_places, type(method.predictor)) == (256, HistoryPredictor)
        assert {p.kind for p in inspect.signature(DOTS).parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}

    @pytest.mark.parametrize(
        ("name", "value", "allowed"),
        [
            ("candidates", 0, "at least 1"),
            ("buffer_groups", 0, "at least 1"),
            ("temperature", 0.0, "finite and above 0"),
            ("temperature", -1.0, "finite and above 0"),
            ("temperature", float("inf"), "finite and above 0"),
            ("temperature", float("nan"), "finite and above 0"),
            ("fresh_share", F(0), r"in \(0, 1\]"),
            ("fresh_share", F(9, 8), r"in \(0, 1\]"),
            ("decay", -0.5, r"in \[0, 1\]"),
            ("decay", 2.0, r"in \[0, 1\]"),
        ],
    )
    def test_out_of_range(self, name, value, allowed):
        with pytest.raises(ValueError, match=f"{name} is {value}; it must be {allowed}"):
            dots(**{name: value})

    def test_bounds_are_in_range(self):
        for name, value in (("candidates", 1), ("buffer_groups", 1), ("fresh_share", F(1)), ("decay", 0.0)):
            dots(**{name: value})


class TestPrediction:
    def test_discounted_mean_of_its_own_groups(self, make_group):
        """8, then 0, then 4 of 8, weights 1/4, 1/2, 1: (1/4 + 0 + 1/2) / (7/4) = 3/7."""
        method = dots()
        for right, mean in ((8, 1), (0, 1 / 3), (4, 3 / 7)):
            run(method, [make_group(right, prompt=A), make_group(2, prompt=B)])
            assert predicted(method, A, B) == pytest.approx([mean, 1 / 4], rel=1e-6)

    @pytest.mark.parametrize(("decay", "mean"), [(0.0, 0.5), (1.0, 0.5), (0.25, (1 / 16 + 1 / 2) / (21 / 16))])
    def test_other_decays(self, make_group, decay, mean):
        """0: the last group; 1: the mean of all three."""
        method = dots(decay=decay)
        for right in (8, 0, 4):
            run(method, [make_group(right, prompt=A)])
        assert predicted(method, A) == pytest.approx([mean], rel=1e-6)

    def test_unseen_prompts_get_the_mean_of_all_responses(self, make_group):
        method = dots()
        assert predicted(method, A, B) == [0.5, 0.5]  # nothing is known
        run(method, [make_group(8, prompt=A), make_group(1, prompt=B)])
        assert predicted(method, C, A, D) == [9 / 16, 1, 9 / 16]
        run(method, [make_group(0, prompt=A)])  # without a discount
        assert predicted(method, C) == [9 / 24]

    def test_known_or_not(self, make_group):
        method = dots()
        run(method, [make_group(4, prompt=A)])
        assert method.predictor.predict([B, A, C])[1].tolist() == [False, True, False]

    def test_rewards_are_clipped(self, make_group):
        """-2, 7, 0.25, 0.5: (0 + 1 + 0.25 + 0.5) / 4."""
        method = dots()
        run(method, [make_group([-2.0, 7.0, 0.25, 0.5], prompt=A)])
        assert predicted(method, A, B) == [0.4375, 0.4375]


class TestChoice:
    def test_nearest_to_one_half(self, make_group):
        """p = 1/8, 3/8, 1/2, 3/4, 1. At temperature 1e-3, a difference of 1/8 is a factor of e^125."""
        method = dots()
        run(
            method,
            [make_group(right, prompt=text) for right, text in ((1, "A"), (3, "B"), (4, "C"), (6, "D"), (8, "E"))],
        )
        for _ in range(20):
            assert method.choose_prompts(1, [E, D, C, B, A], 1) == [2]
            assert method.choose_prompts(1, [E, D, C, B, A], 2) == [2, 3]
            assert method.choose_prompts(1, [A, A, B, D, E], 3) in ([0, 2, 3], [1, 2, 3])
            assert method.choose_prompts(1, [A, B, E, D, E], 3) == [0, 1, 3]

    @pytest.mark.parametrize("count", [1, 2])
    def test_draws_are_the_softmax_without_replacement(self, make_group, count):
        """p = 1/2, 1/4, 1, temperature (1/4) / ln 2: weights 4, 2, 1 of 7.

        Two of three: {A, B} with 4/7 * 2/3 + 2/7 * 4/5 = 64/105, {A, C} with 30/105, {B, C} with 11/105.
        """
        expected = {
            1: {(0,): 4 / 7, (1,): 2 / 7, (2,): 1 / 7},
            2: {(0, 1): 64 / 105, (0, 2): 30 / 105, (1, 2): 11 / 105},
        }[count]
        method, times = dots(temperature=0.25 / np.log(2), seed=3), 6000
        run(method, [make_group(right, prompt=text) for right, text in ((4, "A"), (2, "B"), (8, "C"))])
        actual = Counter(tuple(method.choose_prompts(1, [A, B, C], count)) for _ in range(times))
        assert set(actual) == set(expected)
        for chosen, share in expected.items():
            assert abs(actual[chosen] / times - share) < 4.5 * (share * (1 - share) / times) ** 0.5

    def test_far_from_one_half_is_still_drawn_where_nothing_else_is_left(self, make_group):
        """e^-500 of a softmax in float32 would be 0."""
        method = dots()
        run(method, [make_group(right, prompt=text) for right, text in ((0, "A"), (8, "B"), (4, "C"), (1, "D"))])
        chosen = Counter(tuple(method.choose_prompts(1, [A, B, C, D], 3)) for _ in range(200))
        assert set(chosen) == {(0, 2, 3), (1, 2, 3)}

    def test_alike_prompts_have_equal_chances(self):
        method, times = dots(seed=2), 3000
        taken = np.zeros(4)
        for _ in range(times):
            taken[method.choose_prompts(0, [A, B, C, D], 2)] += 1
        assert np.all(np.abs(taken / times - 0.5) < 4.5 * (0.25 / times) ** 0.5)

    def test_all_where_there_are_no_more_than_needed(self):
        method = dots()
        assert method.choose_prompts(0, [A, B, C], 3) == [0, 1, 2]
        assert method.choose_prompts(0, [A, B], 5) == [0, 1]
        assert method.choose_prompts(0, [], 0) == []


def filled(make_group, count: int, **changes) -> tuple[DOTS, list[Group]]:
    """A method whose buffer holds `count` groups of step 0."""
    method = dots(**changes)
    groups = [make_group(4, prompt=f"old {number}") for number in range(count)]
    run(method, groups)
    assert stored(method) == uids(groups)
    return method, groups


class TestBatch:
    def test_the_first_is_all_fresh(self, make_group):
        fresh = [make_group(right) for right in (0, 1, 4, 8, 7)]
        assert run(dots(), fresh) == Batch(fresh=[fresh[1], fresh[2], fresh[4]], filtered=[fresh[0], fresh[3]])

    def test_the_second_is_half_and_half(self, make_group):
        """B = 8, four of them replayed. Of six informative groups the lowest variances, 7/64 and 7/64, are cut."""
        method, old = filled(make_group, 6)
        fresh = [make_group(right, step=1) for right in (1, 4, 3, 0, 7, 2, 5)]
        batch = run(method, fresh, 1)
        assert (batch.fresh, batch.cut) == ([fresh[i] for i in (1, 2, 5, 6)], [fresh[0], fresh[4]])
        assert batch.filtered == [fresh[3]]
        assert len(batch.replayed) == 4 and set(batch.replayed) < set(old)
        assert uids(batch.replayed) == sorted(uids(batch.replayed))

    @pytest.mark.parametrize(
        ("capacity", "share", "in_store", "fresh", "expected"),
        [
            (8, F(1, 2), 0, 8, (8, 0)),  # nothing to replay: fresh groups take its places
            (8, F(1, 2), 3, 8, (5, 3)),
            (8, F(1, 2), 20, 8, (4, 4)),
            (8, F(1, 2), 20, 2, (2, 4)),  # replay never takes more than its share
            (8, F(1, 2), 20, 0, (0, 4)),
            (8, F(1), 20, 9, (8, 0)),
            (8, F(1, 4), 20, 9, (2, 6)),
            (7, F(1, 2), 20, 9, (4, 3)),  # 3.5 are 3
            (1, F(1, 8), 20, 9, (1, 0)),
            (10, F(7, 10), 20, 20, (7, 3)),
        ],
    )
    def test_shares(self, make_group, capacity, share, in_store, fresh, expected):
        method = dots(capacity=capacity, fresh_share=share)
        run(method, [make_group(4) for _ in range(in_store)])
        batch = run(method, [make_group(4, step=1) for _ in range(fresh)], 1)
        assert (len(batch.fresh), len(batch.replayed)) == expected
        assert len(batch.cut) == fresh - expected[0]

    def test_its_own_groups_are_not_replayed_in_the_same_step(self, make_group):
        method = dots()
        assert run(method, [make_group(4), make_group(3)]).replayed == []

    def test_replay_is_uniform(self, make_group):
        method, old = filled(make_group, 6, capacity=4, seed=1)
        times, result = 3000, Counter()
        for step in range(1, times + 1):
            result.update(uids(run(method, [], step).replayed))
        assert set(result) == set(uids(old))
        for count in result.values():
            assert abs(count / times - 2 / 6) < 4.5 * (2 / 9 / times) ** 0.5

    def test_an_empty_step(self):
        method = dots()
        assert run(method, []) == Batch()


class TestBuffer:
    def test_keeps_informative_groups_whether_trained_on_or_cut(self, make_group):
        fresh = [make_group(right) for right in (0, 1, 4, 8, 7)]
        method = dots(capacity=1)
        assert run(method, fresh).cut == [fresh[1], fresh[4]]
        assert stored(method) == uids([fresh[1], fresh[2], fresh[4]])

    def test_the_oldest_leaves(self, make_group):
        method = dots(buffer_groups=3)
        first, second = ([make_group(4, step=step) for _ in range(2)] for step in range(2))
        run(method, first)
        run(method, second, 1)
        assert stored(method) == uids([first[1], *second])
        assert (method.metrics()["buffer/replay_added"], method.metrics()["buffer/replay_evicted"]) == (4, 1)

    def test_groups_stay_however_old_they_are(self, make_group):
        method, old = filled(make_group, 2)
        assert run(method, [], 100_000).replayed == old

    def test_a_newer_group_of_a_prompt_replaces_the_older(self, make_group):
        method = dots(buffer_groups=3)
        run(method, [make_group(4, prompt="A", uid=900), make_group(4, prompt="B", uid=901)])
        run(method, [make_group(3, prompt="A", uid=902), make_group(3, prompt="C", uid=903)], 1)
        assert stored(method) == [901, 902, 903]  # it is the newest now, and needed no other's place
        run(method, [make_group(3, prompt="C", uid=904), make_group(3, prompt="C", uid=905)], 2)
        assert stored(method) == [901, 902, 905]

    def test_also_where_the_newer_one_has_no_signal(self, make_group):
        method = dots()
        run(method, [make_group(4, prompt="A"), make_group(4, prompt="B", uid=901), make_group(4, prompt="C")])
        run(method, [make_group(8, prompt="A"), make_group(0, prompt="C"), make_group(0, prompt="D")], 1)
        assert stored(method) == [901]

    def test_a_step_may_replay_what_its_own_groups_replace(self, make_group):
        """As in the authors' code: the draw comes first."""
        method = dots()
        run(method, [make_group(4, prompt="A", uid=900)])
        batch = run(method, [make_group(3, prompt="A", uid=901)], 1)
        assert (uids(batch.fresh), uids(batch.replayed), stored(method)) == ([901], [900], [901])


class TestMetrics:
    def test_by_hand(self, make_group):
        method = dots()
        assert method.metrics() == {}
        first = [make_group(3, prompt=A), make_group(8, prompt=B)]
        run(method, first)
        assert method.metrics() == {
            "buffer/replay": 1,
            "buffer/replay_bytes": first[0].nbytes,
            "buffer/replay_added": 1,
            "buffer/replay_evicted": 0,
            "buffer/replay_age_mean": 0,
            "prompts/known": 2,
            "prompts/predicted": 0.5,
            "prompts/unseen_share": 1,
        }
        second = [make_group(2, prompt=C, step=2), make_group(7, prompt=B, step=2), make_group(8, prompt=A, step=2)]
        run(method, second, 2)
        assert method.metrics() == pytest.approx(
            {
                "buffer/replay": 2,
                "buffer/replay_bytes": second[0].nbytes + second[1].nbytes,
                "buffer/replay_added": 3,
                "buffer/replay_evicted": 1,
                "buffer/replay_age_mean": 0,
                "prompts/known": 3,
                "prompts/predicted": (11 / 16 + 1 + 3 / 8) / 3,
                "prompts/unseen_share": 1 / 3,
                "prompts/prediction_error": (1 / 8 + 5 / 8) / 2,  # 1 - 7/8 and 1 - 3/8
            }
        )
        run(method, [], 5)
        assert method.metrics()["buffer/replay_age_mean"] == 3
        assert "prompts/predicted" not in method.metrics()


class TestState:
    def test_stored_groups_come_back_whole(self, make_group):
        method, (old,) = filled(make_group, 1)
        other = dots()
        other.load_state_dict(method.state_dict())
        (back,) = run(other, [], 1).replayed
        assert (back.uid, back.step, back.weights_version, back.prompt) == (
            old.uid,
            old.step,
            old.weights_version,
            old.prompt,
        )
        for mine, theirs in zip(back.responses, old.responses, strict=True):
            assert (mine.reward, mine.action_spans) == (theirs.reward, theirs.action_spans)
            np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
            np.testing.assert_array_equal(mine.log_probs, theirs.log_probs)

    def test_a_smaller_buffer_keeps_the_newest(self, make_group):
        method, old = filled(make_group, 5)
        smaller = dots(buffer_groups=2)
        smaller.load_state_dict(method.state_dict())
        assert stored(smaller) == uids(old[3:])


class Reference:
    """DOTS once more, from lists: every group of the run is kept, and all is derived from them anew."""

    def __init__(self, capacity: int, share: F, buffer: int, decay: F) -> None:
        self.capacity, self.share, self.buffer, self.decay = capacity, share, buffer, decay
        self.past: list[Group] = []

    def p(self, prompt: Prompt) -> float:
        """Sum over the prompt's groups of lam^(k-1) s, by that of lam^(k-1) n."""
        groups = [group for group in self.past if group.prompt == prompt]
        if groups or not self.past:
            weights = [self.decay ** (len(groups) - 1 - at) for at in range(len(groups))]
        else:
            groups, weights = self.past, [F(1)] * len(self.past)
        right = sum(w * sum(F(r.reward) for r in group.responses) for w, group in zip(weights, groups, strict=True))
        responses = sum(w * group.size for w, group in zip(weights, groups, strict=True))
        return float(F(right) / responses) if responses else 0.5

    def store(self) -> list[Group]:
        """Informative groups without a newer one of their prompt; dropped one by one if there were too many."""
        held: list[Group] = []
        for group in self.past:
            held = [other for other in held if other.prompt != group.prompt]
            if 0 < sum(r.reward for r in group.responses) < group.size:
                held = [*held, group][-self.buffer :]
        return held

    def sizes(self, informative: int) -> tuple[int, int]:
        """Fresh and replayed groups: of all pairs that fit, the one that replays least short, then has most fresh."""
        most_replayed = min(len(self.store()), int((1 - self.share) * self.capacity))
        fitting = [
            (fresh, replayed)
            for fresh, replayed in itertools.product(range(informative + 1), range(most_replayed + 1))
            if fresh + replayed <= self.capacity and fresh <= self.capacity - most_replayed
        ]
        return max(fitting, key=lambda pair: (sum(pair), pair[0]))


class TestSideBySide:
    @given(data=st.data())
    def test_equals_the_reference(self, make_group, data):
        capacity = data.draw(st.integers(1, 9))
        share = data.draw(st.sampled_from([F(1, 2), F(1, 4), F(2, 3), F(1)]))
        buffer, decay = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([F(0), F(1, 2), F(1)]))
        method = dots(
            capacity=capacity, group_size=4, fresh_share=share, buffer_groups=buffer, decay=float(decay), seed=7
        )
        reference, ledger, pool = Reference(capacity, share, buffer, decay), Ledger(), list("abcdefgh")
        for step in range(data.draw(st.integers(1, 6))):
            candidates = [Prompt(text) for text in data.draw(st.permutations(pool))]
            count = data.draw(st.integers(1, len(candidates)))
            distances = [abs(reference.p(prompt) - 0.5) for prompt in candidates]
            np.testing.assert_allclose([abs(p - 0.5) for p in predicted(method, *candidates)], distances, atol=1e-6)
            chosen = method.choose_prompts(step, candidates, count)
            assert chosen == sorted(set(chosen)) and len(chosen) == count
            left_out = set(range(len(candidates))) - set(chosen)
            if left_out:  # 0.04 at temperature 1e-3: a factor of e^40
                assert max(distances[at] for at in chosen) < min(distances[at] for at in left_out) + 0.04

            fresh = [
                make_group(data.draw(st.integers(0, 4)), size=4, prompt=candidates[at], step=step) for at in chosen
            ]
            held = reference.store()
            batch = method.build_batch(step, fresh, [])
            ledger.settle(fresh, batch)
            informative = [group for group in fresh if 0 < sum(r.reward for r in group.responses) < 4]
            fresh_size, replay_size = reference.sizes(len(informative))
            informative.sort(key=lambda group: (abs(float(group.mean) - 0.5), -group.uid))
            assert set(uids(batch.fresh)) == set(uids(informative[:fresh_size]))
            assert set(uids(batch.cut)) == set(uids(informative[fresh_size:]))
            assert len(batch.replayed) == replay_size
            assert set(uids(batch.replayed)) <= set(uids(held))
            reference.past += fresh
            assert stored(method) == uids(reference.store())
