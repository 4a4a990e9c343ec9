"""Samples that OpenRLHF's generator makes, as groups and back."""

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.training.trainer.fresh import prompts_of
from bapo_openrlhf.training.trainer.generated import groups_of
from bapo_openrlhf.training.trainer.samples import Answers, answers_of, response_of, samples_of
from bapo_openrlhf.training.wire.packing import WIDE


def made_by_openrlhf(
    prompt_tokens: int = 3, turns: tuple[tuple[int, int], ...] = ((4, 0),), *, score: float | None = 1.0,
    max_len: int = 2048, seed: int = 0, **changed: Any,
) -> Experience:  # fmt: skip
    """What OpenRLHF makes of a vLLM response. A turn has generated tokens, and those of the environment's answer."""
    rng = np.random.default_rng(seed)
    log_probs, ranges = [0.0] * prompt_tokens, []
    for generated, answered in turns:
        ranges.append((len(log_probs), len(log_probs) + generated))
        log_probs += (-rng.exponential(size=generated)).tolist() + [0.0] * answered
    response = {
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
    return SamplesGenerator._process_response_into_experience(SimpleNamespace(), response, max_len=max_len)


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
def test_round_trip(more, **case):
    samples = [made_by_openrlhf(**case, **more, seed=seed) for seed in range(4)]
    groups = groups_of(answers_of(samples, 2), first_uid=0, step=0, weights_version=0)
    for seed, one in enumerate(samples_of(groups)):
        assert_same(one, made_by_openrlhf(**case, **more, seed=seed))
    assert len(groups) == 2


def test_a_sample_may_be_made_twice_from_one_group():
    (group,) = groups_of(answers_of([made_by_openrlhf()], 1), first_uid=0, step=0, weights_version=0)
    first = samples_of([group])[0]
    first.sequences.zero_()
    first.rollout_log_probs.zero_()
    first.rewards.zero_()
    assert_same(samples_of([group])[0], made_by_openrlhf())


class TestResponse:
    def test_by_hand(self):
        # prompt 2, turn of 3, answer of 2, turn of 1
        sample = made_by_openrlhf(2, ((3, 2), (1, 0)), reward=0.25)
        response = response_of(sample)
        assert response.action_spans == ((2, 5), (7, 8))
        tokens = sample.sequences[0].tolist()
        assert response.token_ids.tolist() == tokens and len(tokens) == 8
        # position i of OpenRLHF's log-probs speaks of token i + 1
        stored = sample.rollout_log_probs[0]
        assert response.log_probs.tolist() == [stored[1], stored[2], stored[3], stored[6]]
        assert all(value < 0 for value in response.log_probs)
        assert response.reward == 0.25


class TestGroups:
    def test_a_group_with_segments_is_as_old_as_its_oldest_token(self):
        responses = [
            replace(response_of(made_by_openrlhf()), segments=segments, weights_version=segments[0][0])
            for segments in (((5, 1), (6, 3)), ((4, 2), (5, 1), (6, 1)), ((6, 4),))  # of 4 generated tokens
        ]
        (group,) = groups_of([Answers(Prompt("p"), responses)], first_uid=0, step=6, weights_version=6)
        assert (group.step, group.weights_version) == (6, 4)
        assert [group.weights_version_of(response) for response in group.responses] == [5, 4, 6]
        assert group.responses[1].segments == ((4, 2), (5, 1), (6, 1))

    def test_a_row_with_an_empty_list_of_images_has_the_prompt_that_its_solution_and_its_choice_are_kept_under(self):
        (drawn,) = prompts_of([(None, ["p"], ["l"], [[]])])
        assert drawn.id == Prompt("p", "l").id

    def test_incomplete(self):
        with pytest.raises(ValueError, match="3 samples are"):
            answers_of([made_by_openrlhf() for _ in range(3)], 2)

    def test_without_behaviour_log_probs_or_a_reward_they_cannot_be_used(self):
        for name in ("rollout_log_probs", "rewards"):
            sample = made_by_openrlhf()
            setattr(sample, name, None)
            (answers,) = answers_of([sample], 1)
            assert not answers.usable and answers.judged == (name != "rewards")
