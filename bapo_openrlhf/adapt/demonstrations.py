"""Demonstrations: worked solutions of prompts, which no policy of this run wrote, and the loss of their tokens.

A demonstration has no behaviour log-probs. So it is in no ratio, no distance and no bound. In a batch it stands beside
the groups, in X4 (`Batch.demonstrations`, `Batch.fine_tuned`).
"""

from typing import Any

from bapo_openrlhf.adapt.batch import Demonstration
from bapo_openrlhf.adapt.group import Group

GAMMA = 0.1  # of LUFFY's policy shaping


def demonstration_of(group: Group) -> Demonstration:
    """The worked solution of a group's prompt, which has the greatest reward of the task, compared with the group's."""
    own = (response.reward for response in group.responses)
    return Demonstration(group.uid, group.prompt, (*own, float(group.reward_range[1])))


def shaped(probabilities: Any, gamma: float = GAMMA) -> Any:
    """Policy shaping f(p) = p / (p + gamma) of LUFFY (arXiv 2504.14945), for numbers, arrays and tensors.

    The loss of a token of a demonstration is -f(p) A. p is its probability under today's policy: the ratio to the
    policy that wrote it, whose probability is taken as 1. There is no clip. The gradient of f(p) is that of log p times
    gamma p / (p + gamma)^2, and without f it would be p. So a token that is unlikely today is learned faster, and one
    that is sure hardly moves. gamma is above 0.
    """
    return probabilities / (probabilities + gamma)
