"""Rewards of floor.py that follow a hash, so that about half of the groups carry a signal and every part has work.

Half of the prompts are solved by half of their responses, a quarter by one response in 16, and a quarter by all.
"""

import hashlib

CHANCES = (0.5, 0.5, 1 / 16, 1.0)


def drawn(text: str) -> float:
    """A number of [0, 1) that follows from the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) / 2**32


def reward_func(queries, prompts, labels, **kwargs):
    """One reward for each response. It follows from the prompt and the tokens of the response."""
    rewards = [
        float(drawn(query) < CHANCES[int(4 * drawn(prompt))]) for query, prompt in zip(queries, prompts, strict=True)
    ]
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
