"""Groups of what a step generated, from OpenRLHF's samples."""

import math
from fractions import Fraction

import pytest
import torch
from fake_stack import EXTRAS
from fake_stack import generated_rows as rows
from fake_stack import generated_sample as sample
from hypothesis import given, settings
from hypothesis import strategies as st
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.adapt.rewards import UNIT
from bapo_openrlhf.training.trainer.generated import GeneratedStep, groups_of, usable_answers
from bapo_openrlhf.training.trainer.samples import answers_of, samples_of


@given(
    groups=st.lists(
        st.lists(st.sampled_from([None, 0.0, 0.1, 0.2, 1.0, math.nan]), min_size=2, max_size=2), max_size=6
    ),
    first=st.integers(0, 99),
    reward_range=st.sampled_from([UNIT, (Fraction(-1), Fraction(1, 5))]),
)
@settings(derandomize=True, database=None)
def test_numbers_are_those_of_the_layers_groups(groups, first, reward_range):
    """nan stands for a log-prob that is no number: such a group fails as one without a reward does."""
    samples = [
        sample(f"prompt {n}", 1.0, [0, 1, 1], log_prob=math.nan)
        if reward != reward
        else sample(f"prompt {n}", reward, [0, 1, 1])
        for n, rewards in enumerate(groups)
        for reward in rewards
    ]
    result = rows(samples, 2, first_uid=first, reward_range=reward_range)
    text = {"first_uid": first, "step": 0, "weights_version": 0, "reward_range": reward_range}
    layer = groups_of(usable_answers(answers_of(samples, 2)), **text)
    assert [(group.uid, group.prompt.id, group.mean) for group in result[: len(layer)]] == [
        (group.uid, group.prompt.id, group.mean) for group in layer
    ]
    assert [group.uid for group in result] == list(range(first, first + len(groups)))
    assert all(group.mean is None for group in result[len(layer) :])
    assert {group.prompt.text for group in result} == {f"prompt {n}" for n in range(len(groups))}


class TestGeneratedStep:
    @staticmethod
    def samples(make_group, count: int, **changed) -> list[Experience]:
        return samples_of([make_group(1, extras=EXTRAS, **{"size": 2} | changed) for _ in range(count)])

    def test_groups_know_their_number_step_and_policy(self, make_group):
        fresh, hard = self.samples(make_group, 3), self.samples(make_group, 2)
        fresh[2].rewards = None  # the second group fails
        created = GeneratedStep.of(
            [("fresh", answers_of(fresh, 2), 5), ("reevaluated", answers_of(hard, 2), 7)], first_uid=30, step=7
        )
        known = [(group.uid, group.step, group.weights_version) for group in (*created.fresh, *created.reevaluated)]
        assert known == [(30, 7, 5), (31, 7, 5), (33, 7, 7), (34, 7, 7)] and len(created.fresh) == 2
        half = Fraction(1, 2)
        assert [(group.uid, group.source, group.mean) for group in created.recorded] == [
            (30, "fresh", half), (31, "fresh", half), (32, "fresh", None),
            (33, "reevaluated", half), (34, "reevaluated", half),
        ]  # fmt: skip
        assert [group.uid for group in created.failed] == [32]

    def test_what_responses_say_of_their_weights_is_checked_and_taken_out(self, make_group):
        samples = self.samples(make_group, 2)
        for one in samples:
            one.info |= {"version_min": torch.tensor([5]), "version_max": torch.tensor([5])}
        created = GeneratedStep.of([("fresh", answers_of(samples, 2), 5)], first_uid=0, step=7)
        assert all(response.extras["info"] == {} for group in created.fresh for response in group.responses)
        samples = self.samples(make_group, 2)
        samples[3].info |= {"version_min": torch.tensor([4]), "version_max": torch.tensor([5])}
        with pytest.raises(RuntimeError, match=r"weights of steps \[4, 5\] generated .* held those of step 5"):
            GeneratedStep.of([("fresh", answers_of(samples, 2), 5)], first_uid=0, step=7)
