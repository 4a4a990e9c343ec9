"""One run of BAPO-GRPO and one of BA-PPO, each killed with kill -9 after its checkpoint and resumed from there.

A resumed run does the steps after the checkpoint again. Both times they must have the same numbers. The runs have more
features, whose tests are here: BAPO-GRPO has the decoupled ratio, the KL to the behaviour policy, evaluations and, when
it is resumed, the probe of gradients, and a signal in its seventh step, which ends it. BA-PPO has ZeRO-3, verifiers
that fail, a critic of all groups, the group's mean as the other baseline, and a lambda by length.
"""

import json
import math
import re
import signal
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from rotary_workers import noted
from test_faults import AGAIN, DIED, PROBE, assert_nothing_is_left, marked, same_steps
from test_training import catalogued, final_weights
from transformers import AutoModelForCausalLM

from bapo_openrlhf.record.checkpoint_store import CheckpointStore
from bapo_openrlhf.record.run_record import PROBES, read_warnings
from bapo_openrlhf.record.state_file import load_state

pytestmark = pytest.mark.stack

HERE = Path(__file__).parent
MARK = uuid.uuid4().hex  # of the processes of the run whose driver is killed
SHARED = {"adapt__c2": "1/8", "adapt__c3": "7/8"}
# v = 3 and m = 4, and the checkpoint is after 4 steps. It has the weights of step 3, which the engines hold. At step 4
# (from 0), hard prompts are generated and gradients are probed with today's weights. Step 5 has those of step 3 again.
GRPO_SAVED, GRPO_TOLD = 4, 7
GRPO = SHARED | {  # a batch has room for groups that are replayed; an epoch has two steps
    "algorithm": "bapo_grpo", "adapt__batch_size": 16, "adapt__rollout_delay": 3, "adapt__reevaluate_every": 4,
    "adapt__ratio": "decoupled", "adapt__kl_target": "behaviour", "actor__entropy_coef": 0.001,
    "data__max_samples": 16, "train__num_episodes": 4, "ckpt__save_steps": GRPO_SAVED, "eval__steps": GRPO_SAVED,
    "eval__n_samples_per_prompt": 1, "eval__temperature": 1.0,
}  # fmt: skip
PPO_SAVED = 3  # v = 2 and m = 3
PPO = SHARED | {
    "algorithm": "ba_ppo", "adapt__critic_groups": "generated", "adapt__critic_baseline": "group",
    "adapt__length_adaptive_lambd": 0.3, "adapt__rollout_delay": 2, "adapt__reevaluate_every": 3,
    "ckpt__save_steps": PPO_SAVED, "ds__zero_stage": 3, "reward__remote_url": HERE / "faulty_reward.py",
    "verifier__timeout": 3, "verifier__memory_gib": 0.5, "verifier__processes": 2,
}  # fmt: skip


class Run(NamedTuple):
    """A run that was killed and resumed."""

    saved: int  # steps before the checkpoint
    before: list[dict]  # rows of the run that was killed, to the last step that it finished
    rows: list[dict]  # of the whole run, which has the steps after the checkpoint from the resumed one
    output: str  # of both
    folder: Path


def killed_and_resumed(train, name, victim, values, initial=None, told=None, phase="training", **resumed):
    """Kill the victim two steps after the checkpoint, in a phase, and resume with other flags.

    `initial` is for the first part only. In the step `told`, the resumed part gets a SIGTERM.
    """
    initial, saved = initial or {}, values["ckpt__save_steps"]
    values = {"train__full_determinism_enable": True} | values
    more = initial.get("environment", {}) | {"FAULT": f"{victim}/{saved + 2}/{phase}/0.05"}
    first = train(name, *PROBE, status=None, **values | initial | {"environment": more})
    assert first.status != 0
    before = first.metrics[: saved + 2]  # the processes of a driver that is gone may get a step further
    assert len(before) == saved + 2, first.output[-6000:]
    sent = {"environment": {"FAULT": f"driver:SIGTERM/{told - 1}/training/0"}} if told else {}
    status = 128 + signal.SIGTERM if told else 0
    second = train(name, *(PROBE if told else ()), status=status, **resumed, **sent, **values | AGAIN)
    assert f"resuming from global_step{saved}" in second.output
    return Run(saved, before, second.metrics, first.output + second.output, second.folder)


