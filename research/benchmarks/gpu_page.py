"""What research/benchmarks/gpu.py says of its runs: the numbers of a run, the ratios of two, and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import steps
from gpu_setting import PROMPT, TRAINING_PASSES, G, pass_flops
from gpu_watch import PARTS

from bapo_openrlhf.workbench.planning.shapes import ModelShape

KINDS = {  # by their names on the command line. The base of one that runs OpenRLHF's own command is the same algorithm
    "grpo": steps.Kind("GRPO", "openrlhf_grpo", "grpo"),
    "bapo_grpo": steps.Kind("BAPO-GRPO", "openrlhf_grpo", "bapo_grpo"),
    "openrlhf_grpo": steps.Kind("OpenRLHF itself, GRPO", "", "grpo"),
    "ppo": steps.Kind("PPO", "openrlhf_ppo", "ppo"),
    "ba_ppo": steps.Kind("BA-PPO", "openrlhf_ppo", "ba_ppo"),
    "openrlhf_ppo": steps.Kind("OpenRLHF itself, PPO", "", "ppo"),
}
FLOOR_PARTS = ("generation", "forward", "training", "weights")
MFU_AIMS = {"Qwen3-0.6B": 0.25, "Qwen3-1.7B": 0.35}  # over all of the training of a step
GENERATION_AIM, STEP_AIM = 0.8, 1.2  # a share of LLM.generate's speed; a step over its floor

Numbers = dict[str, Any]
Run = Mapping[str, Any]


def has_critic(kind: steps.Kind) -> bool:
    """Whether the kind trains a critic as well as the actor."""
    return kind.algorithm.endswith("ppo")


def training_mfu(shape: ModelShape, samples: float, length: float, seconds: float, peak: float, *,
                 critic: bool) -> float:  # fmt: skip
    """Model FLOPs of training, without those that checkpointing repeats, over what the GPUs could do in that time.

    Args:
        samples, length: samples trained on, and their mean number of tokens with the prompt.
        peak: FLOP/s of all GPUs together.
        critic: whether a critic is trained too. It has the actor's shape, with a head of one number.
    """
    passes = pass_flops(shape, samples, length)
    if critic:
        passes += pass_flops(replace(shape, vocabulary=1), samples, length)
    return TRAINING_PASSES * passes / (seconds * peak)


def trained_tokens(row: Mapping[str, Any]) -> float:
    """Tokens of the samples that a step trained on, with their prompts."""
    total, response = row.get("total_length"), row.get("response_length")
    prompt = PROMPT if total is None or response is None else total - response
    return row.get("tokens/trained", 0) + samples_of(row) * prompt


def samples_of(row: Mapping[str, Any]) -> float:
    """Samples that a step trained on. A plain run trains on all that it generates."""
    return row.get("responses/trained", G * row.get("groups/fresh", 0))


def numbers(kind: steps.Kind, rows: Sequence[Mapping[str, Any]], shape: ModelShape, peak: float) -> Numbers:
    """What the tables say of a run, from its measured steps. Seconds are per step.

    Args:
        rows: metrics of the steps, with `seconds`, the time from the end of the step before to its own end.
        peak: FLOP/s of all GPUs together.
    """
    count = len(rows)
    totals = {part: sum(row.get(f"timing/{part}") or 0.0 for row in rows) for part in PARTS}
    step = sum(row["seconds"] for row in rows)
    samples, tokens = sum(map(samples_of, rows)), sum(map(trained_tokens, rows))
    generated = sum(row["tokens/generated"] for row in rows)
    training, generation = totals["ppo_train"], totals["generation"] + totals["reevaluation"]
    rewards = [row.get("reward/fresh_mean") for row in rows]
    return {
        **{part: total / count for part, total in totals.items()},
        "step": step / count,
        "between": (step - sum(totals.values())) / count,
        "responses": sum(row["rollouts/step"] for row in rows) / count,
        "response_tokens": generated / sum(row["rollouts/step"] for row in rows),
        "samples": samples / count,
        "sample_tokens": tokens / samples if samples else 0.0,
        "generated_per_second": generated / generation,
        "experience_per_second": tokens / totals["make_experience"] if samples else 0.0,
        "trained_per_second": tokens / training if samples else 0.0,
        "mfu": training_mfu(shape, samples, tokens / samples, training, peak, critic=has_critic(kind))
        if samples
        else 0.0,
        "syncs": sum((row.get("timing/broadcast") or 0.0) > 1e-3 for row in rows) / count,
        "rewards": [rewards[0], rewards[-1]],
    }


def label(run: Run) -> str:
    """What a run is called: model, kind and its own flags."""
    flags = [f"{name} {value}" for name, value in run["flags"].items()]
    return ", ".join([run["model"], KINDS[run["kind"]].name, *flags])


def against_floor(run: Run, floor: Mapping[str, float]) -> dict[str, float]:
    """How far a run is from its floor: `generation` is its speed over LLM.generate's, `step` its time over the floor's.

    What the floor lacks, because its time was over, is left out.
    """
    ratios, numbers = {}, run["numbers"]
    if "generation" in floor:
        ratios["generation"] = floor["generation"] / (numbers["generation"] + numbers["reevaluation"])
    if set(FLOOR_PARTS) <= set(floor):
        ratios["step"] = numbers["step"] / sum(floor[part] for part in FLOOR_PARTS)
    return ratios


def against_openrlhf(run: Run, base: Run) -> dict[str, float]:
    """A run's tokens a second over those of OpenRLHF itself, and OpenRLHF's seconds of a weight sync over the run's."""
    ours, theirs = run["numbers"], base["numbers"]
    speeds = {"generation": "generated", "experience": "experience", "training": "trained"}
    ratios = {part: ours[f"{name}_per_second"] / theirs[f"{name}_per_second"] for part, name in speeds.items()}
    if ours["syncs"] and theirs["syncs"]:
        seconds = [numbers["broadcast"] / numbers["syncs"] for numbers in (ours, theirs)]
        ratios["weight sync"] = seconds[1] / seconds[0]
    return ratios


