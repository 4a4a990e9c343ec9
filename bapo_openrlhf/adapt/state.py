"""Groups as plain data, for checkpoints: dictionaries of numbers, strings and numpy arrays."""

from fractions import Fraction
from typing import Any

from bapo_openrlhf.adapt.group import Group, Prompt, Response


def prompt_state(prompt: Prompt) -> dict[str, Any]:
    """A prompt as plain data. `Prompt(**state)` is the inverse."""
    prefix = {"prefix": list(prompt.prefix)} if prompt.prefix else {}
    return {"text": prompt.text, "label": prompt.label, "images": prompt.images, **prefix}


def response_state(response: Response) -> dict[str, Any]:
    """A response as plain data."""
    return {
        "token_ids": response.token_ids,
        "action_spans": [list(span) for span in response.action_spans],
        "log_probs": response.log_probs,
        "reward": response.reward,
        "extras": response.extras,
        "weights_version": response.weights_version,
        "segments": [list(segment) for segment in response.segments],
    }


def response_from_state(state: dict[str, Any]) -> Response:
    """Inverse of `response_state`."""
    pairs = {name: tuple((first, second) for first, second in state[name]) for name in ("action_spans", "segments")}
    return Response(**state | pairs)


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
        "responses": list(map(response_state, group.responses)),
    }


def group_from_state(state: dict[str, Any]) -> Group:
    """Inverse of `group_state`."""
    low, high = map(Fraction, state["reward_range"])
    return Group(
        state["uid"],
        Prompt(**state["prompt"]),
        tuple(map(response_from_state, state["responses"])),
        state["step"],
        state["weights_version"],
        (low, high),
        tuple(state["generated"]),
        state["relative_to"],
    )
