"""What `bapo-openrlhf plan` prints, writes and refuses."""

import json
from pathlib import Path

import pytest

from bapo_openrlhf.cli import main, plan
from bapo_openrlhf.workbench.planning import output
from bapo_openrlhf.workbench.planning.shapes import SHAPES
from bapo_openrlhf.workbench.planning.workload import ALGORITHMS

ROOT = Path(__file__).resolve().parents[3]
PRESET = ["--config", str(ROOT / "configs" / "ba_ppo_qwen3_4b.yaml"), "--ds.zero_stage=3",
          "--vllm.gpu_memory_utilization=0.6"]  # fmt: skip


def planned(capsys, *words):
    """The numbers of the plan that the command makes."""
    with pytest.MonkeyPatch.context() as patch:
        seen = []
        patch.setattr(output, "page", lambda the_plan: seen.append(the_plan) or "")
        assert main.run(["plan", *PRESET, *words]) == 0
    assert capsys.readouterr().err == ""
    [result] = seen
    return result


def counts(plan):
    return {one.name: plan.counts(one) for one in ALGORITHMS}


def test_all_models_if_the_actor_is_of_unknown_shape(capsys):
    result = planned(capsys, "--actor.model_name_or_path", "org/of-unknown-shape")
    assert result.shapes == list(SHAPES.values()) and result.gpus == plan.GPUS


def test_what_is_asked_for(capsys):
    result = planned(capsys, "--gpus", "16", "8", "8", "--models", "70B", "1.5B", "--gpu", "A100", "--steps", "471")
    assert [shape.name for shape in result.shapes] == ["Llama-3-70B", "Qwen2.5-1.5B"]
    assert (result.gpus, result.steps) == ([8, 16], 471)
    constants = {row["name"]: row for row in result.constants.rows()}
    assert constants["gpu_bytes"]["value"] == 80 * 2**30 and "A100" in constants["gpu_bytes"]["source"]
    assert counts(result)["GRPO"]["rollouts"] == 471 * 256 * 8


def test_flags_of_train_and_several_files_count(capsys):
    few = counts(planned(capsys, "--gpus", "8", "--models", "4B"))
    words = ("--gpus", "8", "--models", "4B", "--rollout.batch_size", "64", "--adapt.rollout_delay", "1")
    assert few["GRPO"]["rollouts"] == 4 * counts(planned(capsys, *words))["GRPO"]["rollouts"]
    over = str(ROOT / "configs" / "methods" / "bapo_without_x2.yaml")
    without = counts(planned(capsys, "--gpus", "8", "--models", "4B", "--config", over))
    assert without["BA-PPO"]["again"] == 0 < few["BA-PPO"]["again"]


def test_page(capsys):
    assert main.run(["plan", *PRESET, "--gpus", "8", "1024", "--models", "7B", "70B"]) == 0
    out = capsys.readouterr().out
    first, second, _ = out.split("\n\n", 2)  # a verdict for each model, then the details
    assert "Qwen2.5-7B with BA-PPO fits on 8 H100 GPUs." in first
    assert "Llama-3-70B with BA-PPO does not fit on 8 H100 GPUs." in second
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]
    (head,) = [row for row in rows if row[:3] == ["model", "GPUs", "GPUs per engine"]]
    assert head[3:] == ["GRPO, BAPO-GRPO", "PPO, BA-PPO", "DAPO"]  # each pair needs the same memory
    memory = {tuple(row[:2]): row[2:] for row in rows if len(row) == 6}
    # the engine's 0.6 of 80 GiB, and 2 bytes a parameter of actor and reference, or also of the critic, in 8 parts
    weights = 2 * SHAPES["7B"].parameters / 8 / 2**30
    generating = [cell.split(" / ")[0] for cell in memory["Qwen2.5-7B", "8"][1:]]
    assert generating == [f"{48 + models * weights:.1f}" for models in (2, 3, 1)]
    assert memory["Llama-3-70B", "8"][0] == "4" and memory["Qwen2.5-7B", "8"][0] == "1"
    assert all(cell.endswith(" training") for cell in memory["Llama-3-70B", "8"][1:])
    assert "- training: " in out and "- batch: " in out and "- engine: " not in out and "- fits" not in out
    (grpo,) = [row for row in rows if row[:3] == ["GRPO", "256", "0"]]
    assert grpo[-2:] == ["204,800", "1"] and "is not predicted" not in out
    assert main.run(["plan", *PRESET, "--adapt.method", "exgrpo"]) == 0
    assert "adapt.method is exgrpo; it is not predicted" in capsys.readouterr().out


def test_a_local_model_is_planned_alone(capsys, tmp_path):
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
              "intermediate_size": 96, "vocab_size": 128, "model_type": "llama"}  # fmt: skip
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    actor = ("--actor.model_name_or_path", str(tmp_path / "own"))
    for words, name in (([], "own"), (["--models", "7B"], "Qwen2.5-7B")):
        (shape,) = planned(capsys, *actor, "--gpus", "8", *words).shapes
        assert shape.name == name


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--gpus 8 0", "gpus is 8 0"), ("--gpus many", "gpus is 'many'"), ("--steps -1", "steps is -1"),
        ("--gpu V100", "gpu is 'V100'; it must be one of A100, H100, H200, 4090"),
        ("--models 7B 3B", "models has '3B'"), ("--adapt.rollout_delay 0", "adapt.rollout_delay is 0"),
        ("--model 7B", "--model"),
    ],
)  # fmt: skip
def test_bad_input(capsys, words, says):
    assert main.run(["plan", *PRESET, *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and says in err
