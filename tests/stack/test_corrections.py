"""Each file of configs/corrections trains on the real stack, with generation ahead of training."""

import math
from pathlib import Path

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow]

FILES = sorted((Path(__file__).parents[2] / "configs" / "corrections").glob("*.yaml"))
SHOWS = {  # what shows that the correction was at work
    "m2po": "importance/masked_share",
    "masked_responses": "is_filter_ratio",
    "masked_tokens": "is_filter_ratio",
    "mu_grpo": "importance/vetoed_share",
    "truncated_weights": "is_filter_ratio",
    "vcpo": "importance/learning_rate_factor",
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_trains_with_old_rollouts(train, path):
    """Large steps and v = 3 make the rollouts old enough that the correction has something to do."""
    more = {"algorithm": "bapo_grpo", "actor__adam__lr": 2e-2, "adapt__rollout_delay": 3, "train__async_enable": True}
    if path.stem == "truncated_weights":
        more["algo__advantage__is_correction_threshold"] = ["0", "1.05"]  # few steps have a token with a weight above 5
    if path.stem == "mu_grpo":  # no token of the tiny model is ten thousand times less likely than it was
        more["adapt__veto_ratio"] = 0.9
    result = train(f"correction_{path.stem}", config=path, adapt__c3=["2/8", "7/8"], **more)
    rows = [row for row in result.metrics if not row.get("skipped_update")]
    actual = [row[SHOWS[path.stem]] for row in rows]
    assert actual and all(0 <= value <= 1 for value in actual)
    # With equal weights, the effective sample size is the number of responses: of 16 in each optimizer step.
    trained = rows[0]["responses/trained"]
    neutral = math.sqrt(trained / (math.ceil(trained / 16) * 16)) if path.stem == "vcpo" else 0.0
    assert actual[0] == pytest.approx(neutral, abs=1e-3) and any(abs(value - neutral) > 1e-3 for value in actual)
