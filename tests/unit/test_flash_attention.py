"""OpenRLHF imports without flash-attn, and nothing believes afterwards that flash-attn is there."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bapo_openrlhf import flash_attention, machine

STACK = Path(__file__).parents[1] / "stack"  # has weight_digests, which the tests there send to engines
NAMES = ["flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed"]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A process that has imported nothing of OpenRLHF or flash-attn."""
    for name in (*NAMES, flash_attention.IMPORTS_IT, "openrlhf.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # so that it is put back in the end
        monkeypatch.delitem(sys.modules, name)


def test_stand_ins_are_gone_after_the_import(monkeypatch):
    real = ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    with flash_attention.stand_ins():
        padding = importlib.import_module("flash_attn.bert_padding")
        gather = importlib.import_module("flash_attn.utils.distributed").all_gather
    for function in (padding.index_first_axis, padding.pad_input, padding.rearrange, padding.unpad_input, gather):
        with pytest.raises(RuntimeError, match="flash-attn is not installed"):
            function(1, dim=2)
    with pytest.raises(ImportError), flash_attention.stand_ins():
        raise ImportError
    assert sys.modules["flash_attn"] is real and not any(name in sys.modules for name in NAMES[1:])


def test_without_flash_attn_openrlhf_imports():
    flash_attention.set_up()
    module = sys.modules[flash_attention.IMPORTS_IT]
    assert "openrlhf.models" not in sys.modules  # its package is large, and vLLM's processes need none of it
    assert module.get_ring_attn_group() is None  # the module is OpenRLHF's own
    with pytest.raises(RuntimeError, match=r"leave --ds\.packing_samples and --ds\.ring_attn_size out"):
        module.unpad_and_slice_tensor(torch.ones(1, 2), torch.ones(1, 2), None)
    assert not any(name in sys.modules for name in NAMES)
    flash_attention.set_up()
    assert sys.modules[flash_attention.IMPORTS_IT] is module


def test_what_runs_in_an_engine_needs_no_flash_attn():
    """A function that is sent to an engine's process is imported there, and nobody puts stand-ins there."""
    modules = [f"bapo_openrlhf.training.engine.{name}" for name in ("engines", "weight_receipt")]
    names = [*modules, "openrlhf.trainer.ray.utils", "weight_digests"]
    script = f"import sys; sys.modules['flash_attn'] = None; import {', '.join(names)}"
    path = os.pathsep.join([str(STACK), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "BAPO_OPENRLHF_CPU": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr


@pytest.mark.parametrize(("package", "missing"), [("flash_attn_2_cuda", False), ("flash_attn", True)])
def test_with_flash_attn_nothing_changes(monkeypatch, package, missing):
    """FLASH_ATTENTION_SKIP_CUDA_BUILD installs only `flash_attn`, which then fails to import."""
    monkeypatch.setenv("BAPO_OPENRLHF_CPU", "0")
    monkeypatch.setattr(flash_attention, "find_spec", lambda name: name if name == package else None)
    assert flash_attention.is_missing() is missing
    if not missing:
        machine.set_up()
        assert machine.of_workers() == {} and flash_attention.IMPORTS_IT not in sys.modules


@pytest.mark.parametrize(("switch", "asked"), [("0", True), ("1", False)])
def test_only_workers_on_gpus_are_asked_to(monkeypatch, switch, asked):
    monkeypatch.setenv("BAPO_OPENRLHF_CPU", switch)
    monkeypatch.setattr(flash_attention, "is_missing", lambda: True)
    hook = machine.of_workers().get("worker_process_setup_hook", "")
    module, _, function = hook.rpartition(".")
    assert bool(hook) is asked
    assert not hook or getattr(importlib.import_module(module), function) is flash_attention.set_up
