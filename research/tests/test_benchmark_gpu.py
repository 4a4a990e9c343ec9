"""gpu.py as far as no GPU is needed: planning by seconds, MFU, the page, and runs that are stopped."""

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from bapo_openrlhf import user_file
from bapo_openrlhf.cli import arguments
from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.workbench.planning.constants import DATA_SHEETS, constants_of
from bapo_openrlhf.workbench.planning.shapes import ModelShape, shape_of_folder

FOLDER = Path(__file__).parents[1] / "benchmarks"
# One layer: 4 x (4 + 4 + 4 + 4) + 3 x 4 x 8 = 160 weights in products; the head has 4 x 10.
SMALL = ModelShape("small", 1, 4, 1, 1, 4, 8, 10)
NAMES = {
    "actor.model_name_or_path": "model",
    "critic.model_name_or_path": "model",
    "data.prompt_dataset": "data.jsonl",
    "reward.remote_url": "reward.py",
}


@pytest.fixture(scope="module")
def modules():
    """The scripts as modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        names = ("gpu", "gpu_page", "gpu_run", "gpu_watch", "gpu_setting", "gpu_budget", "gpu_floor", "floor_parts")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture
def gpu(modules):
    return modules.gpu


@pytest.fixture
def page(modules):
    return modules.gpu_page


@pytest.fixture
def cards(tmp_path, monkeypatch):
    """Two GPUs, by a stand-in for nvidia-smi that writes down how it was called."""
    called = tmp_path / "called"
    script = tmp_path / "bin" / "nvidia-smi"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/bash\necho "$*" >> {called}\ncase "$*" in\n*timestamp*) while sleep 0.05; do '
        'for busy in 20 40; do echo "$(date "+%Y/%m/%d %H:%M:%S.%3N"), $busy, 2048"; done; done;;\n'
        '*) for i in 1 2; do echo "NVIDIA H100 80GB HBM3, 81559, 570.1"; done;;\nesac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setenv(cpu.SWITCH, "0")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    return called


def given(**values):
    plain = {"dry_run": False, "gpus": 1, "prompts": 32, "steps": 4, "tokens": 512, "warm_up": 1}
    return argparse.Namespace(**{**plain, **values})


def row(*, seconds, samples, generated=160, trained, **timing):
    timing = {f"timing/{name}": value for name, value in timing.items()}
    counts = {"rollouts/step": 16, "tokens/generated": generated, "tokens/trained": trained}
    return counts | timing | {"seconds": seconds, "responses/trained": samples, "reward/fresh_mean": 0.5}


# ── Numbers ──


def test_mfu_by_hand(page):
    """A token meets 200 weights: 400 operations, and 4 x 4 for each earlier one, 5 on average of 10: 480."""
    actor = 3 * 2 * 10 * 480  # forward 1, backward 2; 2 samples of 10 tokens
    assert page.training_mfu(SMALL, 2, 10, 2.0, 28_800.0, critic=False) == pytest.approx(actor / 57_600) == 0.5
    critic = 3 * 2 * 10 * (2 * 164 + 80)  # a head of one number instead of 10
    both = page.training_mfu(SMALL, 2, 10, 2.0, 28_800.0, critic=True)
    assert both == pytest.approx((actor + critic) / 57_600)


@pytest.mark.parametrize(("kind", "tied"), [("Qwen2", True), ("Qwen3", False), ("Llama", False)])
def test_operations_of_a_real_model(modules, tmp_path, kind, tied):
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
    assert counter.get_total_flops() - rotary == modules.gpu_setting.pass_flops(shape, 1, 40) / 2


def test_numbers_are_totals_over_totals(page):
    """Two steps of unlike size, the second with a re-evaluation: rates are not means of the steps' rates."""
    part = {"generation": 2.0, "make_experience": 1.0, "broadcast": 0.5}
    rows = [
        row(seconds=5.0, samples=16, trained=100, ppo_train=1.0, adapt=0.1, **part),
        row(seconds=8.0, samples=16, generated=320, trained=60, ppo_train=3.0, adapt=0.3, reevaluation=1.0, **part),
    ]
    actual = page.numbers(page.KINDS["bapo_grpo"], rows, SMALL, 1e6)
    assert (actual["samples"], actual["responses"], actual["response_tokens"]) == (16.0, 16.0, 480 / 32)
    assert actual["generated_per_second"] == pytest.approx(480 / (4.0 + 1.0))
    tokens = 160 + 32 * 256  # 32 samples, with prompts of 256 tokens
    assert actual["trained_per_second"] == pytest.approx(tokens / 4.0) and actual["sample_tokens"] == tokens / 32
    assert actual["experience_per_second"] == pytest.approx(tokens / 2.0)
    operations = 3 * tokens * (400 + 16 * tokens / 32 / 2)
    assert actual["mfu"] == pytest.approx(operations / (4.0 * 1e6))
    assert (actual["reevaluation"], actual["ppo_train"], actual["step"], actual["syncs"]) == (0.5, 2.0, 6.5, 1.0)
    assert actual["between"] == pytest.approx(6.5 - (2.0 + 0.5 + 0.2 + 1.0 + 2.0 + 0.5))
    assert page.numbers(page.KINDS["ba_ppo"], rows, SMALL, 1e6)["mfu"] > 1.5 * actual["mfu"]


