"""Runs of 2 ranks that are killed, converted with `bapo-openrlhf universal`, and resumed on other numbers of ranks.

The killed run goes a step further than the checkpoint, so the step is made twice: by the old ranks and by the new ones.
What is generated, stored and counted must be equal. What is computed in bf16 must be near, because other ranks take
other samples together.
"""

import functools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from test_faults import AGAIN, PROBE

from bapo_openrlhf.record.state_file import load_state

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SAVED, TWICE = "global_step2", "global_step3"
# A batch of 12 samples can be divided by 1, 2 and 3 ranks. It is one optimizer step, and a micro-batch is one sample.
# So it does not matter for what is logged how ranks divide and shuffle. v = 3: the checkpoint has the rollout weights
# of step 0. m = 2: hard prompts are generated again in the step after the checkpoint, with its weights.
# With such an eps, Adam moves each parameter in proportion to its moments, so rounding stays as small as it is.
ADAM = {"lr": 0.05, "eps": 1.0, "weight_decay": 0.1}
RUN = {
    "rollout__batch_size": 6, "adapt__batch_size": 3, "train__batch_size": 12, "train__micro_batch_size": 1,
    "adapt__rollout_delay": 3, "adapt__reevaluate_every": 2, "adapt__c2": "1/8", "adapt__c3": "7/8",
    "data__max_samples": 24, "ckpt__save_steps": 1, "ckpt__max_num": 4, "actor__num_gpus_per_node": 2,
    "train__full_determinism_enable": True,
    **{f"{model}__adam__{name}": value for model in ("actor", "critic") for name, value in ADAM.items()},
}  # fmt: skip
CRITIC = {"algorithm": "ba_ppo", "critic__num_gpus_per_node": 2}
RUNS = {
    "stage2": CRITIC | {"ds__zero_stage": 2},
    "stage3": CRITIC | {"ds__zero_stage": 3},
    "lora": CRITIC | {"ds__zero_stage": 2, "ds__lora__rank": 8, "ds__lora__alpha": 64},
}
CASES = [("stage2", 1, 3), ("stage3", 3, 1), ("lora", 3, 1)]  # ranks of the actor and of the critic
LOSS_ERROR, CHANGE_ERROR = 0.005, 0.02  # bf16's rounding: of losses and norms, and of the change of parameters


class Killed(NamedTuple):
    """A run that was killed in its fourth step: its checkpoints, its rows, and what the conversion said."""

    folder: Path
    rows: list[dict]
    says: str


@pytest.fixture(scope="module")
def killed(train, workspace):
    """killed(name): the run of this name, made once."""
    return functools.cache(lambda name: kill_and_convert(train, workspace, name))


def kill_and_convert(train, workspace, name):
    environment = {"FAULT": "actor/3/training/0.05"}
    first = train(name, *PROBE, status=None, environment=environment, **RUN | RUNS[name])
    assert first.status != 0 and len(first.metrics) >= 3, first.output[-6000:]
    whole, early = workspace / name / "checkpoints", workspace / f"{name}_early" / "checkpoints"
    shutil.copytree(whole, early, ignore=shutil.ignore_patterns(TWICE))
    shutil.copytree(first.folder, early.parent / "record")
    command = [sys.executable, "-m", "bapo_openrlhf.cli", "universal", str(early)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=workspace)
    assert done.returncode == 0, done.stderr[-6000:]
    return Killed(whole, first.metrics, done.stdout)


class Resumed(NamedTuple):
    """The killed run, its checkpoints after the step that is made twice, and the rows of that step."""

    before: Killed
    folder: Path
    again: dict
    wanted: dict


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]} on {case[1]} and {case[2]}")
def resumed_run(request, killed, train, workspace):
    name, actors, critics = request.param
    before, again = killed(name), f"{name}_{actors}"
    folder = workspace / again / "checkpoints"
    shutil.copytree(workspace / f"{name}_early" / "checkpoints", folder)
    shutil.copytree(workspace / f"{name}_early" / "record", workspace / "runs" / again)
    ranks = {"actor__num_gpus_per_node": actors, "critic__num_gpus_per_node": critics}
    result = train(again, ds__use_universal_ckpt=True, **RUN | RUNS[name] | ranks | AGAIN)
    assert f"resuming from {SAVED}" in result.output
    rows = {row["step"]: row for row in result.metrics}
    assert set(rows) == {1, 2, 3, 4}
    return Resumed(before, folder, rows[3], before.rows[2])