def killed_and_the_same_again(train, *args, **how):
    """`killed_and_resumed`, whose resumed part makes the steps after the checkpoint again, number by number."""
    run = killed_and_resumed(train, *args, **how)
    same_steps(run.rows[: len(run.before)], run.before)
    return run


@pytest.fixture(scope="module")
def grpo(train, workspace):
    """Its driver is killed, so it has its own Ray, which must end as well."""
    values = GRPO | {"eval__dataset": workspace / "data.jsonl"}
    more = {"own_ray": True, "run__gradient_probe": GRPO_SAVED}
    return killed_and_resumed(train, "grpo", "driver", values, marked(MARK), GRPO_TOLD, **more)


@pytest.fixture(scope="module")
def ppo(train):
    return killed_and_resumed(train, "ppo", "critic", PPO)


@pytest.fixture(params=["grpo", "ppo"])
def run(request):
    return request.getfixturevalue(request.param)


def test_the_steps_after_the_checkpoint_are_the_same_again(run):
    """With all that adapts a batch, and although gradients are probed only the second time."""
    rows = run.rows[: len(run.before)]
    same_steps([{name: row[name] for name in row if not name.startswith("probe/")} for row in rows], run.before)
    again = run.before[run.saved :]
    assert all(sum(row[f"groups/{what}"] for row in again) for what in ("fresh", "reevaluation_attempts", "replayed"))
    assert again[0]["staleness/rollout_policy"] == 1  # by the weights in the checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_averaged_weights_go_on_from_the_checkpoint(train, workspace, stage):
    """The model that a run with `--train.enable_ema` leaves is the average, and is equal after a kill and a resume."""
    name = f"averaged_{stage}"
    flags = {"algorithm": "bapo_grpo", "ckpt__save_steps": 2, "data__max_samples": 24, "ds__zero_stage": stage}
    flags |= {"train__enable_ema": True, "train__ema_beta": 0.5, "train__full_determinism_enable": True}
    train(f"{name}_whole", **flags)
    first = train(name, *PROBE, status=None, environment={"FAULT": "actor/2/training/0.05"}, **flags)
    again = train(name, **flags | AGAIN)
    assert first.status != 0 and "resuming from global_step2" in again.output
    wanted, got = (final_weights(workspace / folder / "model") for folder in (f"{name}_whole", name))
    before = final_weights(workspace / "model")
    assert wanted.keys() == got.keys() and all(torch.equal(wanted[part], got[part]) for part in wanted)
    assert any(not torch.equal(weight, before[part]) for part, weight in wanted.items())


def test_rotary_frequencies_are_those_of_transformers(run, workspace):
    """Under stage 2 of the actor, because there is no reference; under stage 3 of actor, critic and reference."""
    wanted = noted(AutoModelForCausalLM.from_pretrained(workspace / "model", dtype=torch.bfloat16))
    (line,) = set(re.findall(r"frequencies: (\[.*\])", run.output))  # both parts of a run say them
    models = {role: model for worker in json.loads(line) for role, model in worker.items()}
    critic_path = any("critic_loss" in row for row in run.rows)
    assert set(models) == ({"actor", "critic", "model"} if critic_path else {"actor"})  # OpenRLHF's name of the last
    for model in models.values():
        ours = {name.split("module.")[-1]: value for name, value in model.items()}
        assert ours == {name: ["torch.float32", value.tolist()] for name, value in wanted.items() if "inv_freq" in name}


def test_a_critic_that_dies_is_named(ppo):
    assert f"step {PPO_SAVED + 3}, training: " in ppo.output and all(text in ppo.output for text in DIED)


