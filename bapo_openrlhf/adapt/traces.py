"""Responses that another model wrote (traces): as responses of a group, and what the loss makes of their tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bapo_openrlhf.adapt.group import REFERENCE, Response


def external_response(trace: np.ndarray, place: Response, reward: float) -> Response:
    """A trace as a response to the prompt of a generated one, whose place it may take in its group.

    The prompt's tokens, and what else travels with a response, are those of the generated one; but not its log-probs
    under the reference model.

    Args:
        trace: token ids of the trace, int (A,), the end token included.
        place: a generated response to the same prompt.
        reward: of the trace.
    """
    prompt = place.token_ids[: place.action_spans[0][0]] if place.action_spans else place.token_ids
    return replace(
        place,
        token_ids=np.concatenate([prompt, trace]),
        action_spans=((len(prompt), len(prompt) + len(trace)),),
        log_probs=np.zeros(len(trace)),
        reward=reward,
        extras={name: value for name, value in place.extras.items() if name != REFERENCE},
        external=True,
    )


def shaped(probabilities: np.ndarray, gamma: float) -> np.ndarray:
    """Policy shaping f(x) = x / (x + gamma) of LUFFY (arXiv 2504.14945): the weight of a token of a trace.

    The loss of such a token is -f(pi_theta) A: x is the ratio pi_theta / 1, and there is no clip. Its gradient is that
    of log pi_theta times f (1 - f) = gamma x / (x + gamma)^2, where without f it were x: tokens that today's policy
    finds unlikely are learned faster, those it is sure of hardly move.

    Args:
        probabilities: pi_theta of each token, any shape.
        gamma: above 0.
    """
    return np.asarray(probabilities / (probabilities + gamma))
