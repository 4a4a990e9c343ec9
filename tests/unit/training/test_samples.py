"""Answers of engines as groups, and these as samples. `test_rollout.py` compares samples with OpenRLHF's."""

from dataclasses import fields, replace
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.training.trainer.fresh import prompts_of
from bapo_openrlhf.training.trainer.generated import groups_of
from bapo_openrlhf.training.trainer.samples import Answers, generated_response, samples_of
from bapo_openrlhf.training.wire.packing import WIDE


def answer_of(**changed: Any) -> dict[str, Any]:
    """An engine's answer: a prompt of three tokens, and a response of four."""
    return {
        "prompt": "1 + 1 =",
        "label": "2",
        "observation_tokens": [9, 9, 9, 10, 11, 12, 13],
        "action_ranges": [(3, 7)],
        "rollout_log_probs": [0.0, 0.0, 0.0, -0.1, -0.2, -0.3, -0.4],
        "reward": 1.0,
        "scores": 1.0,
    } | changed


def answers_of(answer: dict[str, Any]) -> Answers:
    """One response to a prompt."""
    return Answers(Prompt(answer["prompt"], answer["label"]), [generated_response(answer)])


def comparable(value: Any) -> Any:
    """A value whose equality means that types and shapes are equal, too."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.tolist()
    if isinstance(value, dict):
        return [(key, comparable(item)) for key, item in value.items()]
    return [comparable(item) for item in value] if isinstance(value, list) else (type(value), value)


def assert_same(actual: Experience, wanted: Experience) -> None:
    """Equal in every field. Tokens and masks are narrower than OpenRLHF's."""
    for item in fields(Experience):
        ours, theirs = getattr(actual, item.name), getattr(wanted, item.name)
        if item.name in WIDE:
            assert ours.dtype == (torch.int32 if item.name == "sequences" else torch.bool), item.name
            ours = ours.long()
        assert comparable(ours) == comparable(theirs), item.name


def test_a_sample_may_be_made_twice_from_one_group():
    (group,) = groups_of([answers_of(answer_of())], first_uid=0, step=0, weights_version=0)
    first = samples_of([group])[0]
    first.sequences.zero_()
    first.rollout_log_probs.zero_()
    first.rewards.zero_()
    assert_same(samples_of([group])[0], SamplesGenerator._process_response_into_experience(None, answer_of()))


class TestGroups:
    def test_a_group_with_segments_is_as_old_as_its_oldest_token(self):
        responses = [
            replace(generated_response(answer_of()), segments=segments, weights_version=segments[0][0])
            for segments in (((5, 1), (6, 3)), ((4, 2), (5, 1), (6, 1)), ((6, 4),))  # of 4 generated tokens
        ]
        (group,) = groups_of([Answers(Prompt("p"), responses)], first_uid=0, step=6, weights_version=6)
        assert (group.step, group.weights_version) == (6, 4)
        assert [group.weights_version_of(response) for response in group.responses] == [5, 4, 6]
        assert group.responses[1].segments == ((4, 2), (5, 1), (6, 1))

    def test_a_row_with_an_empty_list_of_images_has_the_prompt_that_its_solution_and_its_choice_are_kept_under(self):
        (drawn,) = prompts_of([(None, ["p"], ["l"], [[]])])
        assert drawn.id == Prompt("p", "l").id

    def test_without_behaviour_log_probs_or_a_reward_they_cannot_be_used(self):
        for name in ("rollout_log_probs", "reward"):
            answers = answers_of(answer_of(**{name: None}))
            assert not answers.usable and answers.judged == (name != "reward")
