"""Responses that another model wrote (traces): how they enter a group, and their weight in the loss."""

from dataclasses import replace

import numpy as np

from bapo_openrlhf.adapt.group import REFERENCE, Response


def external_response(trace: np.ndarray, place: Response, reward: float) -> Response:
    """A trace as a response that may replace a generated response to the same prompt.

    It takes the tokens of the prompt and the extras from the generated response, except the log-probs under the
    reference model.

    Args:
        trace: Token ids of the trace, int of shape (A,), end token included.
        place: The generated response.
        reward: Reward of the trace.
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

    The loss of such a token is -f(pi_theta) A, where x is the ratio pi_theta / 1, without a clip. Its gradient is that
    of log pi_theta times f (1 - f) = gamma x / (x + gamma)^2. Without f, the factor would be x. So tokens that today's
    policy finds unlikely are learned faster, and those that it is sure of hardly change.

    Args:
        probabilities: pi_theta of each token, any shape.
        gamma: gamma of f, above 0.
    """
    return np.asarray(probabilities / (probabilities + gamma))
