"""The sentences that a plan begins with: against the memory of `memory.py`, and by trying the flags that they name."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_planning import APART, BA_PPO, CONSTANTS, WORKLOAD, on_gpu, with_flags, workload_from

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.config import flags_of
from bapo_openrlhf.flags.rules import check_values
from bapo_openrlhf.workbench.planning.constants import GIB
from bapo_openrlhf.workbench.planning.shapes import SHAPES
from bapo_openrlhf.workbench.planning.verdict import verdict


def verdict_of(size, gpus, flags=(), workload=WORKLOAD):
    return verdict(SHAPES[size], gpus, with_flags(workload, dict(flags)), CONSTANTS, "H100")


def allowed(flags):
    """Whether `check` takes flags."""
    try:
        check_values(flags_of(with_flags(WORKLOAD, flags).args))
    except ConfigError:
        return False
    return True


def test_what_fits():
    """Of 80 GiB a GPU 6 are kept."""
    used = on_gpu("7B", WORKLOAD)
    faster = on_gpu("7B", with_flags(WORKLOAD, {"actor.gradient_checkpointing_enable": False}))
    text = verdict_of("7B", [8, 16, 1024])
    for part in (
        "Qwen2.5-7B with BA-PPO fits on 8 H100 GPUs. The tightest phase is generation: ",
        f"{used.gib:.1f} GiB, and 6 ",
        f"{74 - used.gib:.1f} GiB (26%) are free",
        f"without --actor.gradient_checkpointing_enable, which is faster: {faster.gib:.1f} GiB",
        "not fit on 1024",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({}, "with --ds.zero_stage 1 and without --actor.gradient_checkpointing_enable"),
        ({"actor.gradient_checkpointing_enable": False}, "with --ds.zero_stage 1"),
        ({"ds.zero_stage": 1}, "without --actor.gradient_checkpointing_enable"),
        ({"ds.zero_stage": 1, "actor.gradient_checkpointing_enable": False}, None),
        ({"ds.zero_stage": 0, "actor.gradient_checkpointing_enable": False}, None),
        ({"ds.grad_accum_dtype": "fp32", "actor.gradient_checkpointing_enable": False}, "with --ds.zero_stage 2"),
    ],
)
def test_what_is_faster(flags, says):
    match = re.search(r"It also fits (.*), which is faster", verdict_of("1.7B", [8], flags))
    assert (match and match[1]) == says


def test_what_does_not_fit():
    used = on_gpu("32B", WORKLOAD).gib
    text = verdict_of("32B", [8, 16])
    assert "Qwen2.5-32B with BA-PPO does not fit on 8 H100 GPUs. The tightest phase is training: " in text
    assert f"{used:.1f} GiB, and 6 " in text and f"{used - 74:.1f} GiB too much" in text
    assert text.endswith("with --ds.adam_offload or on 16 H100 GPUs.")


def test_an_engine_by_hand():
    """Weights and one sequence of 70B in 8 engine GPUs: what 0.2 of 80 GiB less 3 leaves is too little."""
    needed = (2 * 70_553_706_496 + 6144 * 320 * 1024) / 8 / GIB
    text = verdict_of("70B", [32], {"vllm.gpu_memory_utilization": 0.2})
    assert f"The tightest phase is generation: {needed - 13:.1f} GiB a GPU are missing." in text
    assert text.endswith("It would fit with --vllm.gpu_memory_utilization 0.5.")


FULL = {"ds.zero_stage": 2, "vllm.gpu_memory_utilization": 0.8}


@pytest.mark.parametrize(
    ("size", "gpus", "flags", "end"),
    [
        ("7B", 64, {"train.batch_size": 63, "train.micro_batch_size": 1}, "fit with --train.batch_size 64."),
        ("7B", 64, {"train.batch_size": 63, "train.micro_batch_size": 2}, "fit with --train.batch_size 128."),
        ("7B", 8, {"vllm.enable_sleep": False, "ds.enable_sleep": False}, "fit with --ds.enable_sleep."),
        ("8B", 8, {"ds.zero_stage": 1, "vllm.gpu_memory_utilization": 0.3}, "fit with --ds.zero_stage 2."),
        ("1.5B", 8, {"ds.zero_stage": 0, "ds.enable_sleep": False}, "fit with --ds.zero_stage 2."),
        ("4B", 8, FULL, "fit with --ds.zero_stage 3."),
        ("4B", 8, FULL | {"run.gradient_probe": 5}, "fit with --vllm.gpu_memory_utilization 0.5."),  # not stage 3
        ("70B", 8, {}, "or a smaller model."),
        ("70B", 2, {}, "or a smaller model."),
    ],
)
def test_advice(size, gpus, flags, end):
    assert verdict_of(size, [gpus], flags).endswith(end)


@given(
    st.sampled_from(["7B", "14B", "32B", "70B"]),
    st.sampled_from([4, 8, 16, 64]),
    st.fixed_dictionaries({
        "vllm.enable_sleep": st.booleans(), "ds.enable_sleep": st.booleans(), "ds.zero_stage": st.integers(0, 3),
        "actor.gradient_checkpointing_enable": st.booleans(), "train.micro_batch_size": st.sampled_from([1, 8]),
        "vllm.gpu_memory_utilization": st.sampled_from([0.2, 0.6, 0.95]),
        "ds.grad_accum_dtype": st.sampled_from([None, "fp32"]),
    }),
)  # fmt: skip
def test_the_named_flags_are_enough_and_allowed_and_all_are_needed(size, gpus, flags):
    assume(allowed(flags))
    text = verdict_of(size, [gpus], flags)
    match = re.search(r"It would fit with (.*)\.$", text)
    if not match:
        return

    def fits(changes):
        return on_gpu(size, with_flags(WORKLOAD, flags | changes), gpus=gpus).word == "fits"

    named = dict((*part.split(), "")[:2] for part in match[1].split("--") if part)
    changes = {flag: float(value) if "." in value else int(value) if value else True for flag, value in named.items()}
    assert fits(changes) and not fits({}) and allowed(flags | changes)
    fewer = [{key: changes[key] for key in changes if key != flag} for flag in changes]
    assert not any(fits(some) and allowed(flags | some) for some in fewer)


def test_the_configuration_s_own_algorithm_and_number_of_gpus():
    assert (WORKLOAD.algorithm, WORKLOAD.gpus) == (BA_PPO, 8)
    assert (APART.algorithm, APART.gpus) == (BA_PPO, 4)  # a GPU each for actor, critic, reference and engine
    dynamic = {"algo.dynamic_filtering_enable": True}
    expected = {"grpo": ("GRPO", "DAPO"), "ppo": ("PPO", "PPO"), "bapo_grpo": ("BAPO-GRPO", "BAPO-GRPO")}
    for word, names in expected.items():
        result = workload_from("ba_ppo_qwen3_4b.yaml", "--algorithm", word)
        assert (result.algorithm.name, with_flags(result, dynamic).algorithm.name) == names and result.gpus == 8
    assert "fits on 8 H100 GPUs" in verdict_of("7B", [4, 8, 16])  # its own number, not the lowest
    assert "fits on 16 H100 GPUs" in verdict_of("7B", [16, 32])
