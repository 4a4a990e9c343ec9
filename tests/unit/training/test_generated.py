"""Groups of what a step generated, from OpenRLHF's samples."""

from fractions import Fraction

import pytest
import torch
from fake_stack import EXTRAS
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.training.trainer.generated import GeneratedStep
from bapo_openrlhf.training.trainer.samples import answers_of, samples_of


class TestGeneratedStep:
    @staticmethod
    def samples(make_group, *right: int) -> list[Experience]:
        """Groups of two responses. Each number says how many of a group are right."""
        return samples_of([make_group(count, size=2, extras=EXTRAS) for count in right])

    def test_groups_know_their_number_step_and_policy(self, make_group):
        """Rewards are from -1 to 1, and a mean is from 0 to 1."""
        fresh, hard = self.samples(make_group, 2, 1, 0), self.samples(make_group, 1, 2)
        fresh[2].rewards = None  # the second group fails
        created = GeneratedStep.of(
            [("fresh", answers_of(fresh, 2), 5), ("reevaluated", answers_of(hard, 2), 7)],
            first_uid=30, step=7, reward_range=(Fraction(-1), Fraction(1)),
        )  # fmt: skip
        groups = [*created.fresh, *created.reevaluated]
        known = [(group.uid, group.step, group.weights_version, group.mean) for group in groups]
        assert known == [(30, 7, 5, 1.0), (31, 7, 5, 0.5), (33, 7, 7, 0.75), (34, 7, 7, 1.0)]
        assert [(group.uid, group.source, group.mean) for group in created.recorded] == [
            (30, "fresh", 1.0), (31, "fresh", 0.5), (32, "fresh", None),
            (33, "reevaluated", 0.75), (34, "reevaluated", 1.0),
        ]  # fmt: skip
        assert len(created.fresh) == 2 and [group.uid for group in created.failed] == [32]

    def test_what_responses_say_of_their_weights_is_checked_and_taken_out(self, make_group):
        samples = self.samples(make_group, 1, 1)
        for one in samples:
            one.info |= {"version_min": torch.tensor([5]), "version_max": torch.tensor([5])}
        created = GeneratedStep.of([("fresh", answers_of(samples, 2), 5)], first_uid=0, step=7)
        assert all(response.extras["info"] == {} for group in created.fresh for response in group.responses)
        samples = self.samples(make_group, 1, 1)
        samples[3].info |= {"version_min": torch.tensor([4]), "version_max": torch.tensor([5])}
        with pytest.raises(RuntimeError, match=r"weights of steps \[4, 5\] generated .* held those of step 5"):
            GeneratedStep.of([("fresh", answers_of(samples, 2), 5)], first_uid=0, step=7)
