"""benchmarks/gpu.py as far as no GPU is needed: MFU, a run's numbers, the page, errors, what the runs are given."""

import argparse
import importlib.util
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.workbench.planning.constants import DATA_SHEETS, constants_of
from bapo_openrlhf.workbench.planning.shapes import ModelShape, shape_of_folder

FOLDER = Path(__file__).parents[2] / "benchmarks"
# One layer: 4 x (4 + 4 + 4 + 4) + 3 x 4 x 8 = 160 weights in products; the head has 4 x 10.
SMALL = ModelShape("small", 1, 4, 1, 1, 4, 8, 10)
NAMES = {
    "actor.model_name_or_path": "model",
    "critic.model_name_or_path": "model",
    "data.prompt_dataset": "data.jsonl",
    "reward.remote_url": "reward.py",
}


@pytest.fixture(scope="module")
def gpu():
    """The script as a module, with its neighbours importable meanwhile."""
    neighbours = ("steps", "gpu_setting")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        for name in neighbours:
            patch.delitem(sys.modules, name, raising=False)
        spec = importlib.util.spec_from_file_location("benchmark_gpu", FOLDER / "gpu.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
        for name in neighbours:
            del sys.modules[name]


@pytest.fixture
def cards(tmp_path, monkeypatch):
    """Two GPUs, by a stand-in for nvidia-smi that says what the file `used` has, and writes down how it was called."""
    used, called = tmp_path / "used", tmp_path / "called"
    used.write_text("0\n0\n")
    script = tmp_path / "bin" / "nvidia-smi"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/bash\necho "$*" >> {called}\ncase "$1" in\n*memory.used*) cat {used};;\n'
        '*) for i in 1 2; do echo "NVIDIA H100 80GB HBM3, 81559, 570.1"; done;;\nesac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setenv(cpu.SWITCH, "0")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    return used, called


def given(**values):
    plain = {"dry_run": False, "gpus": 1, "prompts": 32, "steps": 14, "tokens": 512}
    return argparse.Namespace(**{**plain, **values})


def row(*, fresh, replayed=0, generated=160, trained, scale=1.0, **timing):
    timing = {f"timing/{name}": scale * seconds for name, seconds in timing.items()}
    groups = {"groups/fresh": fresh, "groups/reevaluated": 0, "groups/replayed": replayed}
    return groups | timing | {"rollouts/step": 16, "tokens/generated": generated, "tokens/trained": trained}


def run(seconds, **others):
    """A run as `numbers` has it."""
    parts = {"generation": 4.0, "reevaluation": 0.0, "adapt": 0.01, "make_experience": 1.0, "ppo_train": 2.0}
    counts = {"responses": 256.0, "response_tokens": 510.4, "samples": 128.0, "generated_per_second": 12345.6}
    rates = {"trained_per_second": 30000.0, "mfu": 0.4, "layer_share": 0.001, "gib": 70.0}
    return {**parts, "broadcast": 0.5, "step_total": seconds, **counts, **rates, **others}


def kinds_of(gpu):
    return {kind.name: kind for kind in gpu.KINDS}


# ── Numbers ──


def test_mfu_by_hand(gpu):
    """A token meets 200 weights: 400 operations, and 4 x 4 for each earlier one, 5 on average of 10: 480."""
    actor = 3 * 2 * 10 * 480  # forward 1, backward 2; 2 samples of 10 tokens
    assert gpu.training_mfu(SMALL, 2, 10, 2.0, 28_800.0, critic=False) == pytest.approx(actor / 57_600) == 0.5
    critic = 3 * 2 * 10 * (2 * 164 + 80)  # a head of one number instead of 10
    both = gpu.training_mfu(SMALL, 2, 10, 2.0, 28_800.0, critic=True)
    assert both == pytest.approx((actor + critic) / 57_600)


@pytest.mark.parametrize(("kind", "tied"), [("Qwen2", True), ("Qwen3", False), ("Llama", False)])
def test_operations_of_a_real_model(gpu, tmp_path, kind, tied):
    """What torch counts in a forward pass."""
    import torch
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
             "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100, "tie_word_embeddings": tied}  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**sizes, attn_implementation="eager")
    config.save_pretrained(tmp_path)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    shape = shape_of_folder("actor.model_name_or_path", tmp_path)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 20, dtype=torch.long), use_cache=False)
    rotary = 2 * 4 * 20  # eager transformers makes the angles by a product, once
    # eager attention sees all 20 tokens, so each has 20 of them, and a pass over twice as many has 20 on average
    assert counter.get_total_flops() - rotary == gpu.pass_flops(shape, 1, 40) / 2


