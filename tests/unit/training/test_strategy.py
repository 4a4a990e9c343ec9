"""What OpenRLHF's own saving does with this project's strategy."""

import errno
import math
import os
import stat
from types import SimpleNamespace

import pytest
import torch
from openrlhf.utils import get_strategy
from openrlhf.utils.deepspeed import deepspeed as module
from transformers import LlamaConfig, LlamaForCausalLM

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.record.durable import undeleted
from bapo_openrlhf.training.worker.strategy import Strategy, strategy_of


@pytest.fixture
def strategy(monkeypatch):
    """The strategy of the only rank."""
    monkeypatch.setattr(module, "torch_dist_barrier_and_cuda_sync", lambda: None)
    monkeypatch.setattr(Strategy, "is_rank_0", lambda self: True)
    ds = SimpleNamespace(
        zero_stage=2, tensor_parallel_size=1, param_dtype="bf16", ring_attn_size=1, use_dynamic_batch=False
    )
    made = Strategy.__new__(Strategy)
    made.args, made.stage, made.ds_tensor_parallel_size = SimpleNamespace(ds=ds), 2, 1
    return made


class Engine(module.deepspeed.DeepSpeedEngine):
    """DeepSpeed's class, which only makes the folder, with a file of a MiB."""

    def __init__(self):
        torch.nn.Module.__init__(self)

    def save_checkpoint(self, folder, tag, **_):
        os.makedirs(os.path.join(folder, tag))
        with open(os.path.join(folder, tag, "weights"), "wb") as file:
            file.truncate(2**20)


@pytest.mark.parametrize("limits", [(2, math.inf), (1, math.inf), (9, 2.5 / 1024), (3, 1.5 / 1024)])
@pytest.mark.parametrize("best", [(), (2,), (1, 4), (3, 4, 5)])
def test_the_same_are_deleted_as_by_openrlhf(strategy, tmp_path, monkeypatch, limits, best):
    """And OpenRLHF itself has none left to delete: it would delete the newest one, which has the worst evaluation."""
    monkeypatch.setattr(module.gc, "collect", lambda: None)  # it takes seconds in a process with many modules
    left = {}
    for name, save in (("theirs", module.DeepspeedStrategy.save_ckpt), ("ours", Strategy.save_ckpt)):
        if name == "ours":
            monkeypatch.setattr(module, "shutil", None)
        for step in range(1, 7):
            for tag in [f"global_step{step}", *([f"best_global_step{step}"] if step in best else [])]:
                value = -step if name == "ours" else None
                save(strategy, Engine(), str(tmp_path / name / "_actor"), tag, *limits, metric_value=value)
                os.utime(tmp_path / name / "_actor" / tag, (step, step))
            left[name, step] = sorted(os.listdir(tmp_path / name / "_actor"))
    assert [left["ours", step] for step in range(1, 7)] == [left["theirs", step] for step in range(1, 7)]


def test_an_old_checkpoint_that_cannot_be_deleted_ends_no_run(strategy, tmp_path, monkeypatch):
    """As if a file in it were open elsewhere, on a network's file system."""
    actor, rmdir = tmp_path / "_actor", os.rmdir

    def fail(path, **kwargs):
        if "global_step1" in os.fspath(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        rmdir(path, **kwargs)

    monkeypatch.setattr(os, "rmdir", fail)
    for step in (1, 2, 3):
        strategy.save_ckpt(Engine(), str(actor), f"global_step{step}", max_num=2)
        os.utime(actor / f"global_step{step}", (step, step))
    assert sorted(os.listdir(actor)) == ["global_step2", "global_step3"] and undeleted(tmp_path)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_a_model_has_the_rights_that_the_umask_gives(strategy, tmp_path, umask):
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8
    ))  # fmt: skip
    before = os.umask(umask)
    try:
        strategy.save_model(model, SimpleNamespace(save_pretrained=lambda folder: None), str(tmp_path / "model"))
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "model").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"] == 0o666 & ~umask


def test_it_is_openrlhfs_strategy_of_the_arguments():
    words = "algorithm=bapo_grpo rollout.n_samples_per_prompt=8 actor.model_name_or_path=m reward.remote_url=r.py"
    args = arguments.parse([f"--{word}" for word in words.split()])
    made, theirs = strategy_of(args), get_strategy(args)
    assert type(made) is Strategy and vars(made) == vars(theirs)
