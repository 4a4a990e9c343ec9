"""Measures a training step on a GPU: its parts, tokens a second, MFU, memory, and the layer's share.

    python benchmarks/gpu.py                                # writes benchmarks/results/gpu.{json,md}; needs a GPU
    python benchmarks/gpu.py --model 4b --gpus 8            # on 8 GPUs, with a larger model
    python benchmarks/gpu.py --ds.attn_implementation flash_attention_2  # other flags go to `bapo-openrlhf train`
    python benchmarks/gpu.py --dry-run                      # on the CPU with a tiny model; writes nothing

It needs no model hub (gpu_setting.py). All roles share the GPUs and take turns, as in the presets. The kinds of runs
take turns too, and ratios are within a round, as in steps.py. A kind is left out if `bapo-openrlhf plan` says that it
does not fit.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import steps
from gpu_setting import DRY_RUN, MODELS, PEAK_TFLOPS, PROMPT, TRAINING_PASSES, G, flags_of, make_inputs, pass_flops
from report import CORES, RESULTS, origin, write

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.record.run_record import SOURCES
from bapo_openrlhf.workbench.planning.constants import DATA_SHEETS, GIB, constants_of
from bapo_openrlhf.workbench.planning.memory import PHASES, gpu_memory
from bapo_openrlhf.workbench.planning.shapes import ModelShape
from bapo_openrlhf.workbench.planning.workload import Algorithm, Workload

KINDS = [kind for kind in steps.KINDS if not kind.name.startswith("DAPO")]
PARTS = {  # parts of a step, and their names in the table
    "generation": "generation",
    "reevaluation": "re-evaluation",
    "adapt": "the layer's batch",
    "make_experience": "experience",
    "ppo_train": "training",
    "broadcast": "weight sync",
}
SIZES = ("responses a step", "tokens a response", "samples trained a step", "tokens generated a second",
         "tokens trained a second", "MFU of training, %", "the layer's batch, % of the step", "GiB at most",
         "GiB planned")  # fmt: skip


def nvidia_smi(query: str) -> list[list[str]]:
    """What nvidia-smi says of each visible GPU, with sizes in MiB."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    words = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    words += [f"--id={visible}"] if visible else []
    lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    return [[cell.strip() for cell in line.split(",")] for line in lines]