def test_numbers_are_totals_over_totals(gpu):
    """Two steps of unlike size, the second with a re-evaluation: rates are not means of the steps' rates."""
    part = {"generation": 2.0, "make_experience": 1.0, "broadcast": 0.5}
    rows = [
        row(fresh=1, replayed=1, trained=100, ppo_train=1.0, adapt=0.1, step_total=4.6, **part),
        row(fresh=2, generated=320, trained=60, ppo_train=3.0, adapt=0.3, reevaluation=1.0, step_total=7.8, **part),
    ]
    found = gpu.numbers(kinds_of(gpu)["BAPO-GRPO"], rows, SMALL, 1e6)
    assert (found["samples"], found["responses"], found["response_tokens"]) == (16.0, 16.0, 480 / 32)
    assert found["generated_per_second"] == pytest.approx(480 / (4.0 + 1.0))
    tokens = 160 + 32 * 256  # 32 samples, with prompts of 256 tokens
    assert found["trained_per_second"] == pytest.approx(tokens / 4.0)
    operations = 3 * tokens * (400 + 16 * tokens / 32 / 2)
    assert found["mfu"] == pytest.approx(operations / (4.0 * 1e6))
    assert found["layer_share"] == pytest.approx(0.4 / 12.4)
    assert (found["reevaluation"], found["ppo_train"], found["step_total"]) == pytest.approx((0.5, 2.0, 6.2))
    assert gpu.numbers(kinds_of(gpu)["BA-PPO"], rows, SMALL, 1e6)["mfu"] > 1.5 * found["mfu"]


def test_numbers_of_a_run_that_trained_on_nothing(gpu):
    """Steps without an update have no timing of one."""
    rows = [row(fresh=0, trained=0, generation=2.0, adapt=0.1, step_total=2.1)]
    found = gpu.numbers(kinds_of(gpu)["BAPO-GRPO"], rows, SMALL, 1e6)
    assert (found["mfu"], found["trained_per_second"], found["ppo_train"]) == (0.0, 0.0, 0.0)


# ── The page ──


def page(gpu, **values):
    runs = {
        "GRPO, plain OpenRLHF": [run(10.0), run(20.0), run(40.0)],
        "BAPO-GRPO": [run(9.0, mfu=0.3), run(22.0, adapt=0.03), run(20.0, gib=71.26)],
    }
    about = {"model": "Qwen3-1.7B", "prompts": 32, "tokens": 512, "warm_up": 4, "steps": 14, "rounds": 3}
    about |= {"machine": "a machine", "commit": "abc", "command": "python benchmarks/gpu.py", "peak_tflops": 989.0}
    about |= {"runs": runs, "dry_run": False, "left_out": {}, "planned_gib": dict.fromkeys(runs, 54.44)}
    return gpu.markdown(about | values)


def test_page(gpu):
    found = page(gpu)
    assert (
        "| BAPO-GRPO | 20.00 (9.00 to 22.00) | 0.90 (0.50 to 1.10) | 4.000 | 0.000 | 0.010 | 1.000 | 2.000 | 0.500 |"
        in found
    )
    assert "| GRPO, plain OpenRLHF | 20.00 (10.00 to 40.00) | 1 |" in found
    row = "| BAPO-GRPO | 256 | 510 | 128 | 12,346 (12,346 to 12,346) | 30,000 (30,000 to 30,000) |"
    assert f"{row} 40.00 (30.00 to 40.00) | 0.10 (0.10 to 0.10) | 70.0 (70.0 to 71.3) | 54.4 |" in found
    assert "ry run" not in found and "Left out" not in found and "to 989 TFLOP/s" in found
    widths = [{line.count("|") for line in block.splitlines()} for block in found.split("\n\n") if block[0] == "|"]
    assert widths == [{10}, {11}]  # heads, rulers and rows of one table are equally wide


def test_page_says_what_it_is_not(gpu):
    assert "**Dry run: no GPU.**" in page(gpu, dry_run=True)
    assert "do not fit: BA-PPO (`together`)." in page(gpu, left_out={"BA-PPO": "together"})


# ── The machine ──


