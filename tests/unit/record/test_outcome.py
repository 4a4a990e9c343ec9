"""What a run says that trained nothing, and that others say nothing."""

import pytest

from bapo_openrlhf.record.outcome import nothing_trained

NOTHING = {"reward/fresh_mean": 1.0, "groups/generated": 4, "groups/with_signal": 0}
QUARTER = NOTHING | {"reward/fresh_mean": 0.25}
BY_PROMPT = NOTHING | {"reward/fresh_mean": 0.5, "rollout/reward_mean": 0.5, "rollout/reward_std": 0.5}
ROUNDED = NOTHING | {"reward/fresh_mean": 0.1, "rollout/reward_mean": 0.1, "rollout/reward_std": 8e-9}
SKIPPED = NOTHING | {"skipped_update": 1, "groups/filtered": 4}


def rows(*metrics):
    return [{"step": step} | row for step, row in enumerate(metrics, 1)]


@pytest.mark.parametrize(("metrics", "estimator", "says"), [
    ([SKIPPED] * 3, "gae", ["nothing was trained", "each of 3 steps. 12 groups", "reward 1)", "reward function"]),
    ([NOTHING, QUARTER], "group_norm", ["nothing was learned", "8 groups", "0.25 to 1"]),
    ([NOTHING], "gae", ["nothing was learned in the only step. 4 groups"]),
    ([ROUNDED], "gae", ["nothing was learned in the only step"]),
    ([BY_PROMPT], "group_norm", ["nothing was learned in the only step"]),
    ([NOTHING | {"reward/fresh_mean": 0.0}], "gae", ["reward 0)", "answers.jsonl"]),
    (
        [SKIPPED | {"groups/with_signal": 3, "groups/filtered": 1, "groups/too_far": 3}] * 2,
        "rloo",
        ["nothing was trained", "8 groups were generated: 2 filtered, 6 too far"],
    ),
    # Runs that trained say nothing.
    ([], "gae", None),
    ([SKIPPED, NOTHING | {"groups/with_signal": 1}], "group_norm", None),
    ([SKIPPED, {**SKIPPED, "skipped_update": None, "groups/with_signal": 1}], "group_norm", None),
    ([NOTHING, QUARTER], "gae", None),  # a critic compares prompts
    ([BY_PROMPT], "gae", None),
    ([ROUNDED | {"reward/fresh_mean": 0.5}, BY_PROMPT], "gae", None),
    ([{"reward/fresh_mean": 1.0}], "group_norm", None),  # a reward model judges
    ([NOTHING, NOTHING | {"demonstrations/trained": 1}], "group_norm", None),
])  # fmt: skip
def test_the_last_line(metrics, estimator, says):
    said = nothing_trained(rows(*metrics), estimator)
    assert said is None if says is None else all(part in said for part in says)
