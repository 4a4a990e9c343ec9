"""Groups to and from OpenRLHF's samples. A sample is an `Experience` of one response; those of a group are in a row."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from bapo_openrlhf.adapt.group import Group, Prompt, Response
from bapo_openrlhf.adapt.rewards import UNIT, Range
from bapo_openrlhf.training.wire.responses import PREFIX, SEGMENTS


def spans_of(mask: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """The pair (start, end) of each run of ones in a 0/1 mask of shape (T,)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.numpy().astype(np.int8), [0]))))
    return tuple((int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True))


def prompt_of(sample: Experience) -> Prompt:
    """The prompt of a generated sample. A row whose list of images is empty has the prompt of one without images.

    The prefix is what comes right before the first generated token, which is token i + 1 for place i of the mask.
    """
    images, count = (sample.images and sample.images[0]) or None, int(sample.info.get(PREFIX, 0))
    end = int(sample.action_mask[0].int().argmax()) + 1 if count else 0
    return Prompt(sample.prompts[0], sample.labels[0], images, sample.sequences[0][end - count : end].tolist())


def reward_of(value: Any) -> float | None:
    """A reward function's answer for one response, rounded to float32 as in OpenRLHF; None if it is not finite."""
    try:
        numbers = torch.as_tensor(value, dtype=torch.float32).flatten().tolist()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return numbers[0] if len(numbers) == 1 and math.isfinite(numbers[0]) else None


def generated_sample(response: dict[str, Any], **generation: Any) -> Experience:
    """A response of an engine as OpenRLHF's generator makes a sample of it.

    A reward that is not a finite number becomes None.

    Args:
        response: What an engine says of it.
        generation: OpenRLHF's arguments of the generation, of which it reads the largest length.
    """
    reward, score = reward_of(response.get("reward")), reward_of(response.get("scores"))
    if reward is None or score is None:
        score = reward  # OpenRLHF does the same if there is no score
    judged = response | {"reward": reward, "scores": score}
    sample: Experience = SamplesGenerator._process_response_into_experience(None, judged, **generation)
    if response.get(PREFIX):
        sample.info[PREFIX] = torch.tensor([response[PREFIX]])
    return sample


def response_of(sample: Experience) -> Response:
    """A generated sample as the layer stores it.

    OpenRLHF's action_mask and rollout_log_probs have the shape (1, T - 1). Position i belongs to token i + 1.

    Raises:
        ValueError: It has no behaviour log-probs.
    """
    if sample.rollout_log_probs is None:
        raise ValueError(f"a response to {sample.prompts[0]!r:.100} has no behaviour log-probs")
    mask = sample.action_mask[0].bool()
    segments = tuple((int(version), int(tokens)) for version, tokens in sample.info.get(SEGMENTS, ()))
    return Response(
        token_ids=sample.sequences[0].numpy(),
        action_spans=tuple((start + 1, end + 1) for start, end in spans_of(mask)),
        log_probs=sample.rollout_log_probs[0][mask].numpy(),
        reward=float(sample.rewards[0]),
        extras={
            "info": {key: value[0].item() for key, value in sample.info.items() if key not in (SEGMENTS, PREFIX)},
            "score": None if sample.scores is None else float(sample.scores[0]),
            "truncated": bool(sample.truncated[0]),
            "mm_train_inputs": sample.mm_train_inputs[0] if sample.mm_train_inputs else None,
        },
        weights_version=min((version for version, _ in segments), default=None),
        segments=segments,
    )


def in_groups(samples: Sequence[Experience], size: int) -> list[Sequence[Experience]]:
    """The samples of each group.

    Raises:
        ValueError: The samples are not whole groups.
    """
    if len(samples) % size:
        raise ValueError(f"{len(samples)} samples are not whole groups of {size}")
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def groups_of(
    samples: Sequence[Sequence[Experience]],
    *,
    first_uid: int,
    step: int,
    weights_version: int,
    reward_range: Range = UNIT,
) -> list[Group]:
    """The samples of one rollout as groups, in order.

    Args:
        samples: The samples of each group.
        first_uid: Number of the first group.
        step: Trainer step.
        weights_version: Number of updates behind the weights that generated the samples. A group of samples with
            segments has that of its oldest token.
        reward_range: The least and the greatest reward of the task.

    Raises:
        ValueError: A group has several prompts, or prefixes.
    """
    groups = []
    for number, members in enumerate(samples):
        if len({(prompt.text, str(prompt.label), prompt.prefix) for prompt in map(prompt_of, members)}) != 1:
            raise ValueError(f"the samples of group {first_uid + number} are not responses to one prompt")
        responses = tuple(map(response_of, members))
        uid, prompt = first_uid + number, prompt_of(members[0])
        known = [response.weights_version for response in responses if response.weights_version is not None]
        groups.append(Group(uid, prompt, responses, step, min(known, default=weights_version), reward_range))
    return groups


def sample_of(prompt: Prompt, response: Response) -> Experience:
    """A sample with the prompt and the response. `response_of` is the inverse.

    OpenRLHF's tokens and masks are int64. Here tokens are int32, and masks are bool, until they are in the workers
    (`dealing.WIDE`). A token then takes 10 bytes and not 28.
    """
    length = len(response.token_ids)
    mask, log_probs = np.zeros(length, dtype=bool), np.zeros(length, dtype=np.float32)
    for start, end in response.action_spans:
        mask[start:end] = True
    log_probs[mask] = response.log_probs
    spans = response.action_spans or ((0, 0),)
    extras = response.extras
    return Experience(
        sequences=torch.from_numpy(response.token_ids.copy()).unsqueeze(0),
        attention_mask=torch.ones(1, length, dtype=torch.bool),
        action_mask=torch.from_numpy(mask[1:]).unsqueeze(0),
        rollout_log_probs=torch.from_numpy(log_probs[1:]).unsqueeze(0),
        prompts=[prompt.text],
        labels=[prompt.label],
        images=[prompt.images],
        mm_train_inputs=[extras["mm_train_inputs"]],
        rewards=torch.tensor([response.reward]),
        scores=None if extras["score"] is None else torch.tensor([extras["score"]]),
        response_length=torch.tensor([spans[-1][1] - spans[0][0]]),
        truncated=torch.tensor([extras["truncated"]]),
        total_length=torch.tensor([float(length)]),
        info={key: torch.tensor([value]) for key, value in extras["info"].items()},
    )


def samples_of(groups: Sequence[Group]) -> list[Experience]:
    """All responses of the groups as samples, in order."""
    return [sample_of(group.prompt, response) for group in groups for response in group.responses]
