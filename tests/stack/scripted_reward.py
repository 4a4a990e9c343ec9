"""Reward of the watched run: LABEL says how many of a prompt's 4 responses are right, whatever they are.

8: all; 4: two; 2: none at first and two when the prompt is generated again; 0: one. A file for each prompt counts its
responses, for they come from several engines and processes.
"""

import fcntl
import os
from pathlib import Path

RESPONSES = 4


def reward_func(queries, prompts, labels, **kwargs):
    with (Path(os.environ["PROBE_FOLDER"]) / f"{prompts[0]}.count").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        generation, position = divmod(file.seek(0, os.SEEK_END), RESPONSES)
        file.write(b".")
    right = {8: 4, 4: 2, 2: 2 if generation else 0, 0: 1}[int(labels[0])]
    reward = float(position < right)
    return {"rewards": reward, "scores": reward, "extra_logs": {}}
