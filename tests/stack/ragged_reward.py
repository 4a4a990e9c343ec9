"""Reward of the tests of ragged batches: scripted, so that each step has as many groups with signal as the test says.

RAGGED_SCRIPT holds prompts a step, responses a prompt, and the groups with signal at each step. All other groups of a
step are all wrong, or all right if the step has no signal at all. A group with signal has two right or all but one, by
turns. A prompt that is generated again gets two right. (With two responses a prompt, these are one.)
"""

import json
import os
import threading
from collections import Counter

SCRIPT = json.loads(os.environ["RAGGED_SCRIPT"])
LOCK = threading.Lock()  # OpenRLHF calls from several threads, one response a call
ORDER: dict[str, int] = {}  # by prompt; the engine sees all prompts of a step before those of the next
SCORED: Counter = Counter()


def reward_func(queries, prompts, labels, **kwargs):
    with LOCK:
        reward = scripted(prompts[0])
    return {"rewards": reward, "scores": reward, "extra_logs": {}}


def scripted(prompt):
    """Reward of the next response to `prompt`."""
    step, place = divmod(ORDER.setdefault(prompt, len(ORDER)), SCRIPT["prompts"])
    generation, position = divmod(SCORED[prompt], SCRIPT["responses"])
    SCORED[prompt] += 1
    signals = SCRIPT["signals"][step]
    few, many = min(2, SCRIPT["responses"] - 1), SCRIPT["responses"] - 1
    if generation:
        right = few
    elif place < signals:
        right = many if place % 2 else few
    else:
        right = 0 if signals else SCRIPT["responses"]
    return float(position < right)
