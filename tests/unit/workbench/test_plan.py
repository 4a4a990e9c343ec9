"""What `bapo-openrlhf plan` prints, writes and refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bapo_openrlhf.cli import main, plan
from bapo_openrlhf.record.run_record import GROUPS, RunRecord, begin_run
from bapo_openrlhf.workbench.planning import output
from bapo_openrlhf.workbench.planning.shapes import SHAPES
from bapo_openrlhf.workbench.planning.workload import ALGORITHMS

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "openrlhf", "datasets")
PRESET = ["--config", str(ROOT / "configs" / "ba_ppo_qwen3_4b.yaml")]
NAMES = [method.name for method in ALGORITHMS]


def planned(capsys, *words):
    """The JSON that the command prints."""
    assert main.run(["plan", *PRESET, *words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def entries(result):
    return {(e["model"], e["gpus"], e["method"]): e for e in result["entries"]}


def refused(capsys, *words):
    """The one line on standard error."""
    assert main.run(["plan", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


def test_the_whole_grid(capsys):
    result = planned(capsys, "--actor.model_name_or_path", "org/of-unknown-shape")
    found = entries(result)
    assert set(found) == {(s.name, g, m) for s in SHAPES.values() for g in plan.GPUS for m in NAMES}
    assert result["kind"] == "predicted" and all(c["source"] and c["unit"] for c in result["constants"])
    for entry in found.values():
        assert (entry["step_seconds"] is None) == (entry["fits"] != "fits")
        if entry["seconds"]:
            assert entry["step_seconds"] == pytest.approx(sum(entry["seconds"].values()))
    # The methods differ as they are said to: responses, critic, batch, sends.
    one = {name: found["Qwen3-4B", 8, name] for name in NAMES}
    assert one["DAPO"]["rollouts"] > one["BAPO-GRPO"]["rollouts"] > one["GRPO"]["rollouts"] == one["PPO"]["rollouts"]
    assert one["PPO"]["seconds"]["training"] == pytest.approx(2 * one["GRPO"]["seconds"]["training"])
    assert one["BA-PPO"]["trained_tokens"] < one["PPO"]["trained_tokens"]
    assert (one["GRPO"]["syncs"], one["BAPO-GRPO"]["syncs"]) == (100, 20)
    assert (one["GRPO"]["syncs"], one["BA-PPO"]["syncs"]) == (100, 20)


def test_what_is_asked_for(capsys):
    result = planned(capsys, "--gpus", "16", "8", "8", "--models", "70B", "1.5B", "--gpu", "A100", "--steps", "471")
    assert [m["name"] for m in result["models"]] == ["Llama-3-70B", "Qwen2.5-1.5B"]
    assert sorted({e["gpus"] for e in result["entries"]}) == [8, 16] and result["steps"] == 471
    constants = {c["name"]: c for c in result["constants"]}
    assert constants["peak_flops"]["value"] == 312e12 and "A100" in constants["peak_flops"]["source"]
    assert entries(result)["Qwen2.5-1.5B", 8, "GRPO"]["rollouts"] == 471 * 256 * 8


def test_flags_of_train_and_several_files_count(capsys):
    few = entries(planned(capsys, "--gpus", "8", "--models", "4B"))
    words = ("--gpus", "8", "--models", "4B", "--rollout.batch_size", "64", "--adapt.rollout_delay", "1")
    changed = entries(planned(capsys, *words))
    assert few["Qwen3-4B", 8, "GRPO"]["rollouts"] == 4 * changed["Qwen3-4B", 8, "GRPO"]["rollouts"]
    assert changed["Qwen3-4B", 8, "BA-PPO"]["syncs"] == 100
    over = str(ROOT / "configs" / "methods" / "bapo_without_x2.yaml")
    without = entries(planned(capsys, "--gpus", "8", "--models", "4B", "--config", over))
    assert without["Qwen3-4B", 8, "BA-PPO"]["groups"]["again"] == 0


def test_page(capsys):
    assert main.run(["plan", *PRESET, "--gpus", "8", "1024", "--models", "7B", "70B"]) == 0
    out = capsys.readouterr().out
    first, second, rest = out.split("\n\n", 2)  # a verdict for each model, then the details
    assert first.startswith("Predicted: Qwen2.5-7B with BA-PPO fits on 8 H100 GPUs.")
    assert second.startswith("Predicted: Llama-3-70B with BA-PPO does not fit on 8 H100 GPUs.")
    assert rest.startswith("# Plan: predicted, not measured")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]
    assert ["Llama-3-70B", "8", "4", *["training"] * 5] in rows and ["Qwen2.5-7B", "1024", "1", *["batch"] * 5] in rows
    assert "- training: " in out and "- batch: " in out and "- engine: " not in out
    assert "measured, benchmarks/results/adaptation.md" in out
    (grpo,) = [row for row in rows if row[:3] == ["GRPO", "256", "0"]]
    assert grpo[-2:] == ["204,800", "1.00"]
    heads = [line for line in out.splitlines() if line.startswith("## ")]
    assert sum("Predicted" in head for head in heads) == 4  # each table of times and bytes says so


def test_groups_do_not_depend_on_the_ranks(capsys):
    """1024 ranks with one sample each train on the same groups as 8 ranks."""
    words = ["--gpus", "8", "1024", "--models", "7B", "--train.batch_size", "1024"]
    found = entries(planned(capsys, *words))
    for name in NAMES:
        few, many = (found["Qwen2.5-7B", gpus, name] for gpus in (8, 1024))
        assert few["groups"] == many["groups"] and few["trained_tokens"] == many["trained_tokens"]
        assert many["fits"] == "fits" and many["step_seconds"] < few["step_seconds"]


def test_files(capsys, tmp_path):
    words = ["--gpus", "8", "16", "--models", "1.5B", "70B", "--out", str(tmp_path / "made" / "here")]
    result = planned(capsys, *words)
    folder = tmp_path / "made" / "here"
    assert json.loads((folder / "plan.json").read_text()) == result
    assert result["command"].startswith("bapo-openrlhf plan --config")
    written = (folder / "plan.md").read_text()
    assert written.startswith("\n\n".join([*result["verdicts"], "# Plan: predicted"])) and "](plan.png)" in written
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_picture(capsys, monkeypatch):
    seen = {}
    monkeypatch.setattr(plan, "page", lambda made: seen.update(plan=made) or "")
    assert main.run(["plan", *PRESET, "--gpus", "8", "16", "32", "--models", "1.5B", "70B"]) == 0
    drawn = output.figure(seen["plan"])
    left, right = drawn.concat
    assert [panel.title for panel in drawn.concat] == ["Qwen2.5-1.5B", "Llama-3-70B"]
    assert "predicted" in drawn.title.text
    spec = left.layer[0].to_dict()["encoding"]
    assert spec["x"]["axis"]["title"] == "GPUs (H100)" and spec["y"]["axis"]["title"] == "seconds per step"
    data = left.data.set_index(["algorithm", "gpus"])["seconds"]
    assert list(data.index.unique("algorithm")) == NAMES
    for name in NAMES:
        expected = [seen["plan"].entry("Qwen2.5-1.5B", gpus, name).step_seconds for gpus in (8, 16, 32)]
        assert list(data[name]) == expected
    assert right.data.query("gpus == 8")["seconds"].isna().all()  # 70B does not fit on 8: a gap in each line
    assert len(set(output.COLOURS)) == len(set(output.SHAPES)) == 5 and list(output.NAMES) == NAMES


def test_numbers_have_three_digits():
    assert [output.number(v) for v in (12345.6, 99.96, 1.2345, 0.012345, 0)] == ["12,346", "100", "1.23", "0.0123", "0"]


def test_a_local_model_is_planned_alone(capsys, tmp_path):
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 96, "vocab_size": 128, "model_type": "llama"}  # fmt: skip
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps(sizes))
    actor = ("--actor.model_name_or_path", str(tmp_path / "own"))
    result = planned(capsys, *actor, "--gpus", "8")
    layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    assert result["models"] == [{"name": "own", "parameters": 2 * 128 * 64 + 2 * layer + 64}]
    result = planned(capsys, *actor, "--gpus", "8", "--models", "7B")
    assert [m["name"] for m in result["models"]] == ["Qwen2.5-7B"]


def test_measured(capsys, tmp_path):
    run = tmp_path / "run"
    begin_run(run, {"started": "2026-01-01", "config": {"rollout.max_new_tokens": 100, "data.max_len": 200}})
    record = RunRecord(run)
    group = {"uid": 0, "source": "fresh", "state": "fresh", "responses": 8, "tokens": 160}
    means = (0.0, 0.25, 0.5, 1.0)
    record.append_rows(GROUPS, 1, [group | {"prompt": str(n), "mean": mean} for n, mean in enumerate(means)])
    lengths = {"total_length": 70.0, "response_length": 20.0}
    record.append(1, {"tokens/generated": 640, "rollouts/step": 32} | lengths)
    result = planned(capsys, "--gpus", "8", "--models", "4B", "--measured", str(run))
    constants = {c["name"]: c for c in result["constants"]}
    expected = {"signal_share": 0.5, "hard_share": 0.25, "response_share": 0.2, "prompt_share": 0.5}
    for name, value in expected.items():
        assert constants[name]["value"] == value and constants[name]["source"] == f"measured: {run}"
    assert constants["improved_share"]["source"].startswith("GRPO in the Countdown study")
    assert entries(result)["Qwen3-4B", 8, "DAPO"]["rollouts"] == 100 * 8 * 512


def test_a_record_that_is_none(capsys, tmp_path):
    (tmp_path / "groups.jsonl").write_text("{}\n")
    says = refused(capsys, *PRESET, "--measured", str(tmp_path))
    assert f"measured is {tmp_path}: " in says and "line 1, is not a row of a run" in says


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpus", "8", "0"], "gpus is 0; it must be at least 1"),
        (["--gpus", "many"], "--gpus: invalid int value: 'many'"),
        (["--steps", "-1"], "steps is -1; it must be at least 1"),
        (["--gpu", "V100"], "gpu is 'V100'; it must be one of A100, H100, H200, 4090"),
        (["--models", "7B", "3B"], "models has '3B'; each must be one of 0.6B, 1.5B, 1.7B, 4B, 7B, 8B, 14B, 32B, 70B"),
        (["--measured", "nowhere"], "measured is nowhere; it must be the folder of a run with groups"),
        (["--adapt.rollout_delay", "0"], "adapt.rollout_delay is 0; it must be at least 1"),
        (["--model", "7B"], "--model"),
    ],
)
def test_bad_input(capsys, words, says):
    assert says in refused(capsys, *PRESET, *words)


def test_a_folder_without_sizes(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    says = refused(capsys, *PRESET, "--actor.model_name_or_path", str(tmp_path))
    assert f"actor.model_name_or_path {tmp_path}: config.json has num_attention_heads None" in says


def test_nothing_heavy_is_loaded():
    code = (
        "import sys\nfrom bapo_openrlhf.cli import main\nstatus = main.run(['plan', *sys.argv[1:]])\n"
        f"print('loaded:', [name for name in {HEAVY!r} if name in sys.modules])\nsys.exit(status)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *PRESET], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_the_page_quotes_the_benchmark():
    """Each cell of the two tables of results in docs/plan.md agrees with benchmarks/results/plan.json."""
    result = json.loads((ROOT / "benchmarks" / "results" / "plan.json").read_text())
    text = (ROOT / "docs" / "plan.md").read_text().split("## How good it is")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    arms = {"GRPO": "plain-group", "PPO": "plain-critic", "DAPO": "dapo-group", "BAPO-GRPO": "bapo-group",
            "BA-PPO": "bapo-critic", "BAPO without X2": "bapo_without_x2-group", "BAPO, v = 8": "bapo_v8-group",
            "BAPO without X3": "bapo_without_x3-group", "BAPO, gaussian filter": "bapo_gaussian-group"}  # fmt: skip
    quoted = [row for row in rows if row[0].removesuffix(" (fitted on)") in arms and len(row) == 5]
    assert len(quoted) == len(arms)
    for name, responses, tokens, part, seconds in quoted:
        one = result["arms"][arms[name.removesuffix(" (fitted on)")]]
        for cell, key, digits in (
            (responses, "rollouts", ",.0f"),
            (tokens, "tokens", ",.0f"),
            (seconds, "step", ".2f"),
        ):
            p, m = one["predicted"][key], one["measured"][key]
            assert cell == f"{p:{digits}} / {m:{digits}} ({p / m - 1:+.0%})"
        work = [sum(one[kind][phase] for phase in ("generation", "experience", "training"))
                for kind in ("predicted", "measured")]  # fmt: skip
        assert part == " / ".join(
            f"{one[kind]['generation'] / whole:.0%}"
            for kind, whole in zip(("predicted", "measured"), work, strict=True)
        )
    for name, one in result["paper"].items():
        (row,) = [row for row in rows if row[0] == name and len(row) == 4]
        assert row[1] == f"{one['rollouts_to_grpo']:.2f} / {one['paper_rollouts_to_grpo']:.2f}"
        assert row[2] == f"{one['step_seconds']:.0f} / {one['paper_step_seconds']:.0f}"
        assert row[3] == f"{one['time_to_grpo']:.2f} / {one['paper_time_to_grpo']:.2f}"