def base_of(run: Run, runs: Sequence[Run]) -> Run | None:
    """The last run of OpenRLHF itself that this run is compared with: of the same model and algorithm."""
    same = [one for one in runs if (one["model"], one["kind"]) == (run["model"], KINDS[run["kind"]].base)]
    return same[-1] if same else None


def aims(result: Mapping[str, Any]) -> list[list[str]]:
    """Rows of a table: a run, an aim, what was measured, and whether it was reached."""
    rows = []
    for run in measured(result):
        if KINDS[run["kind"]].base == "":
            continue
        judged, floor = [], against_floor(run, result["floors"].get(label(run), {}))
        if (aim := MFU_AIMS.get(run["model"])) is not None:
            judged.append(
                (f"MFU of training at least {100 * aim:.0f} %", 100 * run["numbers"]["mfu"], "{:.1f} %", 100 * aim)
            )
        if "generation" in floor:
            judged.append(
                (f"generation at least {GENERATION_AIM} of LLM.generate", floor["generation"], "{:.2f}", GENERATION_AIM)
            )
        if "step" in floor:
            judged.append((f"a step at most {STEP_AIM} times its floor", -floor["step"], "{:.2f}", -STEP_AIM))
        if base := base_of(run, measured(result)):
            part, least = min(against_openrlhf(run, base).items(), key=lambda item: item[1])
            judged.append(("in no part slower than OpenRLHF itself", least, f"{{:.2f}} ({part})", 1.0))
        for text, value, form, aim in judged:
            rows.append([label(run), text, form.format(abs(value)), "yes" if value >= aim else "**no**"])
    return rows


def has_floor(result: Mapping[str, Any], name: str) -> bool:
    """Whether all parts of the floor of a run are there."""
    return set(FLOOR_PARTS) <= set(result["floors"].get(name, {}))


def measured(result: Mapping[str, Any]) -> list[Run]:
    """The runs that have numbers."""
    return [run for run in result["runs"] if run.get("numbers")]


