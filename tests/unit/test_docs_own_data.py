"""docs/own_data.md: its table of settings is that of the flags and files, its predictions are those of `plan`."""

import re
import shlex
from fractions import Fraction
from pathlib import Path

import pytest

from bapo_openrlhf.cli import arguments, main
from bapo_openrlhf.flags import config
from bapo_openrlhf.workbench.planning.constants import constants_of
from bapo_openrlhf.workbench.planning.memory import gpu_memory
from bapo_openrlhf.workbench.planning.verdict import RECOMPUTES, STAGE, proposal
from bapo_openrlhf.workbench.planning.workload import ALGORITHMS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own_data.md").read_text()
PRESETS = {path.stem: ["--config", str(path)] for path in (ROOT / "configs").glob("*.yaml")}
OF_THE_QUICKSTART = "adapt.max_shift_replayed"  # no other preset has it
# Only what a parser asks for.
NOTHING = ["--actor.model_name_or_path=m", "--reward.remote_url=r.py", "--rollout.n_samples_per_prompt=2"]
COLUMNS = {
    "8 GPUs": {name: words for name, words in PRESETS.items() if name not in ("quickstart", "math_one_gpu")},
    "one GPU": {"math_one_gpu": PRESETS["math_one_gpu"]},
}


def table(after):
    section = PAGE.split(after, 1)[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(head, row, strict=True)) for row in rows]


SETTINGS = {row["flag"].strip("`"): row for row in table("\n## Start from these settings\n")}


def number(text):
    try:
        return Fraction(str(text))
    except ValueError:
        return str(text)


def meant(flag, args):
    """What a flag is set to, as a list of numbers or words. Thresholds as they are computed with."""
    if flag in ("adapt.c2", "adapt.c3"):
        interval = args.adapt.thresholds()[int(flag[-1]) - 1]
        return [interval.low, interval.high]
    value = config.flags_of(args)[flag]
    return ["null"] if value is None else [number(str(value).lower() if isinstance(value, bool) else value)]


@pytest.mark.parametrize("column", COLUMNS)
def test_settings(column):
    for name, words in COLUMNS[column].items():
        args = arguments.parse(words)
        for flag, row in SETTINGS.items():
            usual, _, for_ba_ppo = row[column].partition("; BA-PPO ")
            cell = for_ba_ppo if for_ba_ppo and name.startswith("ba_ppo") else usual
            assert meant(flag, args) == [number(word) for word in cell.split()], (name, flag)


def test_what_the_table_must_name():
    """Every flag of batch adaptation, the KL penalty and the optimizers that a preset changes; each with a reason."""
    default, changed = arguments.parse(["--algorithm=bapo_grpo", *NOTHING]), set()
    for words in PRESETS.values():
        args = arguments.parse(words)
        changed |= {flag for flag in config.flags_of(args) if meant(flag, args) != meant(flag, default)}
    named = {flag for flag in changed if flag.startswith(("adapt.", "algo.kl.", "actor.adam.", "critic.adam."))}
    assert {"adapt.buffer_size", "actor.adam.lr", "algo.kl.init_coef"} <= named <= {*SETTINGS, OF_THE_QUICKSTART}
    assert all(len(row["why"]) > 5 for row in SETTINGS.values())


@pytest.mark.parametrize("row", table("\n## 1 to 8 GPUs\n"), ids=lambda row: f"{row['GPUs']}, {row['model']}")
def test_predictions_are_those_of_plan(row, tmp_path, capsys, monkeypatch):
    """With `init` for these GPUs and these flags, stage and activations are as proposed, and `check` takes it."""
    count, memory = re.fullmatch(r"(\d) x (24|80) GB", row["GPUs"]).groups()
    assert main.run(["init", str(tmp_path / "task"), "--gpus", count, "--model", f"Qwen/{row['model']}"]) == 0
    flags = ["--config", str(tmp_path / "task" / "config.yaml"), *shlex.split(row["flags"].strip("`"))]
    args = arguments.parse(flags)
    plans = []
    monkeypatch.setattr("bapo_openrlhf.workbench.planning.output.page", lambda planned: plans.append(planned) or "")
    gpu = {"24": "4090", "80": "H100"}[memory]
    assert main.run(["check", *flags]) == 0
    assert main.run(["plan", *flags, "--gpu", gpu, "--gpus", count]) == 0
    (planned,) = plans
    wanted = proposal(*planned.shapes, int(count), planned.workload, constants_of(gpu))
    assert {STAGE: args.ds.zero_stage, RECOMPUTES: args.actor.gradient_checkpointing_enable} == wanted
    method = next(one for one in ALGORITHMS if one.name == "BAPO-GRPO")
    actual = gpu_memory(*planned.shapes, planned.workload, planned.constants, method, *planned.gpus)
    assert (planned.shapes[0].name, actual.word) == (row["model"], "fits")
    assert actual.experience < max(actual.generation, actual.training)
    gib = [f"{size / 2**30:.1f}" for size in (actual.generation, actual.training)]
    assert gib == [row["GiB while generating"], row["GiB while training"]]
