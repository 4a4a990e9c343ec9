"""Every built-in method but BAPO itself on the real stack, with and without a critic."""

from collections import Counter
from pathlib import Path

import pytest

from bapo_openrlhf.adapt.buffers import ReplayBuffer
from bapo_openrlhf.adapt.vocabulary import TRAINED
from bapo_openrlhf.methods.registry import METHODS, method_class
from bapo_openrlhf.record.outcome import UNTRAINED
from bapo_openrlhf.record.run_record import read_groups, read_metrics

pytestmark = [pytest.mark.stack, pytest.mark.slow]  # test_study.py checks ar3po with a critic in `make test`

OPTIONS = {  # with which it does in 6 steps what it is for
    "pods": "keep=2", "rollout_replay": ["warm_up=1", "replay_share=1/2"], "ar3po": "stages=4", "freshness": "tau=2",
    "prompt_replay": "cooldown=1", "bapo_bound": "least=-inf", "bapo_authors_code": "moving=true",
    "mopps": "candidates=3", "dots": "candidates=3", "exgrpo": "start_above=0", "repo": "warm_up=4",
}  # fmt: skip
# Methods that choose among three times as many prompts, and methods for whose sake prompts come again.
EPISODES = {"mopps": 3, "dots": 3, "repo": 2, "arpo": 2}
MOST_PROMPTS = {"repo": 24, "arpo": 24}
# test_demonstrations.py has methods that need worked solutions
OTHERS = [method for method in METHODS if method != "bapo" and not method_class(method).demonstrates]


@pytest.mark.parametrize("method", OTHERS)
@pytest.mark.parametrize("algorithm", ["bapo_grpo", "ba_ppo"])
def test_trains_and_accounts_for_every_response(train, tmp_path, method, algorithm):
    flags = {
        "algorithm": algorithm, "adapt__method": method, "adapt__options": OPTIONS.get(method),
        "adapt__rollout_delay": 1, "adapt__reevaluate_every": 1, "train__num_episodes": EPISODES.get(method, 1),
        "data__max_samples": MOST_PROMPTS.get(method, 48),
        "reward__remote_url": Path(__file__).parent / "scripted_reward.py",
        "adapt__filter": "none" if method == "ar3po" else "range",  # a group may have one response
    }  # fmt: skip
    if method == "bapo_bound":
        flags |= {"adapt__rollout_delay": 2, "adapt__max_shift_rollout": 1e-5, "adapt__scale_learning_rate": True}
    status = UNTRAINED if (method, algorithm) == ("ar3po", "bapo_grpo") else 0  # the rewards of a group are equal
    result = train(f"{method}_{algorithm}", environment={"PROBE_FOLDER": str(tmp_path)}, status=status, **flags)
    assert len(result.metrics) == 6 and sum(row["responses/trained"] > 0 for row in result.metrics) >= 4
    accounts_for_every_response(method, algorithm, result.folder)


def accounts_for_every_response(method, algorithm, folder):
    rows, groups = read_metrics(folder), read_groups(folder)
    trained = [row for row in rows if row["responses/trained"]]
    assert trained
    if algorithm == "ba_ppo":
        assert all(row["critic_grad_norm"] > 0 for row in trained)
    generated, lost = Counter(), Counter()
    for group in groups:
        generated[group["step"]] += group["responses"]
        lost[group["step"]] += group["responses"] * (group["state"] not in TRAINED)
    for row in rows:
        assert row["rollouts/step"] == generated[row["step"]]
        fresh = row["responses/trained"] - row["responses/replayed"] + row["responses/dropped"]
        assert fresh == row["rollouts/step"] - lost[row["step"]]
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
        case "repo":
            assert rows[0]["groups/replayed"] == 0 < sum(row["groups/replayed"] for row in rows)
        case "prompt_replay" | "bapo_authors_code" | "exgrpo":
            assert sum(row["groups/reevaluated"] for row in rows) > 0
        case "prefix_sampling":
            assert sum(row["groups/prefixed"] for row in rows) > 0
        case "mopps":  # 8 of 24 at each step, and none twice in an epoch of 2 steps
            assert [row["prompts/passed_over"] for row in rows] == [16] * 6
            for epoch in range(3):
                prompts = [group["prompt"] for group in groups if (group["step"] - 1) // 2 == epoch]
                assert len(prompts) == len(set(prompts)) == 16
        case _ if ReplayBuffer.METRICS[0] in method_class(method).METRICS:
            assert rows[0]["groups/replayed"] == 0 < sum(row["groups/replayed"] for row in rows)