def test_prompts_of_a_chat_model_have_their_own_length(page):
    one = row(seconds=1.0, samples=4, trained=80) | {"total_length": 50.0, "response_length": 20.0}
    assert page.trained_tokens(one) == 80 + 4 * 30


def test_numbers_of_a_run_that_trained_on_nothing(page):
    """Steps without an update have no timing of one."""
    rows = [row(seconds=2.2, samples=0, trained=0, generation=2.0, adapt=0.1)]
    actual = page.numbers(page.KINDS["bapo_grpo"], rows, SMALL, 1e6)
    assert (actual["mfu"], actual["trained_per_second"], actual["ppo_train"], actual["syncs"]) == (0.0, 0.0, 0.0, 0.0)


def test_steps_that_openrlhf_prints(modules, tmp_path):
    """Colours, a line that Ray prints twice, a number that is none, and a line that is not whole yet."""
    line = "\x1b[36m(PPOTrainer pid=1)\x1b[0m Global step {}: {{'timing/ppo_train': 2.5, 'response_length': 12.0, "
    line += "'total_length': 20.0, 'reward': 0.25, 'kl': nan}}\n"
    log = tmp_path / "log"
    log.write_text(line.format(1) + line.format(1) + "noise\n" + line.format(2) + line.format(3)[:-2])
    first, second = modules.gpu_run.rows_of_openrlhf(log, 64)
    assert (first["step"], second["step"], first["kl"], second["timing/ppo_train"]) == (1, 2, None, 2.5)
    assert first["tokens/generated"] == first["tokens/trained"] == 64 * 12 and first["responses/trained"] == 64
    assert modules.gpu_page.trained_tokens(first) == 64 * 20


# ── Planning by seconds ──


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_steps_that_fit_into_the_seconds(modules):
    Budget, Seconds, Work = modules.gpu_budget.Budget, modules.gpu_budget.Seconds, modules.gpu_budget.Work
    clock, small = Clock(), Work("small", 1e9, 1000.0)
    budget = Budget(320.0, clock)  # 20 of them are kept for the end
    budget.learn(small, Seconds(100.0, 30.0))
    assert budget.left == 300.0 and budget.steps(small, 10, 3) == 6  # 100 + 6 x 30 = 280
    assert budget.steps(small, 4, 3) == 4
    clock.now += 110.0  # 190 are left: 100 + 3 x 30
    assert budget.steps(small, 10, 3) == 3
    clock.now += 1.0
    assert budget.steps(small, 10, 3) == 0
    assert budget.patience(small) == 3 * 130.0 + 60.0
    free = Budget(None, clock)
    assert free.steps(small, 10, 3) == 10 and free.patience(small) == float("inf")


def test_what_was_not_measured_is_expected_by_what_was(modules):
    """By the same run, else by the nearest size in proportion, the slowest of several, else by runs before."""
    Budget, Seconds, Work = modules.gpu_budget.Budget, modules.gpu_budget.Seconds, modules.gpu_budget.Work
    budget = Budget(1000.0, Clock())
    assert budget.expected(Work("any", 2 * 596e6, 131_072.0)) == (131.0, 26.0)
    budget.learn(Work("stage 2", 1e9, 1000.0), Seconds(50.0, 10.0))
    budget.learn(Work("stage 3", 1e9, 1000.0), Seconds(40.0, 20.0))
    budget.learn(Work("large", 1e10, 1000.0), Seconds(90.0, 80.0))
    assert budget.expected(Work("stage 3", 1e9, 1000.0)) == (40.0, 20.0)
    assert budget.expected(Work("with a critic", 2e9, 1000.0)) == (50.0, 40.0)
    assert budget.expected(Work("larger", 2e10, 1000.0)) == (90.0, 160.0)
    budget.learn(Work("stage 3", 1e9, 1000.0), Seconds(20.0, 5.0))
    assert budget.expected(Work("stage 3", 1e9, 1000.0)) == (20.0, 5.0)