# ── The page ──


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown. Numbers are aligned to the right. No lines if there are no rows."""
    if not rows:
        return []
    lines = [f"| {' | '.join(row)} |" for row in ([" ", *head], *rows)]
    return [lines[0].replace("|  ", "|", 1), f"| --- |{' ---: |' * len(head)}", *lines[1:], ""]


def shown(values: Sequence[float | None], digits: int = 2) -> str:
    """The median, with the smallest and the largest if there are several; a dash if there is none."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return f"{known[0]:,.{digits}f}" if known else "–"
    return steps.with_spread(known, digits)


def grouped(result: Mapping[str, Any]) -> dict[str, list[Run]]:
    """The rounds of each run, by its label."""
    groups: dict[str, list[Run]] = {}
    for run in measured(result):
        groups.setdefault(label(run), []).append(run)
    return groups


def seconds_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Seconds of a step and of its parts."""
    return [
        [name, *(shown([run["numbers"][part] for run in runs]) for part in ("step", *PARTS, "between")),
         shown([run["start_seconds"] for run in runs], 0)]
        for name, runs in grouped(result).items()
    ]  # fmt: skip


def size_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Sizes, speeds and memory."""
    rows = []
    for name, runs in grouped(result).items():
        of_runs = [run["numbers"] for run in runs]
        counts = [shown([one[what] for one in of_runs], 0) for what in ("responses", "response_tokens", "samples")]
        speeds = [
            shown([one[f"{what}_per_second"] for one in of_runs], 0) for what in ("generated", "experience", "trained")
        ]
        mfu = shown([100 * one["mfu"] for one in of_runs], 1)
        memory = [shown([run["gib"] for run in runs], 1), shown([run["planned_gib"] for run in runs], 1)]
        measured_steps = str(sum(run["measured"] for run in runs))
        rows.append(
            [name, measured_steps, *counts, *speeds, mfu, *memory, "yes" if runs[-1]["checkpointing"] else "no"]
        )
    return rows


def busy_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """The GPUs' busy share in each part, in percent. No rows if nobody looked."""
    rows = []
    for name, runs in grouped(result).items():
        shares = [[run["busy"][part] for run in runs] for part in PARTS]
        if any(value is not None for of_part in shares for value in of_part):
            rows.append([name, *(shown([None if s is None else 100 * s for s in of_part], 0) for of_part in shares)])
    return rows


def floor_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """The floor of each run, and how far the run is from it."""
    rows = []
    for name, runs in grouped(result).items():
        floor = result["floors"].get(name)
        if floor:
            ratios = [against_floor(run, floor) for run in runs]
            parts = [shown([floor.get(part)]) for part in FLOOR_PARTS]
            mfu = shown([None if "mfu" not in floor else 100 * floor["mfu"]], 1)
            rows.append(
                [name, *parts, mfu, *(shown([one.get(what) for one in ratios]) for what in ("generation", "step"))]
            )
    return rows


