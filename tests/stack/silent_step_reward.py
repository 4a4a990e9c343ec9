"""Reward of the test of skipped groups: that of reward.py, but every response of the second step is right.

PROMPTS says how many prompts a step has. The engine sees all prompts of a step before those of the next.
"""

import os
import threading

import reward

LOCK = threading.Lock()  # OpenRLHF calls from several threads, one response a call
ORDER: dict[str, int] = {}


def reward_func(queries, prompts, labels, **kwargs):
    with LOCK:
        step = ORDER.setdefault(prompts[0], len(ORDER)) // int(os.environ["PROMPTS"])
    return reward.reward_func(queries, prompts, ["8"] if step == 1 else labels)
