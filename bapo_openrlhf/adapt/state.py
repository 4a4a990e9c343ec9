"""Groups as plain data, for checkpoints: dictionaries, lists and tuples of numbers, strings and numpy arrays."""

from dataclasses import fields
from fractions import Fraction
from typing import Any

from bapo_openrlhf.adapt.group import Group, Prompt, Response


def prompt_state(prompt: Prompt) -> dict[str, Any]:
    """A prompt as plain data. `Prompt(**state)` is the inverse."""
    prefix = {"prefix": list(prompt.prefix)} if prompt.prefix else {}
    return {"text": prompt.text, "label": prompt.label, "images": prompt.images, **prefix}


def response_state(response: Response) -> dict[str, Any]:
    """A response as plain data. `Response(**state)` is the inverse."""
    return {item.name: getattr(response, item.name) for item in fields(response)}


def group_state(group: Group) -> dict[str, Any]:
    """A group with all its data, as plain data."""
    return {item.name: getattr(group, item.name) for item in fields(group)} | {
        "prompt": prompt_state(group.prompt),
        "responses": list(map(response_state, group.responses)),
        "reward_range": list(map(str, group.reward_range)),
    }


def group_from_state(state: dict[str, Any]) -> Group:
    """Inverse of `group_state`."""
    values: dict[str, Any] = {
        "prompt": Prompt(**state["prompt"]),
        "responses": tuple(Response(**response) for response in state["responses"]),
        "reward_range": tuple(map(Fraction, state["reward_range"])),
    }
    return Group(**state | values)