def openrlhf_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Speeds relative to OpenRLHF itself."""
    rows, runs = [], measured(result)
    for name, of_name in grouped(result).items():
        pairs = [(run, base_of(run, runs)) for run in of_name]
        ratios = [against_openrlhf(run, base) for run, base in pairs if base]
        if ratios:
            parts = ("generation", "experience", "training", "weight sync")
            rows.append([name, *(shown([ratio.get(part) for ratio in ratios]) for part in parts)])
    return rows


ABOUT_SECONDS = (
    "A step lasts from the end of the step before to its own end. “Between” is the rest: the record, and the calls "
    "between processes. The start ends where the first step begins."
)
ABOUT_SIZES = (
    "Tokens trained, and those of experience, are those of whole samples, with their prompts. MFU counts the "
    "operations of three forward passes (`gpu_setting.py`), without what checkpointing computes again, in "
    "all the seconds of training, which include moving states to the GPU and away. It is relative to {:g} TFLOP/s a "
    "GPU. Memory is what the fullest GPU has in use, by nvidia-smi. Activations are kept, without checkpointing, if "
    "`bapo-openrlhf plan` says that they fit."
)
ABOUT_BUSY = (
    "Busy is the share of time with a kernel on the GPU, which nvidia-smi averages over up to a second. So a part of "
    "less than a second also shows its neighbours."
)
ABOUT_FLOOR = (
    "The floor is the same work in one process, in seconds: `LLM.generate` for as many requests of the same lengths, "
    "without log-probs, a bare PyTorch loop without checkpointing for experience and training, and a copy of the "
    "weights."
)
ABOUT_OPENRLHF = (
    "Here a number above 1 is a speed above that of OpenRLHF itself: its own command, without this project's classes, "
    "with the same model, inputs and flags. Speeds are tokens a second, because batch adaptation trains on fewer "
    "samples."
)
SIZES = (
    "steps measured", "responses a step", "tokens a response", "samples trained a step", "tokens generated a second",
    "tokens through experience a second", "tokens trained a second", "MFU of training, %", "GiB at most", "GiB planned",
    "checkpointing",
)  # fmt: skip
FLOOR_HEAD = (
    "floor: generation", "experience", "training", "weights", "MFU of the floor's training, %",
    "generation, of LLM.generate", "a step over its floor",
)  # fmt: skip


def opening(result: Mapping[str, Any]) -> list[str]:
    """The first lines of the page: what was measured, where, and by which command."""
    dry = ["**Dry run: no GPU.** It shows only that the script runs. Its numbers mean nothing.", ""]
    return [
        "# A training step on a GPU",
        "",
        *(dry if result["dry_run"] else []),
        f"Random weights, bf16; {result['prompts']} prompts of {PROMPT} tokens x {G} responses of {result['tokens']} "
        f"tokens, one optimizer step a trainer step, weights synced at each step. A run has up to {result['steps']} "
        f"steps, and its numbers are means over the steps after the first {result['warm_up']}. If a run has several "
        "rounds, the tables have the median, with the smallest and the largest in brackets. "
        f"{result['machine']}; commit {result['commit']}; the seed is the number of the round.",
        "",
        f"`{result['command']}`",
        "",
    ]


def listed(head: str, lines: Sequence[str]) -> list[str]:
    """A list of Markdown with its head; nothing if it is empty."""
    return [head, "", *(f"- {line}" for line in lines), ""] if lines else []


def markdown(result: Mapping[str, Any]) -> str:
    """The page of results. A table without rows is left out, with its explanation."""
    no_gpu = "this machine has no GPU" if result["dry_run"] else "nvidia-smi did not tell"
    tables = (
        (["seconds a step", *PARTS.values(), "between", "start, s"], seconds_rows(result), ABOUT_SECONDS),
        (SIZES, size_rows(result), ABOUT_SIZES.format(result["peak_tflops"])),
        ([f"GPU busy, %: {name}" for name in PARTS.values()], busy_rows(result), ABOUT_BUSY),
        (FLOOR_HEAD, floor_rows(result), ABOUT_FLOOR),
        (["generation", "experience", "training", "weight sync"], openrlhf_rows(result), ABOUT_OPENRLHF),
        (["aim", "measured", "reached"], aims(result), ""),
    )
    lines = opening(result)
    for head, rows, note in tables:
        lines += [*table(head, rows), *([note, ""] if note else [])] if rows else []
    lines += [] if busy_rows(result) else [f"How busy the GPU is was not measured, because {no_gpu}.", ""]
    chat = [(run["model"], *run["numbers"]["rewards"]) for run in measured(result) if run["chat"]]
    lines += listed("Mean reward of the first measured step, and of the last:", [
        f"{name}: {first:.2f}, {last:.2f}" for name, first, last in chat])  # fmt: skip
    missing = [f"{label(run)}: {run['missing'].splitlines()[0]}" for run in result["runs"] if run["missing"]]
    lines += listed("Stopped or failed:", missing)
    lines += listed("Not run:", [f"{one['label']}: {one['why'].splitlines()[0]}" for one in result["not_run"]])
    return "\n".join(lines).rstrip() + "\n"
