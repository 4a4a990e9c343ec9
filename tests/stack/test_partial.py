"""Partial rollouts on the real stack: ratios by the weights of each token's version."""

import numpy as np
import pytest
from test_faults import AHEAD
from test_training import recomputed

pytestmark = [pytest.mark.stack, pytest.mark.slow]
RUN = {  # up to 3 of 8 tokens in a step
    "algorithm": "bapo_grpo", "adapt__partial_rollout_tokens": 3, "adapt__rollout_delay": 1,
    "adapt__reevaluate_every": 2, "adapt__filter": "none", "adapt__c3": "7/8",
}  # fmt: skip


@pytest.mark.parametrize(("ahead", "prompts"), [({}, 32), (AHEAD, 48)], ids=["synchronous", "ahead"])
def test_ratios_are_those_of_the_weights_of_each_token(watch, ahead, prompts):
    """Each token's stored log-prob is computed again outside, by transformers from the weights of its version."""
    result, folder = watch(f"partial{len(ahead)}", data__max_samples=prompts, **RUN | ahead)
    versions_seen, mixed, differ = set(), 0, 0.0
    for step in range(1, len(result.metrics)):
        data = np.load(folder / f"experience{step}.npz")
        segmented = [index for index in range(len(data["source"])) if len(data[f"{index}/segments"]) > 1]
        for index in segmented[:4]:
            segments, mixed = data[f"{index}/segments"], mixed + 1
            assert data["weights_version"][index] == segments[0, 0] and not data["on_policy"][index]
            current, actions = recomputed(folder / f"actor{step}", data, index)
            then = {int(v): recomputed(folder / f"actor{v}", data, index)[0][actions] for v in segments[:, 0]}
            of_token = np.repeat(segments[:, 0], segments[:, 1])
            assert len(of_token) == actions.sum()
            sampled = np.array([then[int(version)][place] for place, version in enumerate(of_token)])
            old = data[f"{index}/action_log_probs"][: len(actions)][actions]
            stored = data[f"{index}/rollout_log_probs"][: len(actions)][actions]
            assert stored == pytest.approx(sampled, abs=0.03) and (old == stored).all()  # bf16
            assert data["log_ratios"][index] == pytest.approx(float((current[actions] - sampled).sum()), abs=0.06)
            differ = max(differ, float(np.abs(then[int(segments[0, 0])] - sampled).max()))
            versions_seen |= {step - int(version) for version in segments[:, 0]}
    assert mixed > 4 and len(versions_seen) > 2
    assert differ > 0.06  # the weights of one version would not do for all tokens