# ── The GPU's busy share ──


def test_parts_follow_one_another_until_the_end_of_the_step(modules):
    row = {"end": 100.0, "timing/generation": 4.0, "timing/adapt": 1.0, "timing/make_experience": 2.0,
           "timing/ppo_train": 8.0, "timing/broadcast": 0.5, "timing/step_total": 15.5}  # fmt: skip
    spans = modules.gpu_watch.spans_of(row)
    assert spans["broadcast"] == (99.5, 100.0) and spans["ppo_train"] == (91.5, 99.5)
    assert spans["make_experience"] == (89.5, 91.5) and spans["generation"] == (84.5, 88.5)
    watch, sample = modules.gpu_watch.Watch(gpu=False), modules.gpu_watch.Sample
    watch.samples += [sample(84.0 + second, 0.0 if second < 8 else 0.5, 1.0) for second in range(16)]
    watch.samples += [sample(98.0, 1.0, 1.0), sample(98.2, None, 1.0)]
    busy = watch.busy([row])
    assert busy["generation"] == 0.0 and busy["ppo_train"] == pytest.approx((8 * 0.5 + 1.0) / 9)
    assert busy["reevaluation"] is None and busy["broadcast"] is None


def test_the_gpus_are_looked_at_in_the_background(modules, cards):
    with modules.gpu_watch.Watch(gpu=True) as watch:
        while len(watch.samples) < 4:
            time.sleep(0.01)
    assert {sample.busy for sample in watch.samples} == {0.2, 0.4} and watch.samples[0].gib == 2.0
    assert all(abs(sample.time - time.time()) < 60 for sample in watch.samples)
    assert cards.read_text() == (
        "--query-gpu=timestamp,utilization.gpu,memory.used --format=csv,noheader,nounits --id=2,5 --loop-ms=200\n"
    )


# ── The page ──


def result(**values):
    """BAPO-GRPO in two rounds, OpenRLHF itself in one, and a floor."""
    plain = {
        **{"generation": 4.0, "reevaluation": 0.0, "adapt": 0.01, "make_experience": 1.0, "ppo_train": 2.0},
        **{"broadcast": 0.5, "step": 10.0, "between": 2.49, "responses": 256.0, "response_tokens": 510.4},
        **{"samples": 128.0, "sample_tokens": 766.4, "generated_per_second": 12345.6},
        **{"experience_per_second": 4e4, "trained_per_second": 3e4, "mfu": 0.3, "syncs": 1.0, "rewards": [0.5, 0.5]},
    }
    busy = dict.fromkeys(("generation", "reevaluation", "adapt", "make_experience", "ppo_train", "broadcast"), 0.5)
    shared = {"model": "Qwen3-0.6B", "flags": {}, "chat": False, "measured": 2, "start_seconds": 50.0, "gib": 70.0}
    shared |= {"planned_gib": 54.44, "checkpointing": False, "missing": "", "busy": busy, "rows": []}
    runs = [
        {**shared, "kind": "bapo_grpo", "round": 1, "numbers": plain},
        {**shared, "kind": "bapo_grpo", "round": 2, "numbers": {**plain, "step": 20.0, "mfu": 0.2}},
        {**shared, "kind": "openrlhf_grpo", "round": 1,
         "numbers": {**plain, "generated_per_second": 24691.2, "experience_per_second": 1e4, "broadcast": 0.25}},
    ]  # fmt: skip
    floor = {"generation": 3.0, "forward": 0.5, "training": 1.0, "weights": 0.5, "mfu": 0.6}
    actual = {"prompts": 32, "tokens": 512, "warm_up": 2, "steps": 4, "machine": "a machine", "commit": "abc"}
    actual |= {"command": "python research/benchmarks/gpu.py", "peak_tflops": 989.0, "dry_run": False, "not_run": []}
    return actual | {"runs": runs, "floors": {"Qwen3-0.6B, BAPO-GRPO": floor}} | values