@contextmanager
def watched_memory(found: list[float], seconds: float = 0.5) -> Iterator[None]:
    """While the block runs, append the GiB in use on the fullest GPU to `found`, at equal intervals."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(seconds):
            found.append(max(float(used) for (used,) in nvidia_smi("memory.used")) / 1024)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def data_sheet(name: str, peak_tflops: float | None) -> str:
    """The kind of GPU in planning's DATA_SHEETS, found by the name that nvidia-smi gives.

    Raises:
        ConfigError: there is none, and no peak was given. The peaks of A100 to H200 are those of SXM
            modules, because cards for a slot (PCIe, NVL) are slower; the 4090's is that of the card for desktops.
    """
    words = name.replace("-", " ").split()
    if (sheet := next((kind for kind in DATA_SHEETS if kind in words), None)) and not {"PCIe", "NVL", "Laptop", "D"} & {
        *words
    }:
        return sheet
    if peak_tflops is None:
        raise ConfigError(f"no data sheet for {name!r}, only for {', '.join(DATA_SHEETS)}; give --peak-tflops")
    return sheet or "H100"  # only what the plan of the memory reads is used


def prepare(given: argparse.Namespace) -> tuple[str, float, float, list[str]]:
    """Set the environment of this process and its children, and look at the GPUs.

    Returns:
        The kind of GPU in planning's DATA_SHEETS, the bytes and the peak TFLOP/s of one GPU, and words on the machine.

    Raises:
        ConfigError: The number of visible GPUs is not --gpus, or the GPU is not known.
    """
    sheet, size, machine = "H100", constants_of("H100").gpu_bytes, [CORES]
    if given.dry_run:
        os.environ[cpu.SWITCH] = "1"
    else:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(given.gpus))))
        cards = nvidia_smi("name,memory.total,driver_version")
        if len(cards) != given.gpus:
            raise ConfigError(f"--gpus is {given.gpus}, and {len(cards)} GPUs are visible (CUDA_VISIBLE_DEVICES)")
        sheet, size = data_sheet(cards[0][0], given.peak_tflops), float(cards[0][1]) * 2**20
        machine += [f"{given.gpus} x {cards[0][0]}", f"driver {cards[0][2]}"]
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.setdefault(name, "1")
    return sheet, size, given.peak_tflops or PEAK_TFLOPS[sheet], machine


def critic_too(kind: steps.Kind) -> bool:
    """Whether the kind trains a critic as well as the actor."""
    return kind.algorithm.endswith("ppo")


def planned(kind: steps.Kind, shape: ModelShape, words: Sequence[str], sheet: str, size: float) -> Any:
    """The planned Memory of a kind on GPUs of `size` bytes."""
    settings = Workload(arguments.parse(words))
    constants = constants_of(sheet).replaced("nvidia-smi", {"gpu_bytes": size})
    method = Algorithm(kind.name, adapted=kind.algorithm.startswith("ba"), critic=critic_too(kind))
    return gpu_memory(shape, settings, constants, method, settings.roles(method)["actor"])


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


def numbers(kind: steps.Kind, rows: Sequence[Mapping[str, Any]], shape: ModelShape, peak: float) -> dict[str, float]:
    """What the table says of a run, from the metrics of its measured steps. Seconds of a part are per step."""
    totals = {part: sum(row.get(f"timing/{part}") or 0.0 for row in rows) for part in (*PARTS, "step_total")}
    samples = G * sum(row[f"groups/{source}"] for row in rows for source in SOURCES)
    generated, trained = (sum(row[f"tokens/{what}"] for row in rows) for what in ("generated", "trained"))
    tokens, seconds = trained + samples * PROMPT, totals["ppo_train"]
    critic, length = critic_too(kind), tokens / max(samples, 1)
    return {
        **{part: total / len(rows) for part, total in totals.items()},
        "responses": sum(row["rollouts/step"] for row in rows) / len(rows),
        "response_tokens": generated / sum(row["rollouts/step"] for row in rows),
        "samples": samples / len(rows),
        "generated_per_second": generated / (totals["generation"] + totals["reevaluation"]),
        "trained_per_second": tokens / seconds if samples else 0.0,
        "mfu": training_mfu(shape, samples, length, seconds, peak, critic=critic) if samples else 0.0,
        "layer_share": totals["adapt"] / totals["step_total"],
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown. Numbers are aligned to the right."""
    lines = [f"| {' | '.join(row)} |" for row in ([" ", *head], *rows)]
    return [lines[0].replace("|  ", "|", 1), f"| --- |{' ---: |' * len(head)}", *lines[1:], ""]