def test_bapo_grpo_decoupled_with_kl_to_the_behaviour_policy(grpo):
    """An entropy bonus, and an evaluation between two syncs."""
    rows = grpo.rows
    catalogued(rows, "bapo_grpo")
    assert all("critic_loss" not in row for row in rows)
    trained = [row for row in rows if row["groups/replayed"]]
    assert trained and all(math.isfinite(row["policy_loss"]) and row["kl"] != 0 for row in trained)
    assert any(row["actor_grad_norm"] > 0 for row in rows)
    assert grpo.output.count("Evaluation completed") == 1
    # After the evaluation with the weights of step 4, its rollout has the delayed ones of step 3 again.
    assert [row["staleness/rollout_policy"] for row in rows] == [0, 1, 2, 0, 1, 2, 0]
    # A step that trains no fresh group has no distance of fresh groups.
    distances = [(row["staleness/rollout_policy"], row["tv/fresh"]) for row in rows if "tv/fresh" in row]
    assert max(far for age, far in distances if age == 0) < 0.05 < max(far for age, far in distances if age > 0)
    attempts = [row["groups/reevaluation_attempts"] > 0 for row in rows]
    assert attempts == ["timing/reevaluation" in row for row in rows]
    assert attempts == [step == GRPO_SAVED for step in range(GRPO_TOLD)]
    assert all(row["tv/reevaluated"] < 0.05 for row in rows if row["groups/reevaluated"])


def test_the_checkpoint_of_the_best_evaluation_is_whole(grpo, workspace):
    store = CheckpointStore(workspace / "grpo" / "checkpoints", critic=False)
    best = next(tag for tag in store.tags() if tag.startswith("best"))
    store.check(best)
    assert load_state(store.folder(best))["step"] == int(best.removeprefix("best_global_step"))


def test_a_signal_ends_the_run_when_its_step_is_saved(grpo, workspace):
    found = json.loads((grpo.folder / "run.json").read_text())["ended"]
    assert (found["how"], found["status"]) == ("stopped", 128 + signal.SIGTERM)
    assert found["text"].startswith("stopped by SIGTERM after step 7. It goes on with step 8: bapo-openrlhf train --")
    assert grpo.output.splitlines()[-1] == found["text"]
    CheckpointStore(workspace / "grpo" / "checkpoints", critic=False).check("global_step7")


def test_gradients_are_probed_by_group(grpo):
    rows = [json.loads(line) for line in (grpo.folder / PROBES).read_text().splitlines()]
    (metrics,) = (row for row in grpo.rows if "probe/halves" in row)
    assert {row["step"] for row in rows} == {metrics["step"]} == {GRPO_SAVED + 1}
    for source in ("fresh", "reevaluated", "replayed"):
        assert [row["source"] for row in rows].count(source) == metrics[f"groups/{source}"]
    replayed = [row["tv"] for row in rows if row["source"] == "replayed"]
    assert sum(replayed) / len(replayed) == pytest.approx(metrics["tv/replayed"], abs=1e-6)
    assert any(row["norm"] > 0 for row in rows) and math.isfinite(metrics["probe/halves"])


def test_verifiers_that_fail_cost_their_group_alone(ppo, workspace):
    failing = ["1+1=", "2+2=", "3+3=", "4+4=", "5+5="]
    assert all(f'"input": "{prompt}"' in (workspace / "data.jsonl").read_text() for prompt in failing)
    assert sum(row["groups/failed"] for row in ppo.rows) == len(failing)
    for prompt in failing:
        assert f"no reward, or log-probs that are not finite, for prompt {prompt!r}" in ppo.output
    (warning,) = [row["text"] for row in read_warnings(ppo.folder) if row["kind"] == "failed"]
    assert "and are left out. Failed calls of the reward function" in warning and "faulty_reward.py:" in warning
    for kind in ("took more than 3 s", "no such answer", "Segmentation fault", "more than 0.5 GiB", "nan"):
        assert kind in ppo.output, kind
    assert_nothing_is_left("faulty_reward.py")  # the processes of the reward function


def test_a_driver_that_dies_leaves_no_process(grpo):  # last, because Ray needs a minute
    assert_nothing_is_left(MARK)