def test_page(page):
    actual = page.markdown(result())
    row = "| Qwen3-0.6B, BAPO-GRPO | 15.00 (10.00 to 20.00) | 4.00 (4.00 to 4.00) |"
    assert (
        row in actual and "| Qwen3-0.6B, OpenRLHF itself, GRPO | 10.00 | 4.00 | 0.00 | 0.01 | 1.00 | 2.00 |" in actual
    )
    assert "| 2 | 256 | 510 | 128 | 24,691 | 40,000 |" not in actual and "| 25.0 (20.0 to 30.0) |" in actual
    assert "| Qwen3-0.6B, OpenRLHF itself, GRPO | 50 | 50 |" in actual  # busy
    # generation: 3 of 4 s; the floor's parts are 5 s together, and a step 10 and 20
    assert "| 3.00 | 0.50 | 1.00 | 0.50 | 60.0 | 0.75 (0.75 to 0.75) | 3.00 (2.00 to 4.00) |" in actual
    # OpenRLHF generates twice as fast, makes experience a quarter as fast, and syncs in half of the time
    ratios = "| 0.50 (0.50 to 0.50) | 4.00 (4.00 to 4.00) | 1.00 (1.00 to 1.00) | 0.50 (0.50 to 0.50) |"
    assert f"| Qwen3-0.6B, BAPO-GRPO {ratios}" in actual
    widths = [{line.count("|") for line in block.splitlines()} for block in actual.split("\n\n") if block[0] == "|"]
    assert all(len(width) == 1 for width in widths) and len(widths) == 6
    assert "ry run" not in actual and "Not run" not in actual and "Stopped" not in actual


def test_aims(page):
    rows = [row[1:] for row in page.aims(result())]
    assert ["MFU of training at least 25 %", "30.0 %", "yes"] in rows
    assert ["MFU of training at least 25 %", "20.0 %", "**no**"] in rows
    assert ["generation at least 0.8 of LLM.generate", "0.75", "**no**"] in rows
    assert ["a step at most 1.2 times its floor", "2.00", "**no**"] in rows
    assert ["in no part slower than OpenRLHF itself", "0.50 (generation)", "**no**"] in rows
    fast = result(
        floors={"Qwen3-0.6B, BAPO-GRPO": {"generation": 4.0, "forward": 2.0, "training": 2.0, "weights": 1.0}}
    )
    assert ["a step at most 1.2 times its floor", "1.11", "yes"] in [row[1:] for row in page.aims(fast)]
    half = result(floors={"Qwen3-0.6B, BAPO-GRPO": {"generation": 4.0}})  # its time was over
    assert not [row for row in page.aims(half) if "floor" in row[1]]


def test_page_says_what_it_is_not(page):
    broken = result(dry_run=True, not_run=[{"label": "BA-PPO", "why": "by the plan it does not fit (together)"}])
    broken["runs"][0]["missing"] = "it ended with status 1: no memory\nTraceback"
    for run in broken["runs"]:
        run["busy"] = dict.fromkeys(run["busy"])
    actual = page.markdown(broken)
    assert "**Dry run: no GPU.**" in actual and "because this machine has no GPU." in actual
    assert "- BA-PPO: by the plan it does not fit (together)" in actual
    assert "- Qwen3-0.6B, BAPO-GRPO: it ended with status 1: no memory\n" in actual


# ── The machine ──


def test_without_a_gpu_it_says_so(gpu, monkeypatch, capsys):
    monkeypatch.setenv(cpu.SWITCH, "1")
    with pytest.raises(SystemExit) as ended:
        gpu.parse(["--models", "4b"])
    assert ended.value.code == 2
    assert "this machine has no GPU, and a GPU is what is measured; --dry-run" in capsys.readouterr().err
    dry, more = gpu.parse(["--dry-run", "--actor.adam.lr", "1e-5"])
    assert (dry.rounds, dry.steps, dry.warm_up, dry.out) == (1, 3, 1, None)
    assert more == ["--actor.adam.lr", "1e-5"] and {entry.model for entry in gpu.entries(dry)} == {"tiny"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--steps", "2"], "--steps is 2; it must be above 2"),
        (["--warm-up", "0"], "--warm-up is 0; it must be at least 1"),
        (["--chat", "nowhere"], "--chat is nowhere; there is no such folder"),
        (["--ds.zero_stage", "1"], "the prepared order sets it; give --models or --kinds too"),
    ],
)
def test_flags_that_are_wrong(gpu, monkeypatch, capsys, words, says):
    monkeypatch.setenv(cpu.SWITCH, "0")
    with pytest.raises(SystemExit):
        gpu.parse(words)
    assert says in capsys.readouterr().err