def test_without_a_gpu_it_says_so(gpu, monkeypatch, capsys):
    monkeypatch.setenv(cpu.SWITCH, "1")
    with pytest.raises(SystemExit) as ended:
        gpu.parse(["--model", "4b"])
    assert ended.value.code == 2
    assert "this machine has no GPU, and a GPU is what is measured; --dry-run" in capsys.readouterr().err
    dry, more = gpu.parse(["--dry-run", "--model", "4b", "--actor.adam.lr", "1e-5"])
    assert (dry.model, dry.rounds, dry.steps, dry.warm_up) == ("tiny", 1, 3, 1)
    assert more == ["--actor.adam.lr", "1e-5"]


def test_too_few_steps(gpu, monkeypatch, capsys):
    monkeypatch.setenv(cpu.SWITCH, "0")
    assert gpu.parse(["--steps", "5"])[0].warm_up == 4
    with pytest.raises(SystemExit):
        gpu.parse(["--steps", "4"])
    assert "--steps is 4; it must be above 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "sheet"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L40S", None),
    ],
)
def test_data_sheet_by_name(gpu, name, sheet):
    if sheet:
        assert gpu.data_sheet(name, None) == sheet
    else:
        with pytest.raises(ConfigError, match=rf"no data sheet for '{name}'.*give --peak-tflops"):
            gpu.data_sheet(name, None)
        assert gpu.data_sheet(name, 756.0) == ("4090" if "4090" in name else "H100")


def test_each_data_sheet_has_a_peak(gpu):
    assert set(gpu.PEAK_TFLOPS) == set(DATA_SHEETS)


def test_memory_is_that_of_the_fullest_gpu_at_its_fullest(gpu, cards):
    used, called = cards
    found = []
    with gpu.watched_memory(found, seconds=0.01):
        for text in ("1024\n2048\n", "512\n10240\n", "3072\n1024\n"):
            before = len(found)
            used.with_suffix(".new").write_text(text)
            used.with_suffix(".new").replace(used)
            while len(found) < before + 2:
                time.sleep(0.01)
    assert max(found) == 10.0 and 2.0 in found and found[-1] == 3.0
    assert set(called.read_text().splitlines()) == {
        "--query-gpu=memory.used --format=csv,noheader,nounits --id=2,5"  # those that the runs see
    }
    length = len(found)
    time.sleep(0.05)
    assert len(found) == length


# ── What the runs are given ──


@pytest.mark.parametrize("dry", [True, False])
def test_flags_are_flags_and_each_base_is_plain(gpu, dry):
    for kind in gpu.KINDS:
        words = gpu.steps.words_of(kind, gpu.flags_of(given(gpus=2, dry_run=dry)) | NAMES)
        args = arguments.parse(words)
        base = kinds_of(gpu)[kind.base]
        assert not arguments.parse(gpu.steps.words_of(base, gpu.flags_of(given()) | NAMES)).adapt.enabled
        assert args.train.colocate_all and args.ds.enable_sleep is args.vllm.enable_sleep is not dry
        assert args.train.batch_size == args.rollout.batch_size * args.rollout.n_samples_per_prompt
        assert args.actor.num_gpus_per_node == args.ref.num_gpus_per_node == args.vllm.num_engines == 2
    assert [kind.algorithm for kind in gpu.KINDS] == ["grpo", "bapo_grpo", "bapo_grpo", "ppo", "ba_ppo"]


def test_what_does_not_fit(gpu):
    """4B takes 16 bytes a parameter, 60 GiB, and on one GPU shares them with no critic."""

    def plans(model, sheet):
        size = constants_of(sheet).gpu_bytes
        words = {kind.name: gpu.steps.words_of(kind, gpu.flags_of(given()) | NAMES) for kind in gpu.KINDS}
        shape = gpu.MODELS[model]
        return {kind.name: gpu.planned(kind, shape, words[kind.name], sheet, size) for kind in gpu.KINDS}

    assert {plan.word for plan in plans("1.7b", "H100").values()} == {"fits"}
    assert {plan.word for plan in plans("4b", "H200").values()} == {"fits"}
    words = {name: plan.word for name, plan in plans("4b", "H100").items()}
    critic = {kind.name for kind in gpu.KINDS if kind.algorithm in ("ppo", "ba_ppo")}
    assert {words[name] for name in critic} == {"together"} and {words[name] for name in words.keys() - critic} == {
        "fits"
    }
    one = plans("1.7b", "H100")
    assert one["BA-PPO"].training - one["BAPO-GRPO"].training == gpu.MODELS["1.7b"].weight_bytes  # of the idle critic


@pytest.mark.parametrize(("model", "published"), [("0.6b", 596_049_920), ("1.7b", 1_720_574_976)])
def test_published_parameter_counts(gpu, model, published):
    assert gpu.MODELS[model].parameters == published


