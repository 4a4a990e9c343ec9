"""Corrections for responses that today's policy did not generate, or that were trained on before.

They say which tokens stay in the loss, how much a token of a worked solution counts in it, how large a step the actor
takes, and when the uses of a batch end.
"""

import math
from collections import deque
from typing import Any, Self

import numpy as np

from bapo_openrlhf.adapt.theory import importance_summary

GAMMA = 0.1  # of LUFFY's policy shaping


def second_moment_mask(log_ratios: np.ndarray, advantages: np.ndarray, limit: float) -> np.ndarray:
    """Which tokens stay in the loss by M2PO (arXiv 2510.01161), for arrays of shape (N,).

    Only a token counts whose ratio pi / alpha is on the side that PPO's clip is about: A > 0 and pi > alpha, or A < 0
    and pi < alpha. Of these tokens, those with the largest (log pi - log alpha)^2 are left out, one after another,
    until the mean of this square over the others is at most `limit`, 0.04 in the paper. All other tokens stay.
    """
    mask = np.ones(len(log_ratios), dtype=bool)
    places = np.flatnonzero(log_ratios * np.sign(advantages) > 0)
    places = places[np.argsort(np.abs(log_ratios[places]), kind="stable")]
    means = np.cumsum(log_ratios[places] ** 2) / np.arange(1, len(places) + 1)  # they never fall
    mask[places[np.searchsorted(means, limit, side="right") :]] = False
    return mask


def vetoed(log_ratios: Any, advantages: Any, generated: Any, limit: float) -> Any:
    """Which tokens leave the loss by the veto of mu-GRPO (arXiv 2605.17570), for arrays and tensors of shape (B, A).

    A token trips the veto if its advantage is negative and its ratio pi / alpha is below `limit`, which is 1e-4 in the
    authors' example. The first one that does stays, because its ratio makes its gradient tiny. The tokens after it
    leave, because today's policy would hardly come to where they stand. If a response has positive advantages too, such
    tokens neither trip nor leave. Only `generated` tokens count.
    """
    negative = generated & (advantages < 0)
    trips = negative & (log_ratios < math.log(limit))
    return negative & (trips.cumsum(-1) > trips)


def shaped(probabilities: Any) -> Any:
    """Policy shaping f(p) = p / (p + gamma) of LUFFY (arXiv 2504.14945), for numbers, arrays and tensors.

    The loss of a token of a demonstration is -f(p) A. p is its probability under today's policy: the ratio to the
    policy that wrote it, whose probability is taken as 1. There is no clip. The gradient of f(p) is that of log p times
    gamma p / (p + gamma)^2, and without f it would be p. So a token that is unlikely today is learned faster, and one
    that is sure hardly moves. gamma is GAMMA.
    """
    return probabilities / (probabilities + GAMMA)


def learning_rate_factor(log_ratios: np.ndarray, full: int) -> float:
    """Factor on the actor's learning rate: the root of the effective sample size, as a share of a full batch.

    It is sqrt((sum w)^2 / (F sum w^2)) with w = pi(y|x) / alpha(y|x), in [1 / sqrt(F), 1]. For a full batch it is the
    factor of VCPO (arXiv 2602.17616), so a batch in which a few responses outweigh the others makes a smaller step.
    Here, so does a batch that has few responses, because Adam's steps are as long for noise as for a signal.
    `log_ratios` are log w of N responses, shape (N,), and `full` is F >= N, what full optimizer steps would hold.
    """
    return math.sqrt(importance_summary(log_ratios)["effective_share"] * len(log_ratios) / full)


class ReuseGate:
    """Ends the uses of a batch when the energy of the head's gradient rises faster than before (arXiv 2605.19425).

    The energy g is the squared norm of the gradient of the output head in an optimizer step, and d = g - g' is its
    increment since the optimizer step before. With mean m and standard deviation s of the last `window` increments (at
    least 2), the gate trips if (d - m) / s > tau, the `threshold` (at least 0): from the second use of a batch on, and
    with a full window. Then the optimizer is not called, and the rest of the batch's uses is left out.

    Only the abstract and others' summaries of the paper could be read. What they do not say is this project's: s is
    that of the population, the window is of optimizer steps that were made, and a dropped gradient leaves no trace.
    """

    def __init__(self, threshold: float, window: int) -> None:
        self.threshold = threshold
        self.energy: float | None = None
        self.increments: deque[float] = deque(maxlen=window)

    def trips(self, energy: float, use: int) -> bool:
        """Whether an optimizer step of energy g is not to be made. Otherwise its energy is noted. Uses count from 1."""
        if self.energy is not None:
            increment = energy - self.energy
            if use > 1 and len(self.increments) == self.increments.maxlen:
                mean, deviation = np.mean(self.increments), np.std(self.increments)
                if increment - mean > self.threshold * deviation:
                    return True
            self.increments.append(increment)
        self.energy = energy
        return False

    @classmethod
    def of(cls, adapt: Any) -> Self | None:
        """The gate of the `--adapt` flags; None without one."""
        return None if adapt.reuse_gate is None else cls(adapt.reuse_gate, adapt.reuse_gate_window)

    def state_dict(self) -> dict[str, Any]:
        """The energy of the last optimizer step and the increments, as plain data."""
        return {"energy": self.energy, "increments": list(self.increments)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.energy = state["energy"]
        self.increments.clear()
        self.increments.extend(state["increments"])
