"""DOTS: draws against closed forms, and a second implementation side by side."""

import itertools
from collections import Counter
from fractions import Fraction as F

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_step import run, uids

from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.methods.dots import DOTS

A, B, C, D = (Prompt(text) for text in "ABCD")


def dots(**changes) -> DOTS:
    return DOTS(**{"capacity": 8, "group_size": 8, **changes})


class TestChoice:
    def test_draws_are_the_softmax_without_replacement(self, make_group):
        """p = 1/2, 1/4, 1, temperature (1/4) / ln 2: weights 4, 2, 1 of 7.

        Two of three: {A, B} with 4/7 * 2/3 + 2/7 * 4/5 = 64/105, {A, C} with 30/105, {B, C} with 11/105.
        """
        expected = {(0, 1): 64 / 105, (0, 2): 30 / 105, (1, 2): 11 / 105}
        method, times = dots(temperature=0.25 / np.log(2), seed=3), 6000
        run(method, 0, [make_group(right, prompt=text) for right, text in ((4, "A"), (2, "B"), (8, "C"))])
        actual = Counter(tuple(method.choose_prompts(1, [A, B, C], 2)) for _ in range(times))
        assert set(actual) == set(expected)
        for chosen, share in expected.items():
            assert abs(actual[chosen] / times - share) < 4.5 * (share * (1 - share) / times) ** 0.5

    def test_far_from_one_half_is_still_drawn_where_nothing_else_is_left(self, make_group):
        """e^-500 of a softmax in float32 would be 0."""
        method = dots()
        run(method, 0, [make_group(right, prompt=text) for right, text in ((0, "A"), (8, "B"), (4, "C"), (1, "D"))])
        chosen = Counter(tuple(method.choose_prompts(1, [A, B, C, D], 3)) for _ in range(200))
        assert set(chosen) == {(0, 2, 3), (1, 2, 3)}


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


@given(data=st.data())
def test_side_by_side_with_the_reference(make_group, data):
    capacity = data.draw(st.integers(1, 9))
    share = data.draw(st.sampled_from([F(1, 2), F(1, 4), F(2, 3), F(1)]))
    buffer, decay = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([F(0), F(1, 2), F(1)]))
    method = dots(capacity=capacity, group_size=4, fresh_share=share, buffer_groups=buffer, decay=float(decay), seed=7)
    reference, pool = Reference(capacity, share, buffer, decay), list("abcdefgh")
    for step in range(data.draw(st.integers(1, 6))):
        candidates = [Prompt(text) for text in data.draw(st.permutations(pool))]
        count = data.draw(st.integers(1, len(candidates)))
        distances = [abs(reference.p(prompt) - 0.5) for prompt in candidates]
        np.testing.assert_allclose(abs(method.predictor.predict(candidates)[0] - 0.5), distances, atol=1e-6)
        chosen = method.choose_prompts(step, candidates, count)
        assert chosen == sorted(set(chosen)) and len(chosen) == count
        left_out = set(range(len(candidates))) - set(chosen)
        if left_out:  # 0.04 at temperature 1e-3: a factor of e^40
            assert max(distances[at] for at in chosen) < min(distances[at] for at in left_out) + 0.04

        known = [candidates[at] in (group.prompt for group in reference.past) for at in chosen]
        fresh = [make_group(data.draw(st.integers(0, 4)), size=4, prompt=candidates[at], step=step) for at in chosen]
        held = reference.store()
        batch = run(method, step, fresh)
        informative = [group for group in fresh if 0 < sum(r.reward for r in group.responses) < 4]
        fresh_size, replay_size = reference.sizes(len(informative))
        informative.sort(key=lambda group: (abs(float(group.mean) - 0.5), -group.uid))
        assert set(uids(batch.fresh)) == set(uids(informative[:fresh_size]))
        assert set(uids(batch.cut)) == set(uids(informative[fresh_size:]))
        assert len(batch.replayed) == replay_size
        assert set(uids(batch.replayed)) <= set(uids(held))
        assert method.metrics()["prompts/unseen_share"] == pytest.approx(known.count(False) / count)
        reference.past += fresh
        assert uids(method.replay) == uids(reference.store())
