"""Runs without batch adaptation on the fake stack, and their record."""

import math
from types import SimpleNamespace

import pytest
import torch
from fake_stack import DYNAMIC, Ref, World, copied, tokens_of
from test_record_of_runs import assert_counted

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.record import metrics
from bapo_openrlhf.record.run_record import read_answers, read_groups, read_warnings
from bapo_openrlhf.training.trainer.plain_trainer import RecordedPPOTrainer

PLAIN = {"algorithm": "grpo", "kind": RecordedPPOTrainer}


def test_a_response_without_a_reward_stops_the_run_and_the_commonest_cause_is_the_last_word(world):
    run = world(**PLAIN, prompts=8)
    run.reward = lambda prompt, weights, sample: None if (weights, sample) == (1, 2) else 1.0
    run.reward_failures[0].add("raised", "reward_func raised KeyError: 'answer'", "reward.py:12")
    with pytest.raises(RuntimeError, match=r"^4 of 16 responses have no reward; .* \(reward\.py:12\)$"):
        run.trainer.fit()
    assert len(run.metrics()) == 1


class TestRecord:
    @pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
    @pytest.mark.parametrize(("prompts", "filtering"), [(10, {}), (30, DYNAMIC)], ids=["all groups", "filtered"])
    def test_of_a_run_without_batch_adaptation(self, fitted, algorithm, prompts, filtering):
        run = fitted(algorithm=algorithm, kind=RecordedPPOTrainer, prompts=prompts, **filtering)
        assert run.noted("set_up") == [(run.trainer.tokenizer, run.args.verifier, False)]  # of the engines
        rows, metrics = read_groups(run.record), run.metrics()
        assert [row["uid"] for row in rows] == list(range(len(run.requests))) == list(range(2 * prompts))
        ids = {Prompt(f"prompt {n}", str(n)).id: f"prompt {n}" for n in range(prompts)}
        actual, wanted = [], []
        for request in run.requests:
            rewards = [run.reward(request.prompt, request.weights, n) for n in range(4)]
            state = "fresh" if not filtering or 0 < sum(rewards) < 4 else "filtered"
            wanted.append((request.weights + 1, request.prompt, state, sum(rewards) / 4, tokens_of(request)))
        for row in rows:
            actual.append((row["step"], ids[row["prompt"]], row["state"], row["mean"], row["tokens"]))
            assert row["responses"] == 4 and row["source"] == "fresh"
        assert sorted(actual) == sorted(wanted)
        for step, metric in enumerate(metrics, 1):
            of_step = [row for row in rows if row["step"] == step]
            assert_counted(metric, of_step)
            assert metric["groups/capacity_used"] == metric["groups/fresh"] / 4 <= 1
            tokens = [row["tokens"] for row in of_step if row["state"] == "fresh"]
            assert metric["tokens/trained"] == sum(tokens)
            assert metric["length/fresh"] == sum(tokens) / (4 * len(tokens))
        assert metrics[-1]["rollouts/total"] == 8 * prompts
        assert metrics[-1]["tokens/trained_total"] == sum(row["tokens"] for row in rows if row["state"] == "fresh")
        assert {row["mean"] for row in rows if row["state"] == "filtered"} == ({0, 1} if filtering else set())
        assert read_answers(run.record)

    def test_of_a_range_that_drops_groups_with_a_signal(self, fitted):
        changed = {"algo.dynamic_filtering_range": (0.3, 0.6), "train.num_episodes": 1}
        run = fitted(**PLAIN, prompts=40, **DYNAMIC, **changed)
        rows, metrics = read_groups(run.record), run.metrics()
        assert {row["mean"] for row in rows if row["state"] == "fresh"} == {0.5}
        for step, metric in enumerate(metrics, 1):
            assert_counted(metric, [row for row in rows if row["step"] == step])
        reasons = ("none_right", "all_right", "by_draw")
        assert all(sum(metric[f"filtered/{reason}"] for metric in metrics) for reason in reasons)

    def test_of_batches_that_were_filtered_whole(self, world):
        run = world(**PLAIN, prompts=8, evaluation=3, **DYNAMIC, **{"eval.steps": 1})
        run.reward = lambda prompt, weights, n: float(weights == 0 and n == 0)
        run.trainer.fit()
        first, last = run.metrics()  # 4 groups, then 4 and the 8 of the second episode, none of them trained on
        assert "skipped_update" not in first and first["groups/fresh"] == first["groups/generated"] == 4
        assert (last["skipped_update"], last["step"], last["groups/fresh"], last["groups/filtered"]) == (1, 2, 0, 12)
        assert last["rollouts/total"] == 4 * 16 and last["tokens/trained"] == 0 and last["reward/fresh_mean"] == 0
        assert set(last) - {"step"} <= metrics.names("grpo", optional=True)
        assert len(read_groups(run.record)) == 16 and run.updates["actor"] == 1

    def test_of_such_a_batch_after_a_resume(self, world, tmp_path):
        flags = PLAIN | DYNAMIC | {"ckpt.save_steps": 2, "train.num_episodes": 1, "prompts": 16, "folder": tmp_path}
        run = world(**flags)
        run.reward = lambda prompt, weights, n: float(weights < 3 and n == 0)
        run.trainer.fit()
        assert [row["groups/filtered"] for row in run.metrics()] == [0, 0, 0, 4]
        again = world(**flags, **{"ckpt.load_enable": True})
        again.reward = lambda *_: 0.0
        again.trainer.fit()
        rows = again.metrics()
        assert [row["step"] for row in rows] == [1, 2, 3]
        assert [row["groups/filtered"] for row in rows] == [0, 0, 8] and rows[-1]["rollouts/total"] == 4 * 16
        assert [row["uid"] for row in read_groups(again.record)] == list(range(16))

    def test_of_a_run_that_is_resumed_at_the_end_of_an_epoch(self, world, tmp_path):
        """It goes on with the next epoch, and after the last one nothing is left."""
        words = {"algorithm": "grpo", "train.num_episodes": 2, "ckpt.save_steps": 1, "ckpt.max_num": 9}
        run = world(kind=RecordedPPOTrainer, prompts=7, **words)  # two steps an epoch; the second sees the data's end
        run.trainer.fit()
        for step, updates in ((2, 2), (4, 0)):
            folder = tmp_path / str(step)
            copied(run, folder, f"global_step{step}")
            (folder / "checkpoints" / "_actor" / "latest").write_text(f"global_step{step}")
            again = World(folder, words | {"ckpt.load_enable": True}, prompts=7, evaluation=0, engines=1)
            again.choose_start()
            again.make_trainer(RecordedPPOTrainer)
            again.trainer.fit()
            assert [row["step"] for row in again.metrics()] == [row["step"] for row in run.metrics()] == [1, 2, 3, 4]
            assert len(again.trained) == updates
        (warning,) = read_warnings(again.record)
        assert warning["text"].endswith("nothing is left to train")

    def test_of_a_resumed_run_has_the_coefficient_of_the_kl_penalty(self, world, fitted, tmp_path):
        words = PLAIN | {"folder": tmp_path, "ckpt.save_steps": 1}
        words |= {"algo.kl.init_coef": 0.02, "algo.kl.target": 1, "algo.kl.horizon": 32}
        run = fitted(**words)
        coefficient = run.trainer.kl_ctl.value
        again = world(**words, **{"ckpt.load_enable": True, "train.num_episodes": 3})
        assert coefficient != again.trainer.kl_ctl.value == 0.02
        again.trainer.init_checkpoint_states()
        assert again.trainer.kl_ctl.value == coefficient

    def test_of_a_plain_run_with_a_reward_that_is_no_number(self, world):
        run = world(**PLAIN, prompts=4, **{"train.num_episodes": 1})
        run.reward = lambda prompt, weights, n: math.nan if (prompt, n) == ("prompt 2", 1) else 0.5
        run.trainer.fit()
        means = {row["prompt"]: row["mean"] for row in read_groups(run.record)}
        assert means.pop(Prompt("prompt 2", "2").id) is None and set(means.values()) == {0.5} and len(means) == 3
        assert run.metrics()[0]["reward/fresh_mean"] is None

    def test_of_rewards_that_a_model_gives(self, world):
        run = world(**PLAIN, prompts=4, **{"train.num_episodes": 1})
        run.reward = lambda *_: None
        run.trainer.experience_maker.reward_model_group = SimpleNamespace(
            async_run_method_batch=lambda sequences, **_: [Ref([torch.full((len(rows),), 0.25) for rows in sequences])]
        )
        run.trainer.fit()
        assert {row["mean"] for row in read_groups(run.record)} == {None} and read_answers(run.record) == []
        assert {row["state"] for row in read_groups(run.record)} == {"fresh"}
        assert run.metrics()[0]["reward/fresh_mean"] == 0.25
