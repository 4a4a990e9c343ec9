"""The sentences that a plan begins with, and what it proposes: against `memory.py`, and by trying all flags."""

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_planning import APART, BA_PPO, CONSTANTS, ROOT, WORKLOAD, on_gpu, with_flags, workload_from

from bapo_openrlhf import user_file
from bapo_openrlhf.cli import arguments
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.config import flags_of
from bapo_openrlhf.flags.rules import check_values
from bapo_openrlhf.workbench.planning.constants import GIB, constants_of
from bapo_openrlhf.workbench.planning.shapes import SHAPES, shape_of_folder
from bapo_openrlhf.workbench.planning.verdict import RECOMPUTES, STAGE, proposal, verdict
from bapo_openrlhf.workbench.planning.workload import Workload


def verdict_of(size, gpus, flags=()):
    return verdict(SHAPES[size], gpus, with_flags(WORKLOAD, dict(flags)), CONSTANTS)


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


@pytest.mark.parametrize(("flags", "says"), [
    ({}, "with --ds.zero_stage 1 and without --actor.gradient_checkpointing_enable"),
    ({"actor.gradient_checkpointing_enable": False}, "with --ds.zero_stage 1"),
    ({"ds.zero_stage": 1}, "without --actor.gradient_checkpointing_enable"),
    ({"ds.zero_stage": 1, "actor.gradient_checkpointing_enable": False}, None),
    ({"ds.zero_stage": 0, "actor.gradient_checkpointing_enable": False}, None),
    ({"ds.grad_accum_dtype": "fp32", "actor.gradient_checkpointing_enable": False}, "with --ds.zero_stage 2"),
])  # fmt: skip
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


@pytest.mark.parametrize(("size", "gpus", "flags", "end"), [
    ("7B", 64, {"train.batch_size": 63, "train.micro_batch_size": 1}, "fit with --train.batch_size 64."),
    ("7B", 64, {"train.batch_size": 63, "train.micro_batch_size": 2}, "fit with --train.batch_size 128."),
    ("7B", 8, {"vllm.enable_sleep": False, "ds.enable_sleep": False}, "fit with --ds.enable_sleep."),
    ("8B", 8, {"ds.zero_stage": 1, "vllm.gpu_memory_utilization": 0.3}, "fit with --ds.zero_stage 2."),
    ("1.5B", 8, {"ds.zero_stage": 0, "ds.enable_sleep": False}, "fit with --ds.zero_stage 2."),
    ("4B", 8, FULL, "fit with --ds.zero_stage 3."),
    ("4B", 8, FULL | {"run.gradient_probe": 5}, "fit with --vllm.gpu_memory_utilization 0.5."),  # not stage 3
    ("70B", 8, {}, "or a smaller model."),
    ("70B", 2, {}, "or a smaller model."),
])  # fmt: skip
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
    match = re.search(r"It would fit with (.*)\.$", verdict_of(size, [gpus], flags))
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


CONFIGS = ROOT / "configs"
preset_models = user_file.load("models", ROOT / "tests" / "stack" / "preset_models.py")
PRESETS = sorted(path for path in CONFIGS.glob("*.yaml") if path.stem != "quickstart")


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_presets_have_what_the_plan_proposes(preset, tmp_path):
    """For 8 GPUs of 80 GB, or one of 24. BA-PPO, the fullest, leaves a tenth of each GPU free."""
    args = arguments.parse(["--config", str(preset)])
    preset_models.config_of(args.actor.model_name_or_path).save_pretrained(tmp_path)
    shape, workload = shape_of_folder("actor.model_name_or_path", tmp_path), Workload(args)
    gpu = constants_of("4090" if workload.gpus == 1 else "H100")
    if workload.algorithm.critic:
        gpu = replace(gpu, reserve_bytes=gpu.reserve_bytes + gpu.gpu_bytes / 10)
    configured = {STAGE: args.ds.zero_stage, RECOMPUTES: args.actor.gradient_checkpointing_enable}
    assert workload.gpus in (1, 8) and configured == proposal(shape, workload.gpus, workload, gpu)


@given(
    st.sampled_from(["0.6B", "1.7B", "4B", "8B", "14B", "32B"]),
    st.sampled_from([1, 2, 4, 8, 32]),
    st.booleans(),
    st.fixed_dictionaries({
        "vllm.gpu_memory_utilization": st.sampled_from([0.4, 0.6, 0.8]), "ds.adam_offload": st.booleans(),
        "data.max_images_per_prompt": st.sampled_from([0, 0, 1]), STAGE: st.integers(0, 3), RECOMPUTES: st.booleans(),
        "ds.grad_accum_dtype": st.sampled_from([None, "fp32"]),
    }),
)  # fmt: skip
def test_all_are_tried(size, gpus, critic, flags):
    """The proposal is the first of those that fit, and does not depend on what the configuration has."""
    assume(flags[STAGE] != 1 or not flags["ds.grad_accum_dtype"] or flags["ds.adam_offload"])  # `check` refuses it
    workload = with_flags(WORKLOAD, flags if critic else flags | {"algo.advantage.estimator": "group_norm"})

    def fits(stage, recomputes):
        changed = with_flags(workload, {STAGE: stage, RECOMPUTES: recomputes})
        return on_gpu(size, changed, workload.algorithm, gpus).word == "fits"

    lowest = 2 if flags["ds.grad_accum_dtype"] and not flags["ds.adam_offload"] else 1
    stages = [stage for stage in (1, 2, 3) if stage >= lowest and fits(stage, True)]
    result = proposal(SHAPES[size], gpus, workload, CONSTANTS)
    if not stages:
        assert result is None
        return
    stage = 2 if gpus == 1 else stages[0]
    assert result == {STAGE: stage, RECOMPUTES: not fits(stage, False) or flags["data.max_images_per_prompt"] > 0}
