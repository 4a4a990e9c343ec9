"""Methods whose groups come in several sizes, or come again, on the real stack, with and without a critic."""

from collections import Counter
from pathlib import Path

import pytest
from test_training import succeeded

from bapo_openrlhf.record.run_record import read_groups

pytestmark = pytest.mark.stack

CLI = ("-m", "bapo_openrlhf.cli.train_ppo_ray")
OPTIONS = {
    "pods": "keep=2",
    "rollout_replay": ["warm_up=1", "replay_share=1/2"],
    "ar3po": "stages=4",
    "freshness": "tau=2",
    "prompt_replay": "cooldown=1",
    "bapo_bound": "least=-inf",
    "bapo_authors_code": "moving=true",
}
BOTH = [(method, algorithm) for method in OPTIONS for algorithm in ("bapo_grpo", "ba_ppo")]
ALWAYS = [("rollout_replay", "bapo_grpo"), ("ar3po", "ba_ppo")]  # the others take minutes and show the same paths


@pytest.mark.parametrize(
    ("method", "algorithm"),
    [pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.slow, id=" ".join(case)) for case in BOTH],
)
def test_trains_and_accounts_for_every_response(train, tmp_path, method, algorithm):
    result = succeeded(
        train(
            f"{method}_{algorithm}",
            *CLI,
            environment={"PROBE_FOLDER": str(tmp_path)},
            algorithm=algorithm,
            run__name=f"{method}_{algorithm}",
            adapt__method=method,
            adapt__options=OPTIONS[method],
            switches=["adapt.scale_learning_rate"] if method == "bapo_bound" else (),
            adapt__max_tv_rollout=0.02 if method == "bapo_bound" else None,
            adapt__rollout_delay=2 if method == "bapo_bound" else 1,
            adapt__reevaluate_every=1,
            adapt__filter="none" if method == "ar3po" else "range",  # a group may have one response
            reward__remote_url=Path(__file__).parent / "scripted_reward.py",
        )
    )
    rows, groups = result.metrics, read_groups(result.folder)
    trained = [row for row in rows if row["responses/trained"]]
    assert len(rows) == 6 and len(trained) >= 4
    if algorithm == "ba_ppo":
        assert all(row["critic_grad_norm"] > 0 for row in trained)
    generated = Counter()
    for group in groups:
        generated[group["step"]] += group["responses"]
    for row in rows:
        assert row["rollouts/step"] == generated[row["step"]]
        lost = sum(row[f"groups/{state}"] for state in ("filtered", "unimproved", "solved", "cut"))
        own = row["responses/trained"] - row["responses/replayed"] + row["responses/dropped"]
        assert own <= row["rollouts/step"] and (lost or own == row["rollouts/step"])
    sizes = Counter(group["responses"] for group in groups)
    match method:
        case "pods":
            assert sum(row["responses/dropped"] for row in rows) == sum(row["responses/trained"] for row in rows) > 0
        case "rollout_replay":
            assert rows[0]["responses/replayed"] == 0 and sum(row["responses/replayed"] > 0 for row in rows) >= 3
            assert any(row["responses/replayed"] % 4 for row in rows)  # not whole groups
        case "ar3po":
            assert set(sizes) >= {1, 4}  # solved at once, and solved by none of four
            assert sum(row["exchange/failed"] for row in rows) > 0
        case "freshness" | "bapo_bound":
            assert rows[0]["groups/replayed"] == 0 < sum(row["groups/replayed"] for row in rows)
        case "prompt_replay" | "bapo_authors_code":
            assert sum(row["groups/reevaluated"] for row in rows) > 0
