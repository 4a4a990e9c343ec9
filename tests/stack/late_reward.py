"""The reward of reward.py, but the first 33 responses of a run are wrong, so the batch of step 0 is empty.

Step 0 has 32 responses. The first call is that of the check before the run.
"""

import fcntl
import os
from pathlib import Path

import reward


def reward_func(queries, prompts, labels, **kwargs):
    with (Path(os.environ["PROBE_FOLDER"]) / "responses.count").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = file.seek(0, os.SEEK_END)
        file.write(b"." * len(queries))
    result = reward.reward_func(queries, prompts, labels, **kwargs)
    right = 0.0 if before < 33 else result["rewards"]
    return {"rewards": right, "scores": right, "extra_logs": result["extra_logs"]}