def test_inputs(gpu, tmp_path):
    """The model is of its shape, in bf16; prompts have their length; chances make the shares of groups they should."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shape = replace(gpu.MODELS["tiny"], vocabulary=512)
    flags = gpu.make_inputs(tmp_path, shape, 3000)
    model = AutoModelForCausalLM.from_pretrained(flags["actor.model_name_or_path"])
    assert model.num_parameters() == shape.parameters and model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(flags["actor.model_name_or_path"])
    assert len(tokenizer) == 512 and all(tokenizer.decode([token]) for token in (4, 100, 511))
    rows = [json.loads(line) for line in flags["data.prompt_dataset"].read_text().splitlines()]
    assert len(rows) == 3000 and len({row["input"] for row in rows}) == 3000
    assert {len(tokenizer(row["input"])["input_ids"]) for row in rows[:20]} == {gpu.PROMPT}

    spec = importlib.util.spec_from_file_location("reward", flags["reward.remote_url"])
    reward = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reward)
    groups = np.array(
        [[float(reward.reward_func([f"{row['input']}{n}"], [row["input"]], [row["label"]])["rewards"][0])
          for n in range(8)] for row in rows]
    )  # fmt: skip
    means = groups.mean(axis=1)
    assert set(np.unique(groups)) == {0.0, 1.0}
    # standard errors are 0.009
    assert np.mean((means > 0) & (means < 1)) == pytest.approx(0.46 * 7 / 9, abs=0.03)
    assert np.mean(means <= 1 / 8) == pytest.approx(0.36 + 0.46 * 2 / 9, abs=0.03)


# ── All of it, with the stack's runs left out ──


def test_each_whole_round_is_written(gpu, cards, tmp_path, monkeypatch):
    """The third round fails: the page has the first two."""
    runs = []

    def stand_in(kind, folder, flags, more):
        runs.append((kind.name, flags["train.seed"], more))
        if flags["train.seed"] == 3:
            raise RuntimeError("out of memory")
        new = tmp_path / "used"
        new.write_text("40960\n51200\n")
        new.replace(cards[0])  # at once: it is being read
        time.sleep(0.3)
        timing = {"generation": 2.0, "make_experience": 1.0, "ppo_train": 4.0, "broadcast": 0.5, "step_total": 7.5}
        first = [row(fresh=2, trained=100, scale=100.0, **timing)] * 4
        return first + [row(fresh=2, trained=100, scale=flags["train.seed"], **timing)] * 10

    watched = gpu.watched_memory
    monkeypatch.setattr(gpu, "watched_memory", lambda found: watched(found, seconds=0.02))
    monkeypatch.setattr(gpu.steps, "run", stand_in)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "make_inputs", lambda folder, shape, prompts: NAMES)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--model", "0.6b", "--gpus", "2", "--ds.zero_stage", "2"])
    with pytest.raises(RuntimeError, match="out of memory"):
        gpu.main()
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result["rounds"] == 2 and [name for name, seed, _ in runs[:5]] == list(result["runs"])
    assert [seed for _, seed, _ in runs] == [1] * 5 + [2] * 5 + [3]
    assert all(more == ["--ds.zero_stage", "2"] for *_, more in runs)
    plain = result["runs"]["GRPO, plain OpenRLHF"]
    assert [one["step_total"] for one in plain] == [7.5, 15.0]  # without the first steps
    assert {one["gib"] for one in plain} == {50.0}
    length = 100 / 16 + 256
    operations = 3 * gpu.pass_flops(gpu.MODELS["0.6b"], 16, length)
    assert plain[0]["mfu"] == pytest.approx(operations / (4.0 * 2 * 989e12))  # of both GPUs
    assert result["model"] == "Qwen3-0.6B" and "2 x NVIDIA H100 80GB HBM3, driver 570.1" in result["machine"]
    assert result["command"] == "python benchmarks/gpu.py --model 0.6b --gpus 2 --ds.zero_stage 2"
    assert "the median over 2 rounds" in (tmp_path / "gpu.md").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpus", "1"], "--gpus is 1, and 2 GPUs are visible"),
        (["--gpus", "2", "--vllm.gpu_memory_utilization", "0.01"], "no kind fits with --model 1.7b.*engine"),
    ],
)
def test_what_cannot_be_measured(gpu, cards, monkeypatch, words, says):
    monkeypatch.setattr(gpu, "make_inputs", lambda folder, shape, prompts: NAMES)
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    with pytest.raises(ConfigError, match=says):
        gpu.main()
