"""A response is right if its last "Answer:" that a number follows has that of the label."""

import re

NUMBER = re.compile(r"Answer:\s*\**\s*(-?\d[\d,]*(?:\.\d+)?)")


def answer(response):
    """The final answer of a response; None if it has none. `bapo-openrlhf evaluate` counts it for majority votes."""
    numbers = NUMBER.findall(response)
    return numbers[-1].replace(",", "") if numbers else None


def reward_func(queries, prompts, labels, responses, **kwargs):
    """One reward for each response.

    Args:
        queries: Prompt and response in one text each, with the model's special tokens.
        prompts: The prompts, as the model sees them.
        labels: The column `label` of the data.
        responses: What the model wrote, also with special tokens.
    """
    rewards = []
    for response, label in zip(responses, labels, strict=True):
        given = answer(response)
        rewards.append(1.0 if given is not None and float(given) == float(label) else 0.0)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
