"""Groups of what a step generated."""

from fractions import Fraction

import pytest
from fake_stack import answer, in_groups

from bapo_openrlhf.training.trainer.generated import GeneratedStep
from bapo_openrlhf.training.trainer.samples import Answers


class TestGeneratedStep:
    @staticmethod
    def answers(*rewards: float | None) -> list[Answers]:
        """Groups of two responses with these rewards."""
        return in_groups([answer("p", reward, [1]) for reward in rewards], 2)

    def test_groups_know_their_number_step_and_policy(self):
        """Rewards are from -1 to 1, and a mean is from 0 to 1."""
        fresh, hard = self.answers(1, 1, None, 0, 0, 0), self.answers(1, 0, 1, 1)  # the second group fails
        created = GeneratedStep.of(
            [("fresh", fresh, 5), ("reevaluated", hard, 7)],
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

    def test_what_responses_say_of_their_weights_is_checked_and_taken_out(self):
        answers = self.answers(1, 0, 1, 0)
        for response in (response for each in answers for response in each.responses):
            response.extras["info"] |= {"version_min": 5, "version_max": 5}
        created = GeneratedStep.of([("fresh", answers, 5)], first_uid=0, step=7)
        assert all(response.extras["info"] == {} for group in created.fresh for response in group.responses)
        answers[1].responses[1].extras["info"] |= {"version_min": 4, "version_max": 5}
        with pytest.raises(RuntimeError, match=r"weights of steps \[4, 5\] generated .* held those of step 5"):
            GeneratedStep.of([("fresh", answers, 5)], first_uid=0, step=7)
