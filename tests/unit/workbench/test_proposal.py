"""The ZeRO stage and the recomputation that a plan proposes: against trying all of them, and against the presets."""

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_planning import CONSTANTS, WORKLOAD, on_gpu, with_flags

from bapo_openrlhf import user_file
from bapo_openrlhf.cli import arguments, main
from bapo_openrlhf.workbench.planning.constants import GIB, constants_of
from bapo_openrlhf.workbench.planning.shapes import SHAPES, shape_of_folder
from bapo_openrlhf.workbench.planning.verdict import RECOMPUTES, STAGE, proposal
from bapo_openrlhf.workbench.planning.workload import Workload

ROOT = Path(__file__).parents[3]
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
        gpu = gpu.with_values("a tenth less", {"reserve_bytes": gpu.reserve_bytes + gpu.gpu_bytes / 10})
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
    kept = fits(stage, False) and not flags["data.max_images_per_prompt"]
    assert result == {STAGE: stage, RECOMPUTES: not kept}


# Qwen3-4B on 8 GPUs, with a critic and a reference: bytes a parameter of a trained model, and of two idle models.
N, LOGITS = 4_022_468_096, 2 * 2**27 + 8 * 2**26
QWEN3 = 2 * (8 * 2560 + 4) + 6 * (4096 + 1024) + 4 * (32 + 8) + 4 * 4096 + 4 * 1024 + 4 * 32 + 8 * 9728
STAGE_1 = ((2 + 2 + 12 / 8 + 2 * 2) * N + 6144 * 36 * QWEN3 + LOGITS) / GIB  # while training
STAGE_3 = 0.6 * 80 + 3 * 2 * N / 8 / GIB  # while generating


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], f"{STAGE_1:.1f} GiB a GPU in the tightest phase with stage 1, and {STAGE_3:.1f} GiB with stage 3"),
        (["--gpu=H200", "--vllm.gpu_memory_utilization=0.7"], "on 8 H200 GPUs (--gpu names another kind): 114.4 GiB"),
        (["--gpu=4090"], None),  # no stage fits
        (["--vllm.gpu_memory_utilization=0.7"], None),  # only stage 3 fits
        (["--ds.zero_stage=2"], None),
        (["--actor.model_name_or_path=org/model"], None),  # the plan does not know it
        ([*(f"--{role}.num_gpus_per_node=1" for role in ("actor", "critic", "ref")), "--vllm.num_engines=1",
          "--actor.model_name_or_path=Qwen/Qwen3-0.6B", "--critic.model_name_or_path=Qwen/Qwen3-0.6B"],
         "2 fits too, and takes less time"),  # one rank
    ],
)  # fmt: skip
def test_check_warns_of_stage_3_if_a_lower_one_fits(capsys, monkeypatch, words, says):
    monkeypatch.chdir(ROOT)  # the preset's reward function is a path in the repository
    config = ["--config", str(CONFIGS / "ba_ppo_qwen3_4b.yaml"), "--prompts=40000", "--ds.zero_stage=3",
              "--vllm.gpu_memory_utilization=0.6", "--actor.gradient_checkpointing_enable=false"]  # fmt: skip
    assert main.run(["check", *config, *words]) == 0
    warning = capsys.readouterr().err
    if says is None:
        assert STAGE not in warning
    else:
        assert f"warning: {STAGE} is 3; " in warning and says in warning