def markdown(result: Mapping[str, Any]) -> str:
    """The page of results."""
    runs, parts, sizes = result["runs"], [], []
    for kind in (kind for kind in KINDS if kind.name in runs):
        found = {name: [run[name] for run in runs[kind.name]] for name in runs[kind.name][0]}
        median = {name: statistics.median(values) for name, values in found.items()}
        ratio = "1" if kind.name == kind.base else steps.with_spread(steps.ratios(runs, kind, "step_total"))
        parts.append([kind.name, steps.with_spread(found["step_total"]), ratio, *(f"{median[p]:.3f}" for p in PARTS)])
        counts = [f"{median[name]:,.0f}" for name in ("responses", "response_tokens", "samples")]
        speeds = [steps.with_spread(found[name], 0) for name in ("generated_per_second", "trained_per_second")]
        shares = [steps.with_spread([100 * share for share in found[name]]) for name in ("mfu", "layer_share")]
        memory = [steps.with_spread(found["gib"], 1), f"{result['planned_gib'][kind.name]:.1f}"]
        sizes.append([kind.name, *counts, *speeds, *shares, *memory])
    dry = ["**Dry run: no GPU.** It shows only that the script runs. Its numbers mean nothing.", ""]
    left_out = [f"{name} (`{word}`)" for name, word in result["left_out"].items()]
    lines = [
        "# A training step on a GPU",
        "",
        *(dry if result["dry_run"] else []),
        f"{result['model']}, random weights, bf16; {result['prompts']} prompts of {PROMPT} tokens x {G} responses of "
        f"{result['tokens']} at most, one optimizer step a trainer step. A run has {result['steps']} steps, and its "
        f"numbers are means over the steps after the first {result['warm_up']}. The tables have the median over "
        f"{result['rounds']} rounds, with the smallest and the largest in brackets. Each ratio is to the plain run of "
        "the same round. "
        f"{result['machine']}; commit {result['commit']}.",
        "",
        f"`{result['command']}`",
        "",
        *table(["seconds a step", "ratio", *PARTS.values()], parts),
        *table(SIZES, sizes),
        "Tokens trained are those of whole samples, with their prompts. MFU counts the operations of three forward "
        "passes (`benchmarks/gpu_setting.py`), without what checkpointing computes again, in all the seconds of "
        "training, which include moving states to the GPU and away. It is relative to "
        f"{result['peak_tflops']:g} TFLOP/s a GPU. Memory is what the fullest GPU has in use, measured by nvidia-smi "
        "twice a second. The planned memory is what `bapo-openrlhf plan` predicts.",
        *(["", f"Left out, because by the plan they do not fit: {', '.join(left_out)}."] if left_out else []),
    ]
    return "\n".join(lines) + "\n"


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and those of `bapo-openrlhf train`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)  # fmt: skip
    parser.add_argument("--model", choices=[*MODELS][1:], default="1.7b")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14, help=f"of a run; the first {steps.WARM_UP} are not measured")
    parser.add_argument("--prompts", type=int, default=32, help="of a step")
    parser.add_argument("--tokens", type=int, default=512, help="of a response")
    parser.add_argument("--peak-tflops", type=float, help="of one GPU in bf16, dense; else by the GPU's name")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, a tiny model and 3 steps; writes nothing")
    given, more = parser.parse_known_args(argv)
    if given.dry_run:
        vars(given).update(DRY_RUN)
    elif cpu.active():
        parser.error("this machine has no GPU, and a GPU is what is measured; --dry-run tries the script without one")
    given.warm_up = 1 if given.dry_run else steps.WARM_UP
    if given.steps <= given.warm_up:
        parser.error(f"--steps is {given.steps}; it must be above {given.warm_up}, the steps that are not measured")
    return given, more


def main() -> None:
    """Measure and write."""
    given, more = parse(sys.argv[1:])
    shape, (sheet, size, tflops, machine) = MODELS[given.model], prepare(given)
    look = nullcontext if given.dry_run else watched_memory
    result: dict[str, Any] = {
        **vars(given),
        "model": shape.name,
        "peak_tflops": tflops,
        **origin(shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]]), *machine),
    }
    with tempfile.TemporaryDirectory() as name, cpu.forked_processes():
        flags = flags_of(given) | make_inputs(Path(name), shape, given.prompts * given.steps)
        plans = {k.name: planned(k, shape, [*steps.words_of(k, flags), *more], sheet, size) for k in KINDS}
        result["planned_gib"] = {
            name: max(getattr(plan, phase) for phase in PHASES) / GIB for name, plan in plans.items()
        }
        result["left_out"] = {name: plan.word for name, plan in plans.items() if plan.word != "fits"}
        kinds = [kind for kind in KINDS if kind.name not in result["left_out"]]
        if not kinds:
            raise ConfigError(f"no kind fits with --model {given.model}, by `bapo-openrlhf plan`: {result['left_out']}")
        runs = result["runs"] = {kind.name: [] for kind in kinds}
        for one, kind in steps.in_turn(kinds, given.rounds):
            used = [0.0]
            with tempfile.TemporaryDirectory() as folder, look(used):
                rows = steps.run(kind, Path(folder), flags | {"train.seed": one}, more)[given.warm_up : given.steps]
            found = numbers(kind, rows, shape, given.gpus * tflops * 1e12)
            runs[kind.name].append(found | {"gib": max(used)})
            if not given.dry_run and {len(runs[kind.name]) for kind in kinds} == {one}:  # the round is complete
                result["rounds"] = one
                write(RESULTS, "gpu", result, markdown(result))
    if given.dry_run:
        print(markdown(result))


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"error: {error}")