def test_the_prepared_order(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv(cpu.SWITCH, "0")
    order = [(e.model, e.kind, *e.flags.values()) for e in gpu.entries(gpu.parse(["--chat", str(tmp_path)])[0])]
    assert order[:5] == [
        ("0.6b", "bapo_grpo", 2), ("0.6b", "ba_ppo", 2), ("0.6b", "openrlhf_grpo", 2), ("0.6b", "floor"),
        ("0.6b", "bapo_grpo", 3),
    ]  # fmt: skip
    assert order[5] == ("1.7b", "bapo_grpo", 2) and order[-1] == ("chat", "bapo_grpo", 2)
    some = gpu.entries(gpu.parse(["--models", "4b", "1.7b", "--kinds", "ppo", "floor"])[0])
    assert [(e.model, e.kind) for e in some] == [("4b", "ppo"), ("4b", "floor"), ("1.7b", "ppo"), ("1.7b", "floor")]


def test_the_nccl_that_is_loaded(gpu, monkeypatch):
    """As NCCL's header has it: 10,000 for the major version, 100 for the minor one."""
    library = SimpleNamespace(ncclGetVersion=lambda number: setattr(number._obj, "value", 22_809))
    monkeypatch.setattr(gpu.ctypes, "CDLL", {"libnccl.so.2": library}.get)
    assert gpu.nccl() == "2.28.9"


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


# ── What the runs are given ──


@pytest.mark.parametrize("dry", [True, False])
def test_flags_are_flags(gpu, page, dry):
    for name in page.KINDS:
        words = gpu.words_of(gpu.Entry("0.6b", name), gpu.flags_of(given(gpus=2, dry_run=dry)) | NAMES, [])
        args = arguments.parse(words)
        assert args.train.colocate_all and args.ds.enable_sleep is args.vllm.enable_sleep is not dry
        assert args.train.batch_size == args.rollout.batch_size * args.rollout.n_samples_per_prompt
        assert args.actor.num_gpus_per_node == args.ref.num_gpus_per_node == args.vllm.num_engines == 2
        assert args.adapt.enabled is name.startswith("ba")
        assert (args.algo.advantage.estimator == "gae") is name.endswith("ppo")


def test_openrlhf_itself_gets_no_flag_of_this_project(gpu):
    flags = gpu.flags_of(given()) | NAMES
    more = ["--adapt.c1", "0.2", "--train.seed", "3", "--run.logs", "full", "--critic.adam.lr", "1e-5"]
    words = gpu.words_of(gpu.Entry("0.6b", "openrlhf_grpo"), flags, more)
    assert not [
        word for word in words if word.startswith(("--adapt", "--run", "--verifier", "--critic", "--algorithm"))
    ]
    assert words[-2:] == ["--train.seed", "3"] and "0.2" not in words
    assert "--critic.adam.lr" in gpu.words_of(gpu.Entry("0.6b", "openrlhf_ppo"), flags, more)


def test_what_does_not_fit(gpu, page):
    """4B takes 16 bytes a parameter, 60 GiB, and on one GPU shares them with no critic."""

    def plans(model, sheet):
        size, shape = constants_of(sheet).gpu_bytes, gpu.MODELS[model]
        words = {name: gpu.steps.words_of(kind, gpu.flags_of(given()) | NAMES) for name, kind in page.KINDS.items()}
        return {name: gpu.planned(kind, shape, words[name], sheet, size) for name, kind in page.KINDS.items()}

    assert {plan.word for plan in plans("1.7b", "H100").values()} == {"fits"}
    assert {plan.word for plan in plans("4b", "H200").values()} == {"fits"}
    words = {name: plan.word for name, plan in plans("4b", "H100").items()}
    assert {word for name, word in words.items() if name.endswith("ppo")} == {"together"}
    assert {word for name, word in words.items() if name.endswith("grpo")} == {"fits"}
    one = plans("1.7b", "H100")
    assert one["ba_ppo"].training - one["bapo_grpo"].training == gpu.MODELS["1.7b"].weight_bytes  # of the idle critic


def test_inputs(modules, tmp_path):
    """The model is of its shape, in bf16; prompts have their length; chances make the shares of groups they should."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    setting = modules.gpu_setting
    shape = replace(setting.MODELS["tiny"], vocabulary=512)
    flags = setting.make_inputs(tmp_path, shape, 3000)
    model = AutoModelForCausalLM.from_pretrained(flags["actor.model_name_or_path"])
    assert model.num_parameters() == shape.parameters and model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(flags["actor.model_name_or_path"])
    assert len(tokenizer) == 512 and all(tokenizer.decode([token]) for token in (4, 100, 511))
    rows = [json.loads(line) for line in flags["data.prompt_dataset"].read_text().splitlines()]
    assert len(rows) == 3000 and len({row["input"] for row in rows}) == 3000
    assert {len(tokenizer(row["input"])["input_ids"]) for row in rows[:20]} == {setting.PROMPT}

    reward = user_file.load("reward.remote_url", flags["reward.remote_url"]).reward_func
    groups = np.array(
        [[float(reward([f"{row['input']}{n}"], [row["input"]], [row["label"]])["rewards"][0])
          for n in range(8)] for row in rows]
    )  # fmt: skip
    means = groups.mean(axis=1)
    assert set(np.unique(groups)) == {0.0, 1.0}
    # standard errors are 0.009
    assert np.mean((means > 0) & (means < 1)) == pytest.approx(0.46 * 7 / 9, abs=0.03)
    assert np.mean(means <= 1 / 8) == pytest.approx(0.36 + 0.46 * 2 / 9, abs=0.03)

    written_at = (tmp_path / "model" / "config.json").stat().st_mtime_ns
    assert setting.make_inputs(tmp_path, shape, 8)["data.prompt_dataset"] != flags["data.prompt_dataset"]
    assert (tmp_path / "model" / "config.json").stat().st_mtime_ns == written_at  # the next kind takes the same model


def test_sums_for_a_chat_model(modules, tmp_path):
    flags = modules.gpu_setting.make_chat_inputs(tmp_path, tmp_path / "model", 50)
    rows = [json.loads(line) for line in flags["data.prompt_dataset"].read_text().splitlines()]
    terms = [[int(word.rstrip("?")) for word in row["input"].split() if word.rstrip("?").isdecimal()] for row in rows]
    assert [sum(numbers) for numbers in terms] == [int(row["label"]) for row in rows]
    reward = user_file.load("reward.remote_url", flags["reward.remote_url"]).reward_func
    asked, label = rows[0]["input"], rows[0]["label"]
    answers = [f"It is 1. Answer: {label}", f"Answer: {label}1", "none", f"Answer: {label}.<end>"]
    actual = reward([asked + answer for answer in answers], [asked] * 4, [label] * 4)
    assert actual["rewards"] == [1.0, 0.0, 0.0, 1.0]


# ── The floor ──


def test_the_floor_does_the_work_of_a_step(modules):
    work = {"groups": 3, "size": 2, "prompt": 5, "response": 4, "samples": 7, "micro": 2, "forward_micro": 4,
            "trained": ["actor", "critic"], "passed": ["actor", "critic", "reference"], "syncs": 1}  # fmt: skip
    step = modules.gpu_floor.step_of(work, "cpu")
    assert [(len(ids), lengths) for ids, lengths in step.calls[0]] == [(5, [4, 4])] * 3
    assert len({tuple(ids) for ids, _ in step.calls[0]}) == 3  # or the engine would know a prompt already
    assert [b["sequences"].shape for b in step.train["critic"]] == [(2, 9), (2, 9), (2, 9), (1, 9)]
    assert [b["action_mask"].shape for b in step.forward["reference"]] == [(4, 4), (3, 4)]
    assert set(step.train) == {"actor", "critic"} and step.syncs == 1


def test_equal_work_of_the_floor_is_timed_once(modules):
    """Two runs that differ only in the samples that they train on: one generation, and two trainings."""
    work = {"groups": 3, "size": 2, "prompt": 5, "response": 4, "samples": 7, "micro": 2, "forward_micro": 4,
            "trained": ["actor"], "passed": ["actor"], "syncs": 1}  # fmt: skip
    done, rows = [], []
    floor = SimpleNamespace(device="cpu", llm=SimpleNamespace(reset_prefix_cache=lambda: done.append("reset")))
    for name in ("generate", "forward", "train", "copy"):
        setattr(floor, name, lambda step, name=name: done.append(name))
    for name in ("make", "wake"):
        setattr(floor, name, lambda name=name: done.append(name))
    floor.timed = lambda part, step: part(step) or float(len(done))
    modules.gpu_floor.measure(floor, {"a": work, "b": {**work, "samples": 3}}, rows.append)
    assert done == [
        "generate", "reset", "generate", "make", *["forward"] * 4, *["train"] * 4, "wake", "copy", "copy"
    ]  # fmt: skip
    parts = ("generation", "forward", "training", "weights")
    assert [list(row) for row in rows] == [["run", part] for part in parts for _ in range(2)]
    assert rows[0]["generation"] == rows[1]["generation"] and rows[4]["training"] != rows[5]["training"]


# ── Runs that end early, and all of it with a stand-in for the stack ──

STEPS = """
import json, sys, time
from pathlib import Path
words = sys.argv[1:]
folder = Path(words[words.index("--run.dir") + 1]) / "run"
folder.mkdir(parents=True)
steps, delay, end = int(words[words.index("--data.max_samples") + 1]) // 8, {delay}, {end!r}
parts = dict(generation=0.02, adapt=0.0, make_experience=0.01, ppo_train=0.04, broadcast=0.01)
row = {{f"timing/{{name}}": value for name, value in parts.items()}}
row |= {{"rollouts/step": 64, "tokens/generated": 64 * 16, "tokens/trained": 16 * 16, "responses/trained": 16}}
with (folder / "metrics.jsonl").open("w", buffering=1) as file:
    for step in range(1, steps + 1):
        time.sleep(delay)
        if end == "dies" and step == 3:
            sys.exit("out of memory")
        if end == "hangs" and step == 3:
            time.sleep(600)
        file.write(json.dumps({{"step": step, **row}}) + "\\n")
"""


@pytest.fixture
def stand_in(gpu, modules, monkeypatch, tmp_path):
    """Replaces the stack by a script that writes steps; returns the words with which the benchmark is to be called."""
    results, work = tmp_path / "results", tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def use(delay=0.05, end="", **flags):
        script = tmp_path / "stack.py"
        script.write_text(STEPS.format(delay=delay, end=end))
        monkeypatch.setattr(gpu, "shared_ray", lambda devices, runs: contextlib.nullcontext({}))
        monkeypatch.setattr(gpu.cpu, "forked_processes", contextlib.nullcontext)
        monkeypatch.setattr(gpu, "program_of", lambda kind: [str(script)])
        monkeypatch.setattr(gpu, "make_inputs", lambda folder, shape, prompts: dict(NAMES))
        monkeypatch.setattr(gpu, "libraries", list)
        words = ["--gpus", "2", "--steps", "4", "--warm-up", "1", "--prompts", "8", "--tokens", "16", "--rounds", "1"]
        words += ["--out", str(results)]
        for name, value in flags.items():
            words += [f"--{name}", *value.split()]
        monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
        return results

    return use


def read(results):
    return json.loads((results / "gpu.json").read_text())


def test_all_of_it(gpu, stand_in, cards, modules):
    results = stand_in(models="0.6b", kinds="bapo_grpo grpo", delay=0.3)
    gpu.main()
    actual = read(results)
    assert [(run["kind"], run["measured"], run["missing"]) for run in actual["runs"]] == [
        ("bapo_grpo", 3, ""), ("grpo", 3, "")
    ]  # fmt: skip
    numbers = actual["runs"][0]["numbers"]
    operations = 3 * modules.gpu_setting.pass_flops(gpu.MODELS["0.6b"], 16, 16 + 256)
    assert numbers["mfu"] == pytest.approx(operations / (0.04 * 2 * 989e12))  # of both GPUs
    assert numbers["between"] == pytest.approx(numbers["step"] - 0.08) and numbers["step"] > 0.08
    assert actual["runs"][0]["gib"] == 2.0 and actual["runs"][0]["checkpointing"] is False
    assert actual["machine"].endswith("Python " + ".".join(map(str, sys.version_info[:3])))
    assert "2 x NVIDIA H100 80GB HBM3, driver 570.1" in actual["machine"]
    lines = [json.loads(line) for line in (results / "gpu_steps.jsonl").read_text().splitlines()]
    assert len(lines) == 8 and lines[0]["run"] == "Qwen3-0.6B, BAPO-GRPO"  # also those that are not measured
    assert "| Qwen3-0.6B, GRPO |" in (results / "gpu.md").read_text()
    # the same command goes on: nothing is left to do
    stand_in(models="0.6b", kinds="bapo_grpo grpo", end="dies")
    gpu.main()
    assert read(results)["runs"] == actual["runs"]


def test_a_run_that_dies_keeps_its_steps_and_the_next_one_runs(gpu, stand_in, cards):
    results = stand_in(models="0.6b", kinds="bapo_grpo grpo", end="dies")
    gpu.main()
    actual = read(results)["runs"]
    assert [(run["kind"], run["measured"]) for run in actual] == [("bapo_grpo", 1), ("grpo", 1)]
    assert all("it ended with status 1: out of memory" in run["missing"] for run in actual)
    assert actual[0]["numbers"]["samples"] == 16


def test_a_run_that_hangs_is_stopped(gpu, stand_in, cards, monkeypatch):
    monkeypatch.setattr(gpu.Budget, "patience", lambda self, work: 4.0)
    results = stand_in(models="0.6b", kinds="bapo_grpo", end="hangs")
    gpu.main()
    (run,) = read(results)["runs"]
    assert run["missing"] == "there was no new step for 4 s; it was stopped after 2 of 4 steps" and run["measured"] == 1


def test_it_stops_in_time(gpu, modules, stand_in, cards, monkeypatch):
    """By a clock on which a step takes 100 s, and not 13: the first run is stopped, and the second is not begun."""
    rows = Path("runs/gpu/run/run/metrics.jsonl")
    clock = lambda: 100.0 * (rows.read_text().count("\n") if rows.exists() else 0)  # noqa: E731
    monkeypatch.setattr(gpu, "Budget", lambda seconds: modules.gpu_budget.Budget(seconds, clock))
    results = stand_in(models="0.6b", kinds="bapo_grpo grpo", end="hangs", seconds="219")
    gpu.main()
    actual = read(results)
    assert [(run["kind"], run["measured"]) for run in actual["runs"]] == [("bapo_grpo", 1)]
    assert actual["runs"][0]["missing"] == "the time was over; it was stopped after 2 of 4 steps"
    assert actual["not_run"][0]["label"] == "Qwen3-0.6B, GRPO" and "0 s are left" in actual["not_run"][0]["why"]


def test_nothing_is_lost_if_the_benchmark_is_killed(stand_in, cards, tmp_path):
    """SIGKILL in the middle of a run: the steps until then are in the results."""
    results = tmp_path / "results"
    script = tmp_path / "main.py"
    (tmp_path / "stack.py").write_text(STEPS.format(delay=0.2, end="hangs"))
    script.write_text(
        textwrap.dedent(f"""
        import contextlib, sys
        sys.path.insert(0, {str(FOLDER)!r})
        import gpu
        gpu.shared_ray = lambda devices, runs: contextlib.nullcontext({{}})
        gpu.cpu.forked_processes = contextlib.nullcontext
        gpu.program_of = lambda kind: [{str(tmp_path / "stack.py")!r}]
        gpu.make_inputs = lambda folder, shape, prompts: {NAMES!r}
        gpu.libraries = list
        gpu.main()
    """)
    )
    words = ["--gpus", "2", "--models", "0.6b", "--kinds", "bapo_grpo", "--warm-up", "1", "--prompts", "8"]
    words = [sys.executable, str(script), *words, "--tokens", "16", "--out", str(results)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        over = time.monotonic() + 120
        while not (results / "gpu.json").exists() or not read(results)["runs"][0]["measured"]:
            assert process.poll() is None and time.monotonic() < over
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    run = read(results)["runs"][0]
    assert run["measured"] == 1 and run["numbers"]["samples"] == 16
    assert run["missing"] == "the benchmark itself was stopped"
    assert "Stopped or failed" in (results / "gpu.md").read_text()
    names = (str(tmp_path / "stack.py"), str(cards.parent))  # the run, and nvidia-smi
    over = time.monotonic() + 60
    while any(any(name in " ".join(one.info["cmdline"] or []) for name in names)
              for one in psutil.process_iter(["cmdline"])):  # fmt: skip
        assert time.monotonic() < over
        time.sleep(0.05)


def test_children_of_a_run_end_with_it(modules, tmp_path):
    """A run that is stopped has a child in a session of its own, as an engine has."""
    child = "import time; time.sleep(600)"
    script = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True); "
    )
    script += "print('up', flush=True); time.sleep(600)"
    log = tmp_path / "log"
    run = modules.gpu_run
    program = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(FOLDER)!r})
        import time
        from pathlib import Path
        import gpu_run
        gpu_run.GRACE = 0.5
        gpu_run.adopt_orphans()
        begun = time.monotonic()
        log = Path({str(log)!r})
        up = lambda: log.exists() and "up" in log.read_text()
        why = gpu_run.follow([sys.executable, "-c", {script!r}], log, list, print, wanted=1,
                             left=lambda: -1 if up() else 1, patience=60.0, environment={{}})
        print(why, len(gpu_run.descendants()))
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "the time was over; it was stopped after 0 of 1 steps 0\n", done.stderr
    assert run.GRACE > 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpus", "1"], "--gpus is 1, and 2 GPUs are visible"),
        (["--gpus", "2", "--peak-tflops", "1", "--chat", "."], "--chat .*config.json cannot be read"),
    ],
)
def test_what_cannot_be_measured(gpu, stand_in, cards, monkeypatch, words, says):
    stand_in(models="0.6b", kinds="floor")
    monkeypatch.setattr(sys, "argv", [*sys.argv, *words])
    with pytest.raises(ConfigError, match=says):
        gpu.main()


def test_what_does_not_fit_is_left_out(gpu, stand_in, cards):
    results = stand_in(models="0.6b", kinds="bapo_grpo", **{"vllm.gpu_memory_utilization": "0.001"})
    with pytest.raises(SystemExit, match="nothing was measured"):
        gpu.main()
    assert read(results)["not_run"][0]["why"] == "by the plan it does not fit (engine)"
