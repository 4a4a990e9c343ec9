"""MoPPS: a second implementation side by side."""

from collections.abc import Sequence
from fractions import Fraction as F

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_step import run

from bapo_openrlhf.adapt.difficulty import SuccessCounts
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.methods.mopps import MoPPS

A, B, C, D = (Prompt(text) for text in "ABCD")


def mopps(**changes) -> MoPPS:
    return MoPPS(**{"capacity": 8, "group_size": 8, **changes})


def test_the_posterior_takes_16_bytes_a_prompt(make_group):
    one, prompts = make_group([1.0, 0.0]).responses, [Prompt(f"problem {number}") for number in range(10_000)]
    counts = SuccessCounts(0.5, 1.0, 1.0)
    for start in range(0, 10_000, 2_500):
        counts.update([Group(0, prompt, one, 0, 0) for prompt in prompts[start : start + 2_500]])
    last = make_group([1.0, 1.0]).responses
    counts.update([Group(0, prompts[7_777], last, 0, 0)])
    state = counts.state_dict()
    assert sum(array.nbytes for array in state.values()) == 16 * 10_000
    assert (state["rows"].dtype, state["rows"].shape, len(counts)) == (np.float32, (10_000, 2), 10_000)
    result, known = counts.counts_of([prompts[0], prompts[7_777], prompts[9_999], A])
    assert result.tolist() == [[2, 2], [3.5, 1.5], [2, 2], [1, 1]]
    assert known.tolist() == [True, True, True, False]


def test_metrics_by_hand(make_group):
    method = mopps()
    assert method.metrics() == {}
    run(method, 0, [make_group(3, prompt=A), make_group(8, prompt=B)])  # both from Beta(1, 1)
    assert method.metrics() == {"prompts/known": 2, "prompts/predicted": 0.5, "prompts/unseen_share": 1.0}
    run(method, 0, [make_group(right, prompt=prompt) for right, prompt in ((2, A), (8, C), (0, D), (7, B))])
    assert method.metrics() == pytest.approx(
        {
            "prompts/known": 4,
            "prompts/predicted": (0.4 + 0.5 + 0.5 + 0.9) / 4,  # A: Beta(4, 6), B: Beta(9, 1)
            "prompts/unseen_share": 0.5,
            "prompts/prediction_error": (0.15 + 0.025) / 2,  # 0.4 - 2/8 and 0.9 - 7/8
        },
        rel=1e-6,
    )
    run(method, 0, [])
    assert method.metrics() == {"prompts/known": 4}


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


@given(data=st.data())
def test_side_by_side_with_the_reference(make_group, data):
    """Decays and rewards are binary fractions with few digits, so that float32 has each posterior exactly."""
    capacity, size = data.draw(st.integers(1, 9)), data.draw(st.integers(2, 6))
    seed, target = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([0.5, 0.25, 1.0]))
    decay = data.draw(st.sampled_from([F(0), F(1, 4), F(1, 2), F(1)]))
    prior = data.draw(st.sampled_from([(F(1), F(1)), (F(1, 2), F(2))]))
    options = {"capacity": capacity, "group_size": size, "seed": seed, "target": target, "decay": float(decay)}
    method = mopps(**options, prior_a=float(prior[0]), prior_b=float(prior[1]))
    reference = Reference(capacity, seed, decay, prior, target)
    pool = [Prompt(text) for text in "abcdefghijkl"]
    for step in range(data.draw(st.integers(1, 5))):
        drawn = [pool[at] for at in data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=20))]
        count = data.draw(st.integers(1, len(drawn)))
        chosen = method.choose_prompts(step, drawn, count)
        assert chosen == reference.choose(drawn, count)
        assert len(set(chosen)) == count
        rewards = st.lists(st.sampled_from([0.0, 1.0, 0.0, 1.0, 0.25, -1.0, 3.0]), min_size=size, max_size=size)
        fresh = [make_group(data.draw(rewards), prompt=drawn[at], step=step) for at in chosen]
        batch = run(method, step, fresh)
        assert not batch.replayed
        result = tuple({group.uid for group in groups} for groups in (batch.fresh, batch.filtered, batch.cut))
        assert result == reference.step(fresh)
        expected = [[*map(float, reference.beta.get(prompt.text, reference.prior))] for prompt in pool]
        assert method.posteriors.counts_of(pool)[0].tolist() == expected
