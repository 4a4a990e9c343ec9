"""Groups with fewer responses than G on their way through the trainer: generated in stages, kept in part, replayed."""

from collections import Counter

import pytest

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.methods import Method
from bapo_openrlhf.record.run_record import read_groups

AR3PO = {"adapt.method": "ar3po", "adapt.options": "stages=4", "adapt.rollout_delay": 1, "adapt.filter": "none"}


class Outcomes:
    """The n-th response to a prompt in a step is right from n = `hardness` on."""

    def __init__(self, run) -> None:
        self.run, self.asked = run, Counter()

    def __call__(self, prompt: str, weights: int, sample: int) -> float:
        self.asked[self.run.step, prompt] += 1
        return float(self.asked[self.run.step, prompt] >= self.hardness(prompt))

    @staticmethod
    def hardness(prompt: str) -> int:
        """1 to 6, where only 1 to 4 are within G = 4 responses."""
        return 1 + int(prompt.split()[-1]) % 6


def sizes_of(experiences) -> Counter:
    """Number of samples of each prompt that are trained on."""
    return Counter(prompt for experience in experiences for prompt in experience.prompts)


@pytest.mark.parametrize("algorithm", ["bapo_grpo", "ba_ppo"])
class TestStages:
    def test_each_prompt_gets_responses_until_one_is_right(self, world, algorithm):
        run = world(algorithm=algorithm, prompts=12, **AR3PO)
        run.reward = Outcomes(run)
        run.trainer.fit()
        wanted = {prompt: min(Outcomes.hardness(prompt), 4) for prompt in (f"prompt {n}" for n in range(12))}
        assert set(wanted.values()) == {1, 2, 3, 4}
        assert {prompt: count for (_, prompt), count in run.reward.asked.items()} == wanted
        assert {(step, prompt): wanted[prompt] for step, prompt in run.reward.asked} == run.reward.asked
        for step, experiences in run.trained:
            trained = sizes_of(experiences)
            assert trained == {prompt: wanted[prompt] for prompt in trained} and len(trained) == 4, step
        rows = read_groups(run.record)
        assert Counter(row["responses"] for row in rows) == Counter(2 * list(wanted.values()))
        metrics = run.metrics()
        assert sum(row["rollouts/step"] for row in metrics) == 2 * sum(wanted.values())
        assert all(row["responses/trained"] == row["rollouts/step"] and not row["responses/dropped"] for row in metrics)

    def test_a_reward_that_fails_ends_the_prompts_stages(self, fitted, algorithm):
        words = {"algorithm": algorithm, "prompts": 4, "train.num_episodes": 1}
        run = fitted(reward=lambda prompt, *_: None if prompt == "prompt 2" else 0.0, **AR3PO, **words)
        assert Counter(row["responses"] for row in read_groups(run.record)) == {4: 3, 1: 1}
        assert run.trainer.ledger.responses["failed"] == 1 and run.trainer.ledger.responses["generated"] == 13

    @pytest.mark.parametrize(("counts", "message"), [([4, 0, 0, 0], "5, 1, 1, 1"), ([-1, 0, 0, 0], "0, 1, 1, 1")])
    def test_a_method_may_not_ask_for_more_than_g(self, world, algorithm, counts, message):
        run = world(algorithm=algorithm, prompts=4, **AR3PO)
        run.trainer.method.more_responses = lambda rewards: counts
        with pytest.raises(RuntimeError, match=rf"groups of \[{message}\] responses were asked for; each may have at"):
            run.trainer.fit()

    def test_the_range_of_rewards_is_that_of_the_task(self, fitted, algorithm):
        """From -1 to 1: a reward of -1 is 0 for the method, so that it gets more responses, and 1 is a success."""
        words = {"algorithm": algorithm, "prompts": 4, "adapt.reward_range": ["-1", "1"]}
        run = fitted(reward=lambda prompt, *_: 1.0 if prompt == "prompt 0" else -1.0, **AR3PO, **words)
        assert Counter(row["responses"] for row in read_groups(run.record)) == {4: 6, 1: 2}


class Parts(Method):
    """Trains on some responses of each fresh group, and replays the first of them by itself in the next step.

    There it also takes the place of a response of a fresh group.
    """

    STATE = ("stored",)

    def __init__(self, capacity: int) -> None:
        self.stored = []

    def build_batch(self, step, fresh, reevaluated):
        kept = [group.keep(range(1 + group.uid % 3), relative_to="generated") for group in fresh]
        replayed, self.stored = self.stored, [group.keep([0], relative_to="generated") for group in fresh[:2]]
        if replayed:
            kept[2] = kept[2].exchange(0, replayed[0].standalone(replayed[0].responses[0]))
        return Batch(fresh=kept, replayed=replayed)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("algorithm", ["bapo_grpo", "ba_ppo"])
def test_parts_of_groups_are_trained_on_and_accounted_for(world, algorithm, ranks):
    run = world(algorithm=algorithm, prompts=8, **{"adapt.batch_size": 6, "actor.num_gpus_per_node": ranks})
    run.trainer.method = run.trainer.accounts.method = Parts(6)
    told = []
    run.trainer.method.observe_distances = lambda step, distances: told.append((step, len(distances)))
    if ranks == 3:
        run.args.train.batch_size = 12
    run.trainer.fit()
    metrics = run.metrics()
    for number, (row, (_, experiences)) in enumerate(zip(metrics, run.trained, strict=True)):
        expected = sum(1 + uid % 3 for uid in range(4 * number, 4 * number + 4))
        replayed, exchanged = (2, 1) if number else (0, 0)
        assert sum(sizes_of(experiences).values()) == expected + replayed == row["responses/trained"]
        assert row["responses/replayed"] == replayed + exchanged
        assert row["responses/dropped"] == 16 - expected + exchanged
        assert row["groups/capacity_used"] == (expected + replayed) / 24 and row["groups/capacity"] == 6
        assert told[number] == (number, 4 + replayed)
    assert run.trainer.ledger.responses["generated"] == 16 * len(metrics)
