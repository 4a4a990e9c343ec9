"""Answers of engines as groups, and these as the samples that OpenRLHF's generator makes of the answers."""

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.training.trainer.fresh import prompts_of
from bapo_openrlhf.training.trainer.generated import groups_of
from bapo_openrlhf.training.trainer.samples import Answers, generated_response, samples_of
from bapo_openrlhf.training.wire.packing import WIDE


def answer_of(
    prompt_tokens: int = 3, turns: tuple[tuple[int, int], ...] = ((4, 0),), *, score: float | None = 1.0, seed: int = 0,
    **changed: Any,
) -> dict[str, Any]:  # fmt: skip
    """An engine's answer. A turn has generated tokens, and those of the environment's answer."""
    rng = np.random.default_rng(seed)
    log_probs, ranges = [0.0] * prompt_tokens, []
    for generated, answered in turns:
        ranges.append((len(log_probs), len(log_probs) + generated))
        log_probs += (-rng.exponential(size=generated)).tolist() + [0.0] * answered
    return {
        "prompt": "1 + 1 =",
        "label": "2",
        "images": None,
        "mm_train_inputs": None,
        "observation_tokens": rng.integers(0, 150_000, len(log_probs)).tolist(),
        "action_ranges": ranges,
        "rollout_log_probs": log_probs,
        "truncated": False,
        "reward": 1.0,
        "scores": score,
        "extra_logs": {},
    } | changed


def made_by_openrlhf(answer: dict[str, Any], max_len: int = 2048) -> Experience:
    """The sample that OpenRLHF makes of an answer."""
    return SamplesGenerator._process_response_into_experience(SimpleNamespace(), answer, max_len=max_len)


def answers_of(*answers: dict[str, Any], max_len: int = 2048) -> Answers:
    """The answers to one prompt."""
    first, responses = answers[0], [generated_response(answer, max_len=max_len) for answer in answers]
    return Answers(Prompt(first["prompt"], first["label"], first["images"]), responses)


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


MORE = (
    {},
    {"label": None},
    {"extra_logs": {"format": 1.0, "steps": 7, "valid": True, "length": torch.tensor([[3.5]])}},
    {"images": ["a.png"], "mm_train_inputs": {"pixel_values": torch.arange(6.0).reshape(2, 3)}},
)


@given(
    prompt_tokens=st.integers(1, 12),
    turns=st.just([(0, 0)]) | st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=4),
    max_len=st.integers(2, 40),
    reward=st.floats(-10, 10),
    score=st.none() | st.floats(-1, 1),
    truncated=st.booleans(),
    more=st.sampled_from(MORE),
)
@settings(derandomize=True, database=None)
def test_a_sample_is_openrlhfs(more, max_len, **case):
    """A response without a score has its reward for it."""
    answers = [answer_of(**case, **more, seed=seed) for seed in range(4)]
    both = [answers_of(*answers[:2], max_len=max_len), answers_of(*answers[2:], max_len=max_len)]
    groups = groups_of(both, first_uid=0, step=0, weights_version=0)
    for one, answer in zip(samples_of(groups), answers, strict=True):
        scores = answer["reward"] if answer["scores"] is None else answer["scores"]
        assert_same(one, made_by_openrlhf(answer | {"scores": scores}, max_len))


def test_a_sample_may_be_made_twice_from_one_group():
    (group,) = groups_of([answers_of(answer_of())], first_uid=0, step=0, weights_version=0)
    first = samples_of([group])[0]
    first.sequences.zero_()
    first.rollout_log_probs.zero_()
    first.rewards.zero_()
    assert_same(samples_of([group])[0], made_by_openrlhf(answer_of()))


class TestResponse:
    def test_by_hand(self):
        # prompt 2, turn of 3, answer of 2, turn of 1
        answer = answer_of(2, ((3, 2), (1, 0)), reward=0.25)
        (response,) = answers_of(answer).responses
        assert response.action_spans == ((2, 5), (7, 8))
        assert response.token_ids.tolist() == answer["observation_tokens"] and len(response.token_ids) == 8
        log_probs = np.array(answer["rollout_log_probs"], dtype=np.float32)
        assert response.log_probs.tolist() == log_probs[[2, 3, 4, 7]].tolist()
        assert all(value < 0 for value in response.log_probs)
        assert response.reward == 0.25


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