def test_other_ranks_are_told_how(killed, train, workspace):
    assert f"any number of ranks can resume {SAVED}" in killed("stage2").says
    values = RUN | RUNS["stage2"] | AGAIN | {"critic__num_gpus_per_node": 1}
    path = workspace / "stage2_early" / "checkpoints"
    refused = train("refused", status=2, run__name="stage2", ckpt__path=path, **values)
    assert f"is 1, and 2 critic ranks wrote the checkpoint {SAVED}" in refused.output
    assert "add --ds.use_universal_ckpt, or give the old number" in refused.output


def position(folder):
    (file, *_) = sorted((folder / "_actor" / TWICE).glob("*mp_rank_00_model_states.pt"))
    return torch.load(file, weights_only=False)["data_loader_state_dict"]


def assert_same(actual, wanted, path=""):
    assert type(actual) is type(wanted), path
    if isinstance(wanted, (list, tuple)):
        actual, wanted = (dict(enumerate(values)) for values in (actual, wanted))
    if isinstance(wanted, dict):
        assert actual.keys() == wanted.keys(), path
        for name in wanted:
            assert_same(actual[name], wanted[name], f"{path}.{name}")
    else:
        assert np.array_equal(actual, wanted), path


def test_buffers_ledger_and_data_position_are_equal(resumed_run):
    actual, wanted = (load_state(path / "_adapt" / TWICE) for path in (resumed_run.folder, resumed_run.before.folder))
    for name in ("method", "ledger", "step", "weights_version", "rollouts"):
        assert_same(actual[name], wanted[name], name)
    assert wanted["method"] and wanted["weights_version"] == 3
    assert_same(position(resumed_run.folder), position(resumed_run.before.folder), "data")
    rows = resumed_run.again, resumed_run.wanted
    again, once = ({name: value for name, value in row.items() if name.startswith("groups/")} for row in rows)
    assert again == once and resumed_run.wanted["groups/reevaluation_attempts"] and resumed_run.wanted["groups/fresh"]


def test_the_first_losses_are_equal_up_to_rounding(resumed_run):
    for name in ("policy_loss", "critic_loss", "actor_grad_norm", "critic_grad_norm", "kl", "values"):
        assert resumed_run.again[name] == pytest.approx(resumed_run.wanted[name], rel=LOSS_ERROR, abs=1e-4), name


def parameters(folder, model, tag):
    return get_fp32_state_dict_from_zero_checkpoint(str(folder / model), tag)


def test_the_optimizers_go_on(resumed_run):
    """The next optimizer steps change the parameters alike: moments, step count, rate and decay are the old ones."""
    for model in ("_actor", "_critic"):
        start = parameters(resumed_run.before.folder, model, SAVED)
        wanted, actual = (parameters(path, model, TWICE) for path in (resumed_run.before.folder, resumed_run.folder))
        assert actual.keys() == wanted.keys() == start.keys()
        changed = [name for name in start if not torch.equal(start[name], wanted[name])]
        assert changed
        frozen = start.keys() - set(changed)
        assert all(torch.equal(actual[name], start[name]) for name in frozen)  # of LoRA
        for decays in (True, False):  # matrices decay, vectors do not; an adapter has only matrices
            names = [name for name in changed if (start[name].dim() > 1) is decays]
            changes = {name: wanted[name] - start[name] for name in names}
            errors = {name: actual[name] - wanted[name] for name in names}
            assert norm(errors) <= CHANGE_ERROR * norm(changes), (model, decays)


def norm(tensors):
    return sum(float(tensor.detach().norm()) ** 2 for tensor in tensors.values()) ** 0.5
