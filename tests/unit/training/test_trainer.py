"""Whole runs of the trainer on the fake stack: which weights generate, what is counted, how a run fails."""

import itertools
import math
import time

import pytest
import ray
import torch
from fake_stack import SOURCES, Ref, by_position, numbers

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.record.run_record import read_warnings
from bapo_openrlhf.training.trainer.rollout import Rollout
from bapo_openrlhf.training.trainer.run_state import message_of
from bapo_openrlhf.training.trainer.trainer import timed


class TestRun:
    @pytest.mark.parametrize(
        ("delay", "again", "evaluation"),
        [(1, 1, 0), (1, 2, 2), (2, 2, 0), (3, 2, 0), (3, 0, 2), (4, 3, 3), (3, 3, 1), (5, 1, 2), (20, 3, 5)],
    )
    def test_every_group_is_of_the_weights_that_algorithm_1_says(self, fitted, delay, again, evaluation):
        words = {"adapt.rollout_delay": delay, "adapt.reevaluate_every": again, "train.num_episodes": 3}
        run = fitted(**words, **{"eval.steps": evaluation or -1}, evaluation=2 if evaluation else 0)
        assert run.trainer.state.step == 12 and len(run.metrics()) == 12
        reevaluated = 0
        for step in range(12):
            fresh, hard = run.of_step(step)
            assert len(fresh) == 4 and {request.weights for request in fresh} == {step - step % delay}
            assert {request.weights for request in hard} <= {step}
            assert not hard or (again and step and step % again == 0)
            reevaluated += len(hard)
        assert bool(reevaluated) == bool(again)
        evaluated = [request for request in run.requests if request.prompt.startswith("eval")]
        due = [step for step in range(1, 13) if evaluation and step % evaluation == 0]
        assert [(request.step, request.weights) for request in evaluated] == [(s, s) for s in due for _ in range(2)]
        # The engines keep weights only where they will be needed.
        assert len(run.noted("keep")) <= 12 // delay + 1
        if delay == 1 or (not evaluation and (not again or again % delay == 0)):
            assert not run.noted("keep", "restore")

    def test_the_numbers_of_ranks_change_nothing(self, fitted):
        """The groups of a batch are seldom a multiple of anything; each model deals them to its own ranks."""
        words = {"algorithm": "ba_ppo", "train.batch_size": 12, "algo.kl.init_coef": 0.02, "rollout.batch_size": 5}
        words |= {"prompts": 24, "rollout.n_samples_per_prompt": 5, "adapt.batch_size": 9}
        names = [f"{model}.num_gpus_per_node" for model in ("actor", "critic", "ref")]
        ranks_of_runs = (1, 1, 1), (3, 2, 1), (2, 1, 3)
        one, *others = (fitted(**words, **dict(zip(names, ranks, strict=True))) for ranks in ranks_of_runs)
        counts = [5 * sum(row[f"groups/{source}"] for source in SOURCES) for row in one.metrics()]
        assert all({count % ranks for count in counts} == set(range(ranks)) for ranks in (2, 3))
        for run in others:
            assert sorted(tokens for _, tokens in run.referred) == sorted(tokens for _, tokens in one.referred)
            for actual, wanted in zip(numbers(run.metrics()), numbers(one.metrics()), strict=True):
                assert actual == pytest.approx(wanted, rel=1e-4, abs=1e-5)
            for (step, actual), (at, wanted) in zip(run.trained, one.trained, strict=True):
                ours, theirs = ([number for row in by_position(batch).values() for part in row for number in part]
                                for batch in (actual, wanted))  # fmt: skip
                assert step == at and ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)

    def test_a_range_of_rewards_is_for_thresholds_and_not_for_advantages(self, world):
        """Rewards from -1 to 3 choose the same groups as rewards from 0 to 1 do, and are trained on as they are."""
        runs = []
        for low, high in ((0, 1), (-1, 3)):
            run = world(**{"adapt.reward_range": [low, high], "algo.advantage.estimator": "group_norm"})
            plain = run.reward
            run.reward = lambda *what, plain=plain, low=low, high=high: low + (high - low) * plain(*what)
            run.trainer.fit()
            runs.append(run)
        unit, wide = runs
        assert any(row["groups/replayed"] for row in unit.metrics())
        for ours, theirs in zip(wide.metrics(), unit.metrics(), strict=True):
            choice = ("groups/", "threshold/", "buffer/", "tokens/", "theory/")
            chosen = [name for name in theirs if name.startswith(choice)]
            assert [ours[name] for name in chosen] == [theirs[name] for name in chosen]
            assert ours["reward/fresh_mean"] == pytest.approx(4 * theirs["reward/fresh_mean"] - 1)
            assert ours["reward/outside_range"] == theirs["reward/outside_range"] == 0
        for (_, ours), (_, theirs) in zip(wide.trained, unit.trained, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert a.rewards.tolist() == (4 * b.rewards - 1).tolist()

    def test_rewards_outside_the_range_are_counted_and_said_once(self, world):
        run = world()
        plain = run.reward
        run.reward = lambda *what: 2 * plain(*what)
        run.trainer.fit()
        for row in run.metrics():
            assert row["reward/outside_range"] == pytest.approx(row["reward/fresh_mean"] / 2)
        (said,) = [row for row in read_warnings(run.record) if row["kind"] == "reward range"]
        assert said["step"] == 1 and "rewards go from 0 to 2, and adapt.reward_range is 0 1. " in said["text"]

    @pytest.mark.parametrize("limit", [0.0, 0.002, 0.003, 1.0])
    def test_weights_come_early_where_the_rollout_policy_is_far(self, fitted, limit):
        """By the distances that the run itself logs: after a step above the limit, and at multiples of v."""
        words = {"adapt.rollout_delay": 6, "adapt.reevaluate_every": 0, "adapt.max_shift_rollout": limit}
        run = fitted(prompts=32, **words)
        held, early = 0, 0
        for step, row in enumerate(run.metrics()):
            assert {request.weights for request in run.requests if request.step == step} == {held}
            assert row["staleness/rollout_policy"] == step - held
            far = held < step and row.get("shift/fresh", 0.0) > limit
            if (step + 1) % 6 == 0 or far:
                early += (step + 1) % 6 != 0
                held = step + 1
        assert (early > 0) is (limit < 1)

    def test_hard_prompts_are_sent_with_fresh_ones_if_no_sync_is_needed(self, fitted):
        # v = 2, m = 3: in step 3 the engines hold older weights, in step 6 today's
        run = fitted(prompts=40, **{"adapt.rollout_delay": 2, "adapt.reevaluate_every": 3, "train.num_episodes": 1})
        rows = run.metrics()
        assert [bool(row["groups/reevaluation_attempts"]) for row in rows] == [n in (3, 6, 9) for n in range(10)]
        assert ["timing/reevaluation" in row for row in rows] == [n in (3, 9) for n in range(10)]
        assert all(row["reevaluation/added_seconds"] >= 0 for row in rows)
        # synced for the hard prompts, the engines keep today's weights where the next rollout needs them
        assert run.noted("sync") == [2, 3, 4, 6, 8, 9, 10] and not run.noted("keep", "restore")

    @pytest.mark.parametrize("again", [0, 5, 6])
    def test_a_method_may_name_prompts_in_any_step(self, world, again):
        """Whatever `--adapt.reevaluate_every` says. The delayed weights come back after each step."""
        flags = {"adapt.rollout_delay": 5, "adapt.reevaluate_every": again, "train.num_episodes": 1}
        run = world(prompts=20, **flags)
        run.trainer.method.reevaluate_every = 1
        run.trainer.fit()
        assert run.noted("sync") == [1, 2, 3, 4, 5] and run.noted("keep") == [0]  # the weights of step 0 come back
        assert run.noted("restore") == [0, 0, 0]  # step 4 is the last one before a sync, so they need not

    @pytest.mark.parametrize("sleep", [False, True])
    def test_engines_sleep_while_the_models_train_and_wake_up_for_other_weights(self, fitted, sleep):
        """Also after hard prompts were generated again with today's weights and the delayed ones came back."""
        flags = {"adapt.rollout_delay": 4, "train.num_episodes": 1, "eval.steps": 3}
        flags |= {"vllm.enable_sleep": True, "train.colocate_all": True} if sleep else {}
        run = fitted(prompts=32, evaluation=2, engines=2, **flags)
        events = [event for event, _ in itertools.groupby(run.events)]  # those of both engines as one
        before = [events[n - 1] for n, (name, _) in enumerate(events) if name in ("keep", "restore", "sync")]
        assert len(before) > 8 and run.noted("restore")
        assert all(event == ("wake_up", ["weights"]) for event in before) is sleep
        assert bool(run.noted("wake_up")) is sleep
        assert run.noted("fit") == [[[] if sleep else ["kv_cache", "weights"]] * 2] * 8

    def test_kl_to_the_behaviour_policy_keeps_its_coefficient(self, world):
        run = world(**{"algo.kl.init_coef": 0.02, "adapt.kl_target": "behaviour"})
        assert run.trainer.kl_ctl.value == 0.02 and run.reference is None


PRETRAINING = {"algorithm": "ba_ppo", "train.num_episodes": 1, "algo.advantage.lambd": 0.9, "adapt.critic_lambd": 0.8}


class TestPretraining:
    """`--adapt.value_pretraining`: the critic trains on all fresh responses before the actor moves."""

    def run(self, world, prompts=16, **words):
        run = world(prompts=prompts, **PRETRAINING, **words)
        run.trainer.fit()
        return run

    def test_of_the_first_step(self, world):
        run = self.run(world, **{"adapt.value_pretraining": 3, "adapt.critic_epochs": 2})
        assert run.updates == {"actor": 4, "critic": 7}
        passes, batches = run.taught[:3], run.taught[3:]
        assert [step for step, _ in passes] == [0, 0, 0] and [step for step, _ in batches] == [0, 1, 2, 3]
        fresh, _ = run.of_step(0)
        wanted = sorted(run.reward(r.prompt, r.weights, n) for r in fresh for n in range(4))
        row = run.metrics()[0]
        assert row["groups/filtered"] > 0 and len(wanted) == 16 > row["rollout/num_samples"]
        for _, experiences in passes:
            rewards = [float(reward) for e in experiences for reward in e.rewards]
            assert sorted(rewards) == wanted
            for e in experiences:
                targets = e.rewards.unsqueeze(-1).expand(e.returns.shape)  # Monte Carlo; both lambdas are below 1
                assert torch.allclose(e.returns[e.action_mask.bool()], targets[e.action_mask.bool()], atol=1e-5)
                assert torch.equal(e.values, e.returns)  # so that the value clip stops nothing
        assert row["value/pretraining_loss"] == 1 / 3  # of the third update
        tokens = [sum(int(e.action_mask.sum()) for e in experiences) for _, experiences in run.taught[:4]]
        assert row["tokens/critic"] == 2 * sum(tokens)

    def test_only_the_values_of_the_batch_change(self, world):
        run, plain = self.run(world, **{"adapt.value_pretraining": 3}), self.run(world)
        assert run.requests == plain.requests
        assert run.noted("sync", "keep", "restore") == plain.noted("sync", "keep", "restore")
        for (step, ours), (at, theirs) in zip(run.trained, plain.trained, strict=True):
            assert step == at
            for e, other in zip(ours, theirs, strict=True):
                assert torch.equal(e.sequences, other.sequences) and torch.equal(e.rewards, other.rewards)
                assert torch.equal(e.action_log_probs, other.action_log_probs)
                critic = torch.sin(e.sequences[:, 1:].float() + step + 3)
                mask = e.action_mask.bool()
                assert torch.equal(e.values[mask], critic[mask]) and not torch.equal(e.values[mask], other.values[mask])
        unlike = ("value/", "advantage/", "timing/", "critic_loss", "tokens/critic", "theory/bound", "clip/")
        for ours, theirs in zip(run.metrics(), plain.metrics(), strict=True):
            for name in theirs:
                assert name.startswith(unlike) or "seconds" in name or ours[name] == theirs[name], name

    def test_goes_on_while_the_actor_is_frozen(self, world):
        words = {"adapt.value_pretraining": 2, "critic.freezing_steps": 1, "adapt.rollout_delay": 1}
        run = self.run(world, **words)
        assert [step for step, _ in run.taught] == [0, 0, 0, 1, 1, 1, 2, 3]  # each ends with the step's batch
        assert run.updates == {"actor": 2, "critic": 8}
        for step in range(4):
            fresh, _ = run.of_step(step)
            assert {request.weights for request in fresh} == {max(step - 2, 0)}
        for step, row in enumerate(run.metrics()):
            assert ("value/pretraining_loss" in row) == (step < 2)
        taught = [len(experiences) for _, experiences in run.taught]
        assert taught[:2] == taught[3:5] == [16, 16]

    def test_measures_no_gap_for_the_batch(self, world):
        """The gap is that of batches, and the filter leaves nothing of this one."""
        run = world(prompts=4, **PRETRAINING, **{"adapt.value_pretraining": 1})
        run.reward = lambda *_: 0.0
        run.trainer.fit()
        (row,) = run.metrics()
        assert "value/pretraining_loss" in row and row["skipped_update"] == 1 and "gap/age" not in row

    def test_leaves_out_what_has_no_log_probs(self, world):
        run = world(prompts=16, **PRETRAINING, **{"adapt.value_pretraining": 1, "adapt.max_failed_share": 1})
        run.spoilt = {5, 6}
        run.trainer.fit()
        (_, experiences), *_ = run.taught
        assert 0 < len(experiences) < 16
        assert all(e.returns.isfinite().all() for e in experiences)


def test_responses_may_have_different_numbers(world):
    """A reward function may give `extra_logs` to some responses. OpenRLHF's balancing would read those of the first."""
    run = world(prompts=8, **{"train.dynamic_batch_enable": True, "train.num_episodes": 1})
    (engine,) = run.engines
    plain = engine.generate_responses

    def generate(**request):
        answers = plain(**request)
        for place, answer in enumerate(answers):
            answer["extra_logs"][f"number {place}"] = float(place)
        return answers

    engine.generate_responses = generate
    run.trainer.fit()
    logged = [name for _, batch in run.trained for one in batch for name in one.info if name.startswith("number")]
    assert logged and len(logged) == sum(len(batch) for _, batch in run.trained)


class TestFailedGroups:
    @pytest.mark.parametrize(
        ("share", "failing", "stops"), [(0.5, 2, False), (0.5, 3, True), (0.0, 0, False), (0.0, 1, True), (1, 4, False)]
    )
    def test_too_many_stop_the_run(self, world, share, failing, stops):
        run = world(prompts=4, **{"adapt.max_failed_share": share, "train.num_episodes": 1})
        names = {f"prompt {n}" for n in range(failing)}
        run.reward = lambda prompt, weights, sample: None if prompt in names else float(sample % 2)
        if not stops:
            run.trainer.fit()
            (row,) = run.metrics()
            assert (row["groups/failed"], row["groups/generated"], row["rollouts/total"]) == (failing, 4, 16)
            assert ("skipped_update" in row) == (row["reward/fresh_mean"] is None) == (failing == 4)
            said = [row["text"] for row in read_warnings(run.record) if row["kind"] == "failed"]
            assert [text.split(" gave")[0] for text in said] == [f"step 1: {failing} of 4 groups"] * bool(failing)
            return
        with pytest.raises(RuntimeError) as error:
            run.trainer.fit()
        text = str(error.value)
        assert text.startswith("step 1, ") and f"{failing} of 4 groups" in text
        assert f"adapt.max_failed_share is {float(share)}" in text
        assert "Failed calls" not in text  # the reward function runs where nobody counts
        assert run.updates["actor"] == 0 and run.metrics() == []

    def test_the_method_is_told_of_those_that_were_asked_again(self, world):
        """In the second step, neither the hard prompts nor the fresh ones get a reward."""
        flags = {"adapt.rollout_delay": 1, "adapt.reevaluate_every": 1, "adapt.max_failed_share": 1}
        run = world(prompts=8, **flags, **{"train.num_episodes": 1})
        run.reward = lambda *_: 0.0 if run.step == 0 else None
        named, told = [], []
        method = run.trainer.method
        begin, unanswered = method.begin_step, method.unanswered
        method.begin_step = lambda step: named.append(begin(step)) or named[-1]
        method.unanswered = lambda prompts: told.append([*prompts]) or unanswered(prompts)
        run.trainer.fit()
        assert told == [[], named[1]] and named[1]

    def test_the_message_says_how_the_calls_of_all_engines_failed(self, world):
        run = world(prompts=4, engines=3)
        calls = [[("timeout", 7)] * 2 + [("raised", 9)], [], [("timeout", 8)] * 3 + [("memory", 7)] * 4]
        for engine, failed in zip(run.reward_failures, calls, strict=True):
            for kind, line in failed:
                engine.add(kind, f"reward_func {kind} it\nand more", f"reward.py:{line}")
        run.reward = lambda *_: None
        with pytest.raises(RuntimeError) as error:
            run.trainer.fit()
        assert "5 x timeout, 1 x raised, 4 x memory" in str(error.value)
        assert str(error.value).endswith("4 of 10: reward_func memory it (reward.py:7)")


class TestEmptyBatch:
    def test_the_update_is_skipped_and_the_step_counts(self, world):
        run = world(prompts=12, **{"train.num_episodes": 1})
        run.reward = lambda *_: 1.0  # all right: no signal
        run.trainer.fit()
        rows = run.metrics()
        assert [row["skipped_update"] for row in rows] == [1, 1, 1]
        assert [row["groups/filtered"] for row in rows] == [4, 4, 4]
        assert run.trainer.state.step == 3 and run.trained == [] and run.updates["actor"] == 0
        assert run.noted("sync") == [0]  # v = 3, before step 3
        (said,) = read_warnings(run.record)
        assert said == {"step": 1, "kind": "skipped", "text": "step 1: the batch is empty, so the update is skipped"}
        assert not any(key.startswith(("tv/", "shift/", "kl/", "gap/", "importance/")) for row in rows for key in row)


class TestCounts:
    @pytest.mark.parametrize(("words", "capacity"), [({}, 4), ({"adapt.batch_size": 6}, 6)])
    def test_a_batch_may_not_be_larger_than_its_capacity(self, world, make_group, words, capacity):
        run = world(**words)
        run.trainer.method.build_batch = lambda *_: Batch(
            fresh=[make_group(1, size=4) for _ in range(capacity - 2)],
            reevaluated=[make_group(1, size=4)],
            replayed=[make_group(1, size=4) for _ in range(2)],
        )
        with pytest.raises(ValueError, match=f"^BAPO .* {4 * capacity + 4} responses; .* {4 * capacity} "):
            run.trainer.train_step([Rollout(0, 0)], 0)
        assert run.trained == []

    def test_a_step_without_a_rollout_trains_on_what_is_stored(self, fitted):
        run = fitted(prompts=8, **{"train.num_episodes": 1})
        assert len(run.trainer.method.replay)
        status, step = run.trainer.train_step([Rollout(2, 2)], 2)
        assert status["groups/generated"] == 0 and math.isnan(status["reward/fresh_mean"]) and step == 3


FAULTS = [
    # what fails, in which step; the step and the phase that the message names
    ("generate", 1, "step 2, generating"),
    ("forward", 1, "step 2, making experience"),
    ("fit", 1, "step 2, training"),
    ("broadcast", 4, "step 4, syncing weights"),  # v = 4, m = 2
    ("broadcast", 2, "step 3, generating hard prompts again"),
    ("keep_weights", 2, "step 3, generating hard prompts again"),
    ("save_checkpoint", 2, "step 2, saving checkpoint global_step2"),
    ("evaluate", 4, "step 4, evaluating"),
]


class TestPhases:
    """A failed run says in which step and doing what."""

    @pytest.mark.parametrize(("what", "step", "says"), FAULTS)
    def test_of_an_error(self, world, what, step, says):
        run = world(evaluation=1, **{"ckpt.save_steps": 2, "adapt.rollout_delay": 4, "eval.steps": 4})
        plain = run.reward

        def reward(prompt, *rest):
            if prompt == "eval 0":
                run.fail_at("evaluate")
            return plain(prompt, *rest)

        run.reward, run.faults[what] = reward, (step, OSError("no more of it"))
        with pytest.raises(RuntimeError, match=f"^{says}: OSError: no more of it$") as error:
            run.trainer.fit()
        assert isinstance(error.value.__cause__, OSError)

    def test_an_engine_that_dies_in_a_sync_is_noticed_although_the_actor_waits(self, world):
        run = world()
        worker = run.groups["actor"].workers[0]

        def broadcast():
            run.engines[0].alive.pending, run.engines[0].alive.error = False, OSError("the engine died")
            return Ref(pending=True)

        worker.broadcast_to_vllm = broadcast
        with pytest.raises(RuntimeError, match="OSError: the engine died"):
            run.trainer.fit()

    @pytest.mark.parametrize("dies", [True, False])
    def test_an_engines_death_is_the_reason_where_the_actor_is_heard_of_first(self, world, dies):
        """Its collective breaks when an engine dies; Ray tells of the death a little later."""

        looks = iter([True])

        class Later(Ref):  # pending when it is first looked at
            pending = property(lambda self: next(looks, not dies), lambda self, value: None)

        run = world(**{"adapt.rollout_delay": 1, "adapt.reevaluate_every": 0})
        run.engines[0].alive = Later(error=OSError("the engine died"))
        ip = {"ip": "127.0.0.1", "pid": 1, "proctitle": "worker"}
        error = ray.exceptions.RayTaskError("fit()", "Traceback: many lines", RuntimeError("reset"), **ip)
        run.groups["actor"].workers[0].broadcast_to_vllm = lambda: Ref(error=error.as_instanceof_cause())
        says = "OSError: the engine died" if dies else "RuntimeError: reset"
        with pytest.raises(RuntimeError, match=f"^step 1, syncing weights: {says}$"):
            run.trainer.fit()


def test_an_error_in_brief():
    assert message_of(ValueError("  adapt.c1 is 2\n")) == "ValueError: adapt.c1 is 2"
    assert message_of(KeyError()) == "KeyError: "


def test_seconds_add_up(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", iter([10.0, 13.0]).__next__)
    timing = {"adapt": 2.0}
    with timed(timing, "adapt"):
        pass
    assert timing == {"adapt": 5.0}
