"""What a machine with GPUs must have, with stand-ins for its driver, its nvcc and the installed torch."""

import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest.mock import Mock

import pytest

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch import environment

ROOT = Path(__file__).parents[3]
MODULE = "NVRM version: NVIDIA UNIX {}  {}  Release Build\nGCC version:  gcc 12.3.0\n"
KINDS = ("x86_64 Kernel Module", "Open Kernel Module for x86_64")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(torch, driver, nvcc): what this machine has; None for what it lacks."""
    monkeypatch.delenv("DS_SKIP_CUDA_CHECK", raising=False)

    def set_(torch="2.13.0", driver="580.159.04", nvcc="13.0", kind=KINDS[0]):
        version = Mock(return_value=torch, side_effect=None if torch else PackageNotFoundError)
        monkeypatch.setattr(environment, "version", version)
        monkeypatch.setattr(environment, "DRIVER", tmp_path / "version")
        if driver:
            (tmp_path / "version").write_text(MODULE.format(kind, driver))
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        if nvcc:
            (tmp_path / "bin").mkdir(exist_ok=True)
            (tmp_path / "bin" / "nvcc").write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {nvcc}, V1'\n")
            (tmp_path / "bin" / "nvcc").chmod(0o755)

    return set_


@pytest.mark.parametrize("kind", KINDS)
def test_what_this_machine_has(machine, kind):
    machine(kind=kind)
    assert (environment.driver_here(), environment.nvcc_here()) == ("580.159.04", "13.0")
    assert environment.warnings_of_machine() == [] and "driver 580.159.04, nvcc 13.0" in environment.versions_in_words()


@pytest.mark.parametrize("torch", ["2.13.0", "2.13.0+cpu", None])
def test_a_machine_without_gpus_is_told_what_the_locked_torch_needs(machine, torch):
    machine(torch, driver=None, nvcc=None)
    assert environment.needs() == (580, "13.0") and environment.warnings_of_machine() == []
    lock = (ROOT / "requirements" / "cuda.lock.txt").read_text()
    assert re.search(r"^cuda-toolkit==(\d+\.\d+)", lock, re.M)[1] == environment.LOCKED


@pytest.mark.parametrize(("torch", "driver", "nvcc", "named"), [
    ("2.13.0", "570.86.15", "13.0", ["driver is 570.86.15"]),
    ("2.13.0", "590.1", "13.1", ["nvcc is 13.1"]),
    ("2.13.0", "580.65.06", None, ["nvcc is not found"]),
    ("2.13.0+cu126", "535.1", "12.4", []),  # DeepSpeed takes any nvcc of CUDA 12
    ("2.13.0+cu126", "510.1", "13.0", ["driver is 510.1", "nvcc is 13.0"]),
])  # fmt: skip
def test_warnings(machine, monkeypatch, torch, driver, nvcc, named):
    machine(torch, driver, nvcc)
    warnings = environment.warnings_of_machine()
    assert len(warnings) == len(named) and all(name in text for name, text in zip(named, warnings, strict=True))
    monkeypatch.setenv("DS_SKIP_CUDA_CHECK", "1")
    assert [text for text in warnings if "driver" in text.split(";")[0]] == environment.warnings_of_machine()


def test_which_nvcc_deepspeed_takes(monkeypatch):
    """As its own check has it: another minor version only before CUDA 13."""
    accepted = pytest.importorskip("deepspeed.ops.op_builder.builder").cuda_minor_mismatch_ok
    assert max(accepted) == environment.SAME_MINOR - 1 and {"12.4", "12.6"} <= set(accepted[12])


ALONE = ["--train.colocate_all", "false", "--vllm.enable_sleep", "false", "--ds.enable_sleep", "false"]
AWAKE = ALONE[2:]
AHEAD = ["--train.async_enable", *AWAKE]


@pytest.fixture
def allocator(monkeypatch):
    """allocator(words, on_cpu, VARIABLE=value): check a preset with these flags in this environment."""

    def check(words, on_cpu=False, **variables):
        for name in environment.ALLOCATOR:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(environment.machine, "on_cpu", lambda: on_cpu)
        environment.check_allocator(
            arguments.parse(["--config", str(ROOT / "configs" / "ba_ppo_qwen3_4b.yaml"), *words])
        )

    return check


@pytest.mark.parametrize("name", environment.ALLOCATOR)
@pytest.mark.parametrize(
    ("words", "value"), [([], "expandable_segments:True"), (AWAKE, "max_split_size_mb:64, expandable_segments : true")]
)
def test_expandable_segments_are_refused(allocator, name, words, value):
    with pytest.raises(ConfigError, match=f"^{name} is {value}; .*train.colocate_all"):
        allocator(words, **{name: value})


@pytest.mark.parametrize(("words", "value", "on_cpu"), [
    (ALONE, "expandable_segments:True", False),
    (AHEAD, "expandable_segments:True", False),  # engines with GPUs of their own get their weights by NCCL
    ([], "expandable_segments:False", False),
    ([], "max_split_size_mb:64", False),
    ([], "expandable_segments:True", True),
])  # fmt: skip
def test_expandable_segments_that_do_no_harm(allocator, words, value, on_cpu):
    allocator(words, on_cpu, PYTORCH_CUDA_ALLOC_CONF=value)
