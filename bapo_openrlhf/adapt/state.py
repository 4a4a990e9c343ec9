"""Groups as plain data, for checkpoints: dictionaries of numbers, strings and numpy arrays."""

from fractions import Fraction
from typing import Any

from bapo_openrlhf.adapt.group import Group, Prompt, Response


def prompt_state(prompt: Prompt) -> dict[str, Any]:
    """A prompt as plain data. `Prompt(**state)` is the inverse."""
    prefix = {"prefix": list(prompt.prefix)} if prompt.prefix else {}
    return {"text": prompt.text, "label": prompt.label, "images": prompt.images, **prefix}


def group_state(group: Group) -> dict[str, Any]:
    """A group with all its data, as plain data."""
    return {
        "uid": group.uid,
        "step": group.step,
        "weights_version": group.weights_version,
        "reward_range": [str(end) for end in group.reward_range],
        "prompt": prompt_state(group.prompt),
        "generated": list(group.generated),
        "relative_to": group.relative_to,
        "responses": [
            {
                "token_ids": response.token_ids,
                "action_spans": [list(span) for span in response.action_spans],
                "log_probs": response.log_probs,
                "reward": response.reward,
                "extras": response.extras,
                "weights_version": response.weights_version,
                "segments": [list(segment) for segment in response.segments],
            }
            for response in group.responses
        ],
    }


def group_from_state(state: dict[str, Any]) -> Group:
    """Inverse of `group_state`."""
    responses = tuple(
        Response(
            token_ids=item["token_ids"],
            action_spans=tuple((start, end) for start, end in item["action_spans"]),
            log_probs=item["log_probs"],
            reward=item["reward"],
            extras=item["extras"],
            weights_version=item["weights_version"],
            segments=tuple((version, tokens) for version, tokens in item["segments"]),
        )
        for item in state["responses"]
    )
    low, high = map(Fraction, state["reward_range"])
    return Group(
        state["uid"],
        Prompt(**state["prompt"]),
        responses,
        state["step"],
        state["weights_version"],
        (low, high),
        tuple(state["generated"]),
        state["relative_to"],
    )
