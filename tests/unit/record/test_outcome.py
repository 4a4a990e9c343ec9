"""What a run says that trained nothing, and that others say nothing."""

import pytest

from bapo_openrlhf.record.outcome import nothing_trained

NOTHING = {"reward/fresh_mean": 1.0, "groups/generated": 4, "groups/with_signal": 0}
SKIPPED = NOTHING | {"skipped_update": 1, "groups/filtered": 4}
TAIL = "Look at the reward function, or take prompts of another difficulty"


def rows(*metrics):
    return [{"step": step} | row for step, row in enumerate(metrics, 1)]


@pytest.mark.parametrize(
    ("metrics", "estimator", "says"),
    [
        (
            [SKIPPED] * 3,
            "gae",
            "nothing was trained: the batch was empty in each of 3 steps. 12 groups were generated; in each group all "
            f"rewards were equal (mean reward 1), and only differences carry a signal. {TAIL}",
        ),
        (
            [NOTHING, NOTHING | {"reward/fresh_mean": 0.25}],
            "group_norm",
            "nothing was learned in each of 2 steps. 8 groups were generated; in each group all rewards were equal "
            f"(mean reward 0.25 to 1), and only differences carry a signal. {TAIL}",
        ),
        (
            [NOTHING],
            "gae",
            "nothing was learned in the only step. 4 groups were generated; in each group all rewards were equal "
            f"(mean reward 1), and only differences carry a signal. {TAIL}",
        ),
        (
            [NOTHING | {"reward/fresh_mean": 0.0}],
            "gae",
            "nothing was learned in the only step. 4 groups were generated; in each group all rewards were equal (mean "
            "reward 0), and only differences carry a signal. Read some of the responses in answers.jsonl, or take "
            "prompts of another difficulty",
        ),
        (
            [SKIPPED | {"groups/with_signal": 3, "groups/filtered": 1, "groups/too_far": 3}] * 2,
            "rloo",
            "nothing was trained: the batch was empty in each of 2 steps. 8 groups were generated: 2 filtered, "
            "6 too far",
        ),
    ],
)
def test_the_last_line(metrics, estimator, says):
    assert nothing_trained(rows(*metrics), estimator) == says


@pytest.mark.parametrize(
    ("metrics", "estimator"),
    [
        ([], "gae"),
        ([SKIPPED, NOTHING | {"groups/with_signal": 1}], "group_norm"),
        ([SKIPPED, {**SKIPPED, "skipped_update": None, "groups/with_signal": 1}], "group_norm"),
        ([NOTHING, NOTHING | {"reward/fresh_mean": 0.25}], "gae"),  # a critic compares prompts
        ([{"reward/fresh_mean": 1.0}], "group_norm"),  # a reward model judges
        ([NOTHING, NOTHING | {"demonstrations/trained": 1}], "group_norm"),
    ],
)
def test_a_run_that_trained_says_nothing(metrics, estimator):
    assert nothing_trained(rows(*metrics), estimator) is None
