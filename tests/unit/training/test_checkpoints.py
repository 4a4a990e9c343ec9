"""Checkpoints of runs on the fake stack, and runs that continue from them."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_stack import CHOOSING, DYNAMIC, SCORED, STATES, Group, World, copied, numbers, trained

from bapo_openrlhf.methods.registry import METHODS, method_class
from bapo_openrlhf.record.checkpoint_store import CheckpointStore
from bapo_openrlhf.record.run_record import read_evaluations, read_warnings
from bapo_openrlhf.training.trainer import checkpoints


def watch_store(run: World) -> None:
    """Note what is asked of the store of checkpoints, among the other events."""
    store = run.trainer.checkpoints.store
    for name in ("begin", "complete", "forget_rotated"):
        method = getattr(store, name)

        def noted(*args: Any, name: str = name, method: Any = method) -> Any:
            run.note(name, args[0] if args else None)
            return method(*args)

        setattr(store, name, noted)


EVALUATED = {"eval.steps": 1, "eval.n_samples_per_prompt": 4, "train.num_episodes": 1}
UNSAVED = EVALUATED | {"ckpt.save_steps": -1}
SAVING = ("begin", "save actor", "save critic", "save_state", "save_weights", "complete", "forget_rotated")


@pytest.fixture
def saving(monkeypatch) -> Callable[[World], list[tuple[str, Any]]]:
    """Runs a world, and returns in which order the parts of its checkpoints are written."""
    save = checkpoints.save_state

    def of(run: World) -> list[tuple[str, Any]]:
        def noted(folder, state, **kwargs):
            run.note("save_state", state["step"])
            return save(folder, state, **kwargs)

        monkeypatch.setattr(checkpoints, "save_state", noted)
        watch_store(run)
        run.trainer.fit()
        return [event for event in run.events if event[0] in SAVING]

    return of


def evaluate_as(run: World, *right: int) -> None:
    """So many of the four responses of an evaluation are right after the first, the second, ... update."""

    def reward(prompt: str, weights: int, sample: int) -> float:
        return float(sample < right[run.updates["actor"] - 1] if prompt.startswith("eval") else sample % 2)

    run.reward = reward


class TestSaving:
    @pytest.mark.parametrize("algorithm", ["bapo_grpo", "ba_ppo"])
    def test_in_this_order(self, world, saving, algorithm):
        words = {"ckpt.save_steps": 2, "train.num_episodes": 1, "adapt.rollout_delay": 4, "adapt.reevaluate_every": 0}
        run = world(algorithm=algorithm, engines=2, **words)
        assert saving(run) == [
            event
            for step in (2, 4)
            for event in (
                ("begin", f"global_step{step}"),
                ("save actor", f"global_step{step}"),
                *([("save critic", f"global_step{step}")] if algorithm == "ba_ppo" else []),
                ("save_state", step),
                *([("save_weights", 0)] if step == 2 else []),  # delayed ones, and of the first of equal engines
                ("complete", f"global_step{step}"),
                ("forget_rotated", None),
            )
        ]
        store = CheckpointStore(run.checkpoints, critic=algorithm == "ba_ppo")
        assert store.newest_whole(pytest.fail) == "global_step4" and store.tags() == ["global_step4", "global_step2"]

    @pytest.mark.parametrize(("changed", "events"), [
        ({"ckpt.save_steps": -1}, []),
        # what OpenRLHF saves without DeepSpeed's is no checkpoint
        ({"ckpt.save_steps": 1, "ckpt.disable_ds": True}, [("save actor", f"global_step{n}") for n in (1, 2)]),
    ])  # fmt: skip
    def test_never(self, world, saving, changed, events):
        run = world(prompts=8, **changed, **{"train.num_episodes": 1})
        assert saving(run) == events and not run.checkpoints.exists()

    def test_best_evaluations(self, world, saving):
        # the second of four evaluations is worse than the first, and the last is as good as the third
        run = world(prompts=16, evaluation=1, **UNSAVED, **{"adapt.rollout_delay": 1})
        evaluate_as(run, 1, 0, 4, 4)
        assert saving(run) == [
            event
            for step in (1, 3)
            for event in (
                ("begin", f"best_global_step{step}"),
                ("save actor", f"best_global_step{step}"),
                ("save_state", step),
                ("complete", f"best_global_step{step}"),
                ("forget_rotated", None),
            )
        ]
        assert run.trainer.checkpoints.store.tags() == ["best_global_step3", "best_global_step1"]
        assert not list(run.checkpoints.glob("*/best_global_step2"))

    def test_the_best_evaluations_checkpoint_has_the_weights_that_the_engines_got_back(self, world, saving):
        run = world(prompts=4, evaluation=1, **UNSAVED, **{"adapt.rollout_delay": 4, "adapt.reevaluate_every": 0})
        evaluate_as(run, 2)
        assert ("save_weights", 0) in saving(run)
        folder = run.checkpoints / "_adapt" / "best_global_step1"
        assert (folder / "rollout_weights_rank0.safetensors").read_text() == "0"
        assert run.noted("sync") == [1] and run.noted("restore") == [0]

    def test_an_evaluation_without_rewards_is_not_the_best(self, world, saving):
        run = world(prompts=4, evaluation=2, **UNSAVED, **{"adapt.max_failed_share": 1})
        run.reward = lambda prompt, weights, sample: None if prompt.startswith("eval") else float(sample % 2)
        assert saving(run) == [] and not run.checkpoints.exists()

    def test_what_is_left_out_of_an_evaluation_is_counted(self, world, saving):
        run = world(prompts=4, evaluation=4, **UNSAVED)
        run.reward = lambda prompt, weights, sample: None if prompt == "eval 0" else float(sample % 2)
        saving(run)
        (row,) = read_evaluations(run.record)
        assert (row["eval_failed"], row["eval_num_samples"]) == (1, 3 * 4)
        assert "1 of 4 groups of the evaluation" in read_warnings(run.record)[0]["text"]
        run = world(prompts=4, evaluation=4, **UNSAVED)
        run.reward = lambda prompt, weights, sample: None if prompt in ("eval 0", "eval 1", "eval 2") else 1.0
        with pytest.raises(RuntimeError, match=r"3 of 4 groups of the evaluation .*adapt.max_failed_share"):
            run.trainer.fit()
        assert not run.checkpoints.exists()

    @pytest.mark.parametrize("key", ["none", "eval_data_pass1", "eval_other_pass1"])
    def test_what_the_best_evaluation_is_measured_by(self, world, saving, key):
        run = world(prompts=4, evaluation=1, **UNSAVED, **{"ckpt.best_metric_key": key})
        evaluate_as(run, 2)
        assert bool(saving(run)) is (key == "eval_data_pass1")


REPEATABLE = {"train.full_determinism_enable": True, "ckpt.save_steps": 1, "ckpt.max_num": 99}


def resumed(
    run: World, folder: Path, tag: str, *, change: Callable[[Path], None] = lambda checkpoints: None, **words: Any
) -> World:
    """The world of a run that goes on from `tag`, up to its trainer. `change` may change the checkpoints before."""
    copied(run, folder, tag)
    change(folder / "checkpoints")
    sizes = {"prompts": len(run.data().dataset), "evaluation": len(run.evaluation or [])}
    again = World(folder, words | {"ckpt.load_enable": True}, **sizes)
    again.reward = run.reward
    assert again.choose_start() == tag
    again.make_trainer()
    return again


def continued(*of_run: Any, **words: Any) -> World:
    """The same, trained to the end."""
    again = resumed(*of_run, **words)
    again.trainer.fit()
    return again


def cases_of_methods_but(named: list[str | None]) -> tuple[dict[str, Any], ...]:
    """A case of each built-in method that is not named."""
    kinds = {name: method_class(name) for name in METHODS if name != "bapo" and name not in named}
    choosing = {"prompts": 16, "adapt.options": "candidates=2"}
    repeated = {"prompts": 8, "train.num_episodes": 4, "adapt.buffer_size": 9}  # the least of bapo_authors_code
    return tuple(
        repeated | {"adapt.method": name} | (choosing if kind.candidates > 1 else {}) for name, kind in kinds.items()
    )


class TestResume:
    CASES = (
        {"prompts": 16},  # the last batch of an epoch is a full one
        {"prompts": 14, "algorithm": "ba_ppo"},  # it is not
        {"prompts": 13, "eval.steps": 2, "evaluation": 2, "adapt.rollout_delay": 4, "adapt.returns": "gae"},
        {"prompts": 12, "algorithm": "ba_ppo", "adapt.returns": "vtrace", "adapt.max_shift_replayed": 1e-3},
        {"prompts": 16, "adapt.rollout_delay": 1, "adapt.filter": "gaussian", "eval.steps": 3, "evaluation": 1},
        {"prompts": 8, "train.num_episodes": 4, "adapt.method": "arpo"},
        {"prompts": 16, "adapt.rollout_delay": 7, "adapt.max_shift_rollout": 0.0},
        {"prompts": 30, "adapt.method": CHOOSING},  # the last step of an epoch chooses 4 of 6 prompts
        {"prompts": 8, "train.num_episodes": 4, "adapt.method": "exgrpo", "adapt.options": "start_above=0"},
        {"prompts": 8, "train.num_episodes": 4, "adapt.method": "rollout_replay", "adapt.options": "warm_up=0"},
        {"prompts": 8, "train.num_episodes": 4, "adapt.method": "ar3po", "adapt.options": "stages=4"},
        {"prompts": 8, "train.num_episodes": 4, "adapt.method": "prompt_replay", "adapt.options": "cooldown=1"},
        # the reference's log-probs of stored responses are stored, and the coefficient, which moves with each update
        {"prompts": 16, "algo.kl.init_coef": 0.02, "algo.kl.target": 1, "algo.kl.horizon": 32},
        {"prompts": 8, "train.num_episodes": 4, "adapt.method": "arpo", "algo.kl.init_coef": 0.02},
        {
            **{"prompts": 16, "algorithm": "ba_ppo", "algo.advantage.lambd": 0.9, "adapt.critic_lambd": 0.8},
            **{"adapt.value_pretraining": 2, "critic.freezing_steps": 2},  # also resumed while the actor is frozen
        },
        {"prompts": 14, "algorithm": "ba_ppo", "adapt.critic_groups": "generated", "adapt.value_pretraining": 1},
        {"prompts": 16, "eval.steps": 3, "evaluation": 1, **SCORED},
        {"prompts": 60, "adapt.batch_size": 10, **DYNAMIC},  # steps have up to four rounds of prompts
        {"prompts": 32, "adapt.partial_rollout_tokens": 1, "adapt.rollout_delay": 2},  # groups are in flight
        {"prompts": 16, "adapt.reuse_gate": 0.5, "train.max_epochs": 2},  # the window of the gate
    )

    REST = cases_of_methods_but([case.get("adapt.method") for case in CASES])

    SLOW = tuple(pytest.param(case, marks=pytest.mark.slow) for case in REST)

    @pytest.mark.parametrize(
        "case", CASES + SLOW, ids=lambda case: " ".join(Path(str(value)).name for value in case.values())
    )
    @pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
    def test_is_the_run_that_was_never_stopped(self, fitted, tmp_path, case, every):
        """From each checkpoint, or from every fourth: one case from the first, fifth, ..., the next from the second."""
        run = fitted(**REPEATABLE, **case)
        words = REPEATABLE | {name: value for name, value in case.items() if name not in ("prompts", "evaluation")}
        tags = sorted(run.trainer.checkpoints.store.tags())
        assert len(tags) >= 6 and any(tag.startswith("best") for tag in tags) == bool(run.evaluation)
        for tag in tags[(self.CASES + self.REST).index(case) % every :: every]:
            again = continued(run, tmp_path / f"from {tag}", tag, **words)
            step = int(tag.rpartition("step")[2])
            wanted = [request for request in run.requests if request.step >= step]
            if run.evaluation:  # the one of that step was before the checkpoint, or is not made up for
                wanted = [r for r in wanted if r.step > step or not r.prompt.startswith("eval")]
            assert again.requests == wanted, tag
            assert trained(again, 0) == trained(run, step)
            assert numbers(again.metrics()) == numbers(run.metrics())
            for name in {"groups.jsonl", "answers.jsonl"} & {path.name for path in run.record.iterdir()}:
                assert (again.record / name).read_text() == (run.record / name).read_text()
            assert again.updates == run.updates and again.engines[0].weights == run.engines[0].weights
            assert again.trainer.kl_ctl.value == run.trainer.kl_ctl.value
            if step < run.trainer.state.step:
                assert repr(again.trainer.checkpoints.state_dict()) == repr(run.trainer.checkpoints.state_dict())

    def test_the_best_evaluation_stays_the_best(self, world, tmp_path):
        """OpenRLHF evaluates a step after it has saved it, and the run goes on from what it saved before."""
        words, right = EVALUATED | REPEATABLE, (1, 4, 2, 0, 3)
        run = world(prompts=20, evaluation=1, **words)
        evaluate_as(run, *right)
        run.trainer.fit()
        best = "best_global_step2"
        assert run.trainer.best_eval_metric_value == 1.0
        assert "best_global_step3" not in run.trainer.checkpoints.store.tags()

        def keep(checkpoints: Path) -> None:
            for part in ("_actor", "_adapt"):
                shutil.copytree(run.checkpoints / part / best, checkpoints / part / best)

        for change, value in (({"change": keep}, 1.0), ({}, 0.75)):
            again = resumed(run, tmp_path / f"again {value}", "global_step2", **change, **words)
            evaluate_as(again, *right)
            again.trainer.fit()
            assert again.trainer.best_eval_metric_value == value
            assert ("best_global_step3" in again.trainer.checkpoints.store.tags()) is (value < 1)

    @pytest.mark.parametrize(("changed", "best"), [
        ({}, False),
        ({"ckpt.best_metric_key": "none"}, False),
        ({"ckpt.best_metric_key": "eval_data_response_length_mean"}, True),
        ({"eval.temperature": 0.9}, True),
    ])  # fmt: skip
    def test_another_evaluation_begins_without_a_best_one(self, world, tmp_path, changed, best):
        """The best one of the checkpoint counts for the same number of the same evaluation only."""
        words, right = EVALUATED | REPEATABLE, (3, 3, 2, 4)
        run = world(prompts=16, evaluation=1, **words)
        evaluate_as(run, *right)
        run.trainer.fit()

        def forget(checkpoints: Path) -> None:
            for saved in checkpoints.glob("*/best*"):
                shutil.rmtree(saved)

        again = resumed(run, tmp_path / "again", "global_step2", change=forget, **words | changed)
        evaluate_as(again, *right)
        watch_store(again)
        again.trainer.fit()
        assert ("best_global_step3" in again.noted("begin")) is best  # step 3 is worse than step 2

    def test_the_best_evaluation_of_a_step_that_was_evaluated_later_stays_the_best(self, world, tmp_path):
        run = world(prompts=4, evaluation=1, **REPEATABLE, **{"train.num_episodes": 1})
        run.trainer.fit()
        words = REPEATABLE | EVALUATED | {"eval.temperature": 0.9}
        again = continued(run, tmp_path / "again", "global_step1", **words)
        last = continued(again, tmp_path / "last", "best_global_step1", **words)
        assert last.trainer.best_eval_metric_value == again.trainer.best_eval_metric_value > -math.inf

    def test_of_one_that_had_ended_trains_nothing(self, fitted, tmp_path):
        run = fitted(prompts=6, **REPEATABLE)
        assert run.noted("load") == []  # the first start is not told to load
        again = continued(run, tmp_path / "again", "global_step4", **REPEATABLE)
        assert again.requests == [] and again.trained == [] and numbers(again.metrics()) == numbers(run.metrics())
        (said,) = [row["text"] for row in read_warnings(again.record) if row["kind"] == "nothing left"]
        assert "step 4" in said and "train.num_episodes" in said
        # more episodes are
        more = continued(run, tmp_path / "more", "global_step4", **REPEATABLE | {"train.num_episodes": 3})
        assert [row["step"] for row in more.metrics()] == [1, 2, 3, 4, 5, 6]

    @pytest.mark.parametrize("changed", [
        {"adapt.rollout_delay": 7},
        {"adapt.reevaluate_every": 0, "adapt.rollout_delay": 2},
        {"adapt.buffer_size": 1, "adapt.c3": "1/2", "adapt.max_shift_fresh": 0.5},
    ])  # fmt: skip
    def test_what_may_change(self, fitted, tmp_path, changed):
        run = fitted(**REPEATABLE)
        for step in (1, 5):
            again = continued(run, tmp_path / f"from {step}", f"global_step{step}", **REPEATABLE | changed)
            rows = again.metrics()
            assert [row["step"] for row in rows] == list(range(1, 9))
            assert numbers(rows[:step]) == numbers(run.metrics()[:step])
            assert all(row["groups/generated"] == sum(row[f"groups/{state}"] for state in STATES) for row in rows)
            assert again.trainer.ledger.counts["generated"] == sum(row["groups/generated"] for row in rows)
            delay = again.args.adapt.rollout_delay
            for at in range(delay * (step // delay + 1), 8):  # from the next sync on as if it had always been so
                assert {request.weights for request in again.of_step(at)[0]} == {at - at % delay}

    def test_groups_in_flight_need_partial_rollouts(self, fitted, tmp_path):
        run = fitted(prompts=16, **REPEATABLE | {"adapt.partial_rollout_tokens": 1})
        (count,) = (row["groups/in_flight"] for row in run.metrics() if row["step"] == 3)
        again = resumed(run, tmp_path / "again", "global_step3", **REPEATABLE)
        with pytest.raises(RuntimeError, match=rf"global_step3 has {count:g} groups .*--adapt.partial_rollout_tokens"):
            again.trainer.fit()
        assert count > 0 and again.requests == []

    def test_an_actor_of_another_step_is_refused(self, fitted, tmp_path):
        run = fitted(**REPEATABLE)
        again = resumed(run, tmp_path / "again", "global_step3", **REPEATABLE)
        again.groups["actor"].workers[0].client_states["global_step"] = 2
        with pytest.raises(RuntimeError, match=r"^step 2, resuming: ValueError: .*global_step3 .* step 3 .* step 2"):
            again.trainer.fit()
        assert again.requests == []


class TestState:
    @pytest.mark.parametrize(("changed", "text"), [
        ({"version": 11}, "format 11"),
        ({"method": {"method": "other", "version": 1}}, "'other'.*'bapo'"),
    ])  # fmt: skip
    def test_of_something_else_is_refused(self, world, changed, text):
        run = world()
        state = run.trainer.checkpoints.state_dict() | {"step": 3} | changed
        with pytest.raises(ValueError, match=text):
            run.trainer.checkpoints.load_state_dict(state)
        assert run.trainer.state.step == 0

    @staticmethod
    def generators(world, saved, now, *, step=4, seed=7):
        """The generators of `now` ranks that resume what other ranks wrote, of which rank r was at [r, 7]."""
        run = world(**{"train.seed": seed})
        run.trainer.checkpoints.workers["actor"] = before = Group(run, "actor", ranks=saved)
        for number, worker in enumerate(before.workers):
            worker.rng = torch.tensor([number, 7])
        state = run.trainer.checkpoints.state_dict() | {"step": step}
        run.trainer.checkpoints.workers["actor"] = ranks = Group(run, "actor", ranks=now)
        run.trainer.checkpoints.load_state_dict(state)
        return [worker.rng.tolist() for worker in ranks.workers]

    def test_ranks_keep_their_generators_and_new_ones_are_seeded_by_rank_and_step(self, world):
        assert [self.generators(world, 3, now) for now in (3, 2)] == [[[0, 7], [1, 7], [2, 7]], [[0, 7], [1, 7]]]
        first = self.generators(world, 1, 3)
        assert first[0] == [0, 7]
        assert self.generators(world, 1, 4)[:3] == first == self.generators(world, 1, 3)
        others = [self.generators(world, 1, 3, step=5), self.generators(world, 1, 3, seed=8)]
        seeds = [tuple(rng) for ranks in (first, *others) for rng in ranks[1:]]
        assert len(set(seeds)) == 6  # no two ranks, steps or runs have the same
