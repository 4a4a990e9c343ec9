"""`bapo-openrlhf train` without its limit of learning rates, started as a script by the tests.

At a high enough rate the numbers become infinite. Other ways to that may come with days of training.
"""

import sys

from bapo_openrlhf.cli.main import run
from bapo_openrlhf.flags.ranges import VALUES

if __name__ == "__main__":
    VALUES.update({"actor.adam.lr": "at least 0", "critic.adam.lr": "at least 0"})
    sys.exit(run(["train", *sys.argv[1:]]))
