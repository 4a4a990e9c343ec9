"""Measures training on GPUs: parts of a step, tokens a second, MFU, how busy the GPU is, the floor, OpenRLHF itself.

    python research/benchmarks/gpu.py --seconds 600                  # the prepared order, on one GPU; stops in time
    python research/benchmarks/gpu.py --models 4b --kinds bapo_grpo openrlhf_grpo floor --gpus 8
    python research/benchmarks/gpu.py --models 0.6b --kinds ba_ppo --ds.zero_stage 1    # other flags go to the training
    python research/benchmarks/gpu.py --dry-run         # on the CPU with a tiny model; its numbers mean nothing

It needs no model hub (gpu_setting.py). All roles share the GPUs and take turns, as in the presets. The prepared order
is: BAPO-GRPO, BA-PPO and OpenRLHF itself with 0.6B parameters and ZeRO stage 2, their floor (gpu_floor.py), BAPO-GRPO
with stage 3, BAPO-GRPO and BA-PPO with 1.7B parameters, and BAPO-GRPO with a chat model if its folder is given
(`--chat`). Then the rounds go on.

With `--seconds`, a run gets as many steps as fit into what is left, by what was measured so far, and none if too few
fit. The page and all metrics are written after each step, into --out. The same command goes on where it ended, if
commit, machine and settings are the same. All runs share one Ray, the models, and what vLLM has compiled.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gpu_page
import gpu_run
import steps
from gpu_budget import Budget, Seconds, Work
from gpu_page import KINDS, has_critic, has_floor, label, markdown, measured
from gpu_setting import (
    DRY_RUN,
    MODELS,
    PEAK_TFLOPS,
    PROMPT,
    G,
    flags_of,
    make_chat_inputs,
    make_inputs,
)
from gpu_watch import Watch, cards
from report import RESULTS, again, origin, python_path

from bapo_openrlhf import flash_attention
from bapo_openrlhf.cli import arguments
from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.cpu.prefork import serving
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.start import shared_ray
from bapo_openrlhf.workbench.planning.constants import DATA_SHEETS, GIB, constants_of
from bapo_openrlhf.workbench.planning.memory import PHASES, gpu_memory
from bapo_openrlhf.workbench.planning.shapes import ModelShape, shape_of_folder
from bapo_openrlhf.workbench.planning.workload import Algorithm, Workload

HERE = Path(__file__).parent
FLOOR, CHAT = "floor", "chat"
CHAT_STEPS = 20
CHECKPOINTING = "actor.gradient_checkpointing_enable"
ESTIMATORS = {"grpo": "group_norm", "ppo": "gae"}  # of OpenRLHF's own command
SAME = ("commit", "machine", "versions", "prompts", "tokens", "steps", "warm_up", "gpus", "more", "dry_run")


@dataclass(frozen=True)
class Entry:
    """One thing to measure.

    Attributes:
        model: a name of MODELS, or "chat".
        kind: a name of KINDS, or "floor".
        flags: flags of its own.
    """

    model: str
    kind: str
    flags: dict[str, Any] = field(default_factory=dict)


STAGE_2, STAGE_3 = ({"ds.zero_stage": stage} for stage in (2, 3))
ORDER = (
    Entry("0.6b", "bapo_grpo", STAGE_2),
    Entry("0.6b", "ba_ppo", STAGE_2),
    Entry("0.6b", "openrlhf_grpo", STAGE_2),
    Entry("0.6b", FLOOR),
    Entry("0.6b", "bapo_grpo", STAGE_3),
    Entry("1.7b", "bapo_grpo", STAGE_2),
    Entry("1.7b", FLOOR),
    Entry("1.7b", "ba_ppo", STAGE_2),
)


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


def libraries() -> list[str]:
    """The versions of NVIDIA's libraries that torch uses, and what is not installed."""
    import torch

    versions = [f"CUDA {torch.version.cuda}", f"cuDNN {torch.backends.cudnn.version()}"]
    return [*versions, f"NCCL {nccl()}", *["no flash-attn"] * flash_attention.is_missing()]


def nccl() -> str:
    """The version of the NCCL that is loaded. torch only tells the one that it was compiled with."""
    number = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    return f"{number.value // 10_000}.{number.value // 100 % 100}.{number.value % 100}"


def prepare(given: argparse.Namespace) -> tuple[str, float, float, list[str]]:
    """Set the environment of this process and its children, and look at the GPUs.

    Returns:
        The kind of GPU in planning's DATA_SHEETS, the bytes and the peak TFLOP/s of one GPU, and words on the machine.

    Raises:
        ConfigError: The number of visible GPUs is not --gpus, or the GPU is not known.
    """
    sheet, size, machine = "H100", constants_of("H100").gpu_bytes, [f"{len(os.sched_getaffinity(0))} cores"]
    if given.dry_run:
        os.environ[cpu.SWITCH] = "1"
        machine += ["no GPU"]
    else:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(given.gpus))))
        gpus = cards()
        if len(gpus) != given.gpus:
            raise ConfigError(f"--gpus is {given.gpus}, and {len(gpus)} GPUs are visible (CUDA_VISIBLE_DEVICES)")
        sheet, size = data_sheet(gpus[0][0], given.peak_tflops), float(gpus[0][1]) * 2**20
        machine += [f"{given.gpus} x {gpus[0][0]}", f"driver {gpus[0][2]}", *libraries()]
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.setdefault(name, "1")
    return sheet, size, given.peak_tflops or PEAK_TFLOPS[sheet], machine


def planned(kind: steps.Kind, shape: ModelShape, words: Sequence[str], sheet: str, size: float) -> Any:
    """The planned Memory of a kind on GPUs of `size` bytes."""
    settings = Workload(arguments.parse(words))
    constants = replace(constants_of(sheet), gpu_bytes=size)
    method = Algorithm(kind.name, adapted=kind.algorithm.startswith("ba"), critic=has_critic(kind))
    return gpu_memory(shape, settings, constants, method, settings.blocks(method)["actor"].gpus)


def words_of(entry: Entry, flags: Mapping[str, Any], more: Sequence[str]) -> list[str]:
    """The words after a program's name: of `bapo-openrlhf train`, or of OpenRLHF's own command.

    OpenRLHF's own command gets the same flags but this project's, and those of a critic only if it trains one.
    """
    kind, ours = KINDS[entry.kind], ("adapt.", "run.", "verifier.")
    if kind.base:
        return [*steps.words_of(kind, flags), *more]
    left_out = ours if has_critic(kind) else (*ours, "critic.")
    kept = {name: value for name, value in flags.items() if not name.startswith(left_out)}
    kept["algo.advantage.estimator"] = ESTIMATORS[kind.algorithm]
    words = [word for name, value in kept.items() for word in (f"--{name}", *str(value).split())]
    return words + without_flags(more, left_out)


def program_of(kind: steps.Kind) -> list[str]:
    """What Python runs: `bapo-openrlhf train`, or OpenRLHF's own command."""
    return ["-m", "bapo_openrlhf.cli", "train"] if kind.base else [str(HERE / "gpu_openrlhf.py")]


def without_flags(words: Sequence[str], starts: tuple[str, ...]) -> list[str]:
    """Words of a command line without the flags that begin so, and without their values."""
    kept, keep = [], True
    for word in words:
        if word.startswith("--"):
            keep = not word[2:].startswith(starts)
        if keep:
            kept.append(word)
    return kept


class Benchmark:
    """The measurement: what was measured so far, and how the next entry is measured.

    Args:
        given, more: the benchmark's flags, and those of the training.
        folder: for inputs, the runs' files, and the state that the next call goes on from.
    """

    def __init__(self, given: argparse.Namespace, more: Sequence[str], folder: Path) -> None:
        self.given, self.more, self.folder = given, list(more), folder
        self.budget = Budget(given.seconds)
        self.sheet, self.size, tflops, machine = prepare(given)
        self.peak = given.gpus * tflops * 1e12
        self.watch = Watch(gpu=not given.dry_run)
        self.environment: dict[str, str] = {}
        header = {
            **{name: value for name, value in vars(given).items() if name not in ("out", "chat", "seconds")},
            "more": self.more,
            "peak_tflops": tflops,
            **origin(again("research/benchmarks/gpu.py"), *machine),
        }
        commit = HERE.parents[1] / "COMMIT"  # of a copy without git
        header["commit"] = header["commit"] or (commit.read_text().strip() if commit.exists() else None)
        self.result: dict[str, Any] = self._begun(header) | {"not_run": []}
        for run in measured(self.result):
            self.budget.learn(Work(*run["work"]), Seconds(run["start_seconds"], run["numbers"]["step"]))

    def _begun(self, header: dict[str, Any]) -> dict[str, Any]:
        """The state that an earlier call left, if it has the same commit, machine and settings; else an empty one."""
        path = self.folder / "gpu.json"
        previous = json.loads(path.read_text()) if path.exists() else {}
        same = previous and all(previous[name] == json.loads(json.dumps(header[name])) for name in SAME)
        return previous | header if same else header | {"runs": [], "floors": {}}

    def write(self) -> None:
        """Write page, numbers and all metrics. A file is whole, or is not there yet."""
        page = markdown(self.result)
        lines = [json.dumps({"run": label(run), "round": run["round"], **row}) for run in self.result["runs"]
                 for row in run["rows"]]  # fmt: skip
        brief = self.result | {"runs": [{k: v for k, v in run.items() if k != "rows"} for run in self.result["runs"]]}
        texts = {"gpu.md": page, "gpu_steps.jsonl": "".join(line + "\n" for line in lines)}
        for place in {self.folder, self.given.out} - {None}:
            whole = self.result if place == self.folder else brief
            for name, text in (texts | {"gpu.json": json.dumps(whole, indent=1) + "\n"}).items():
                new = place / f"{name}.new"
                new.write_text(text, encoding="utf-8")
                new.replace(place / name)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def put_off(self, name: str, why: str) -> None:
        """Write down that something is not run."""
        self.result["not_run"] = [one for one in self.result["not_run"] if one["label"] != name]
        self.result["not_run"].append({"label": name, "why": why})
        self.say(f"{name}: not run, because {why}")
        self.write()

    # ── Inputs and flags ──

    def shape(self, entry: Entry) -> ModelShape:
        """The shape of an entry's model."""
        if entry.model == CHAT:
            return shape_of_folder("--chat", self.given.chat)
        return MODELS[entry.model]

    def flags(self, entry: Entry, count: int) -> dict[str, Any]:
        """The flags of a run of so many steps. Its inputs are made, if they are not there."""
        prompts = self.given.prompts * max(self.given.steps, CHAT_STEPS)
        place = self.folder / entry.model
        if entry.model == CHAT:
            inputs = make_chat_inputs(place, self.given.chat.resolve(), prompts)
        else:
            inputs = make_inputs(place.resolve(), MODELS[entry.model], prompts)
        return {**flags_of(self.given), **inputs, **entry.flags, "data.max_samples": self.given.prompts * count}

    # ── One entry ──

    def work(self, entry: Entry) -> Work:
        """What the seconds of an entry depend on."""
        shape, name = self.shape(entry), json.dumps([entry.model, entry.kind, entry.flags])
        models = 1 + (entry.kind != FLOOR and has_critic(KINDS[entry.kind]))
        return Work(name, float(models * shape.parameters), float(self.given.prompts * G * self.given.tokens))

    def measure(self, entry: Entry, number: int) -> None:
        """Measure an entry in a round, as far as there is time, and unless this was done."""
        if entry.kind == FLOOR:
            self.floor(entry)
            return
        run: dict[str, Any] = {"model": self.shape(entry).name, "kind": entry.kind, "flags": entry.flags}
        run |= {"round": number, "chat": entry.model == CHAT, "work": list(self.work(entry)), "rows": []}
        same = [one for one in self.result["runs"] if (label(one), one["round"]) == (label(run), number)]
        if measured({"runs": same}):
            return
        count, why = self._steps(entry, run)
        flags = self._fitting(entry, run, self.flags(entry, count)) if count else None
        if flags is None:
            self.put_off(label(run), why or f"by the plan it does not fit ({run['plan']})")
            return
        self.result["not_run"] = [one for one in self.result["not_run"] if one["label"] != label(run)]
        self.result["runs"] = [one for one in self.result["runs"] if one not in same] + [run]
        self._follow(entry, run, flags, count)

    def _steps(self, entry: Entry, run: Mapping[str, Any]) -> tuple[int, str]:
        """How many steps of a run there is time for, and if there is none, why."""
        work, least = self.work(entry), self.given.warm_up + 1
        count = self.budget.steps(work, CHAT_STEPS if run["chat"] else self.given.steps, least)
        start, step = self.budget.expected(work)
        expected = f"a start of {start:.0f} s and {least} steps of {step:.0f} s are expected"
        return count, "" if count else f"{expected}, and {max(self.budget.left, 0):.0f} s are left"

    def _fitting(self, entry: Entry, run: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any] | None:
        """The flags of a run without checkpointing if it fits without, or as they are; None if it does not fit."""
        lean = {name: value for name, value in flags.items() if name != CHECKPOINTING}
        for tried in (lean, flags):
            plan = self._plan(entry, tried)
            run |= {"checkpointing": CHECKPOINTING in tried, "plan": plan.word}
            run["planned_gib"] = max(getattr(plan, phase) for phase in PHASES) / GIB
            if plan.word == "fits":
                return tried
        return None

    def _plan(self, entry: Entry, flags: Mapping[str, Any]) -> Any:
        """The planned memory. OpenRLHF's own command is planned as a plain run of the same algorithm."""
        kind = KINDS[entry.kind]
        words = [*steps.words_of(kind, flags), *self.more]
        return planned(kind, self.shape(entry), words, self.sheet, self.size)

    def _follow(self, entry: Entry, run: dict[str, Any], flags: Mapping[str, Any], count: int) -> None:
        """Run an entry's command, and keep each of its steps as it comes."""
        place = self.folder / "run"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        places = {"ckpt.path": place / "checkpoints", "ckpt.output_dir": place / "model"}
        places |= {"run.dir": place, "run.name": "run", "train.seed": run["round"]}
        log, kind = place / "output.log", KINDS[entry.kind]
        words = [serving.python(), *program_of(kind), *words_of(entry, {**flags, **places}, self.more)]
        begun, samples = time.time(), len(self.watch.samples)
        run |= {"measured": 0, "start_seconds": None, "missing": "the benchmark itself was stopped"}
        responses = self.given.prompts * G

        def seen(row: gpu_run.Row) -> None:
            parts = sum(
                value or 0.0 for name, value in row.items() if name.startswith("timing/") and "total" not in name
            )
            if not run["rows"]:
                run["start_seconds"] = row["end"] - begun - parts
            row["seconds"] = row["end"] - (run["rows"][-1]["end"] if run["rows"] else row["end"] - parts)
            run["rows"].append(row)
            self._number(entry, run, samples)
            left = f"; {self.budget.left:.0f} s are left" if self.budget.limited else ""
            self.say(f"  step {len(run['rows'])} of {count}: {row['seconds']:.2f} s{left}")
            self.write()

        self.say(f"{label(run)}, round {run['round']}: {count} steps")
        try:
            run["missing"] = gpu_run.follow(
                words,
                log,
                lambda: (
                    gpu_run.rows_of_record(place / "run") if kind.base else gpu_run.rows_of_openrlhf(log, responses)
                ),
                seen,
                wanted=count,
                left=lambda: self.budget.left,
                patience=self.budget.patience(self.work(entry)),
                environment=self.environment,
            )
        finally:
            run["whole_seconds"] = time.time() - begun
            self._number(entry, run, samples)
            self.write()
        if run["missing"]:
            self.say(f"  {run['missing']}")

    def _number(self, entry: Entry, run: dict[str, Any], samples: int) -> None:
        """The numbers of a run from its steps so far, if one of them counts."""
        seen = self.watch.samples[samples:]
        run["gib"] = max((sample.gib for sample in seen), default=None)
        rows = run["rows"][self.given.warm_up :]
        run["measured"] = len(rows)
        if rows:
            run["numbers"] = gpu_page.numbers(KINDS[entry.kind], rows, self.shape(entry), self.peak)
            run["busy"] = self.watch.busy(rows)
            self.budget.learn(self.work(entry), Seconds(run["start_seconds"], run["numbers"]["step"]))

    # ── The floor ──

    def floor(self, entry: Entry) -> None:
        """Measure the floors of the runs of a model that have none yet."""
        shape, name = self.shape(entry), f"{self.shape(entry).name}, the floor"
        runs = {label(run): run for run in measured(self.result) if run["model"] == shape.name and not run["chat"]}
        runs = {key: run for key, run in runs.items() if not has_floor(self.result, key)}
        if not runs:
            return
        if not self.budget.steps(self.work(entry), len(runs), 1):
            self.put_off(name, f"{max(self.budget.left, 0):.0f} s are left")
            return
        place = self.folder / "floor"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        flags = self.flags(entry, 1)
        works = {key: self._floor_work(run, flags) for key, run in runs.items()}
        settings = {
            "model": str(flags["actor.model_name_or_path"]),
            "device": "cpu" if self.given.dry_run else "cuda",
            "attention": flags["ds.attn_implementation"],
            "memory": flags["vllm.gpu_memory_utilization"],
            "max_len": flags["data.max_len"],
            "critic": any(has_critic(KINDS[run["kind"]]) for run in runs.values()),
            "works": works,
        }
        (place / "settings.json").write_text(json.dumps(settings))
        begun, firsts = time.time(), []

        def seen(row: gpu_run.Row) -> None:
            firsts.append(row["end"])
            key = row.pop("run")
            floor = self.result["floors"].setdefault(key, {})
            floor |= {part: seconds for part, seconds in row.items() if part != "end"}
            if "training" in row and works[key]["samples"]:
                numbers, critic = runs[key]["numbers"], has_critic(KINDS[runs[key]["kind"]])
                floor["mfu"] = gpu_page.training_mfu(
                    shape, works[key]["samples"], numbers["sample_tokens"], row["training"],
                    self.peak / self.given.gpus, critic=critic,
                )  # fmt: skip
            self.write()

        self.say(f"{name} of {len(runs)} runs")
        log, out = place / "output.log", place / "out.jsonl"
        missing = gpu_run.follow(
            [serving.python(), str(HERE / "gpu_floor.py"), str(place / "settings.json"), str(out)],
            log,
            lambda: gpu_run.rows_of_lines(out),
            seen,
            wanted=len(gpu_page.FLOOR_PARTS) * len(runs),
            left=lambda: self.budget.left,
            patience=self.budget.patience(self.work(entry)),
            environment=self.environment,
        )
        if firsts:
            spent = Seconds(firsts[0] - begun, (time.time() - firsts[0]) / len(runs))
            self.budget.learn(self.work(entry), spent)
        if missing:
            self.put_off(name, missing)

    def _floor_work(self, run: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
        """What gpu_floor.py must do for a mean step of a run. One GPU does its share of the work of several."""
        numbers, gpus, trained = run["numbers"], self.given.gpus, ["actor"]
        trained += ["critic"] * has_critic(KINDS[run["kind"]])
        return {
            "groups": max(1, round(numbers["responses"] / G / gpus)),
            "size": G,
            "prompt": PROMPT,
            "response": max(1, round(numbers["response_tokens"])),
            "samples": round(numbers["samples"] / gpus),
            "micro": flags["train.micro_batch_size"],
            "forward_micro": flags["rollout.micro_batch_size"],
            "trained": trained,
            "passed": [*trained, "reference"],
            "syncs": round(numbers["syncs"]),
        }


def entries(given: argparse.Namespace) -> list[Entry]:
    """What is measured in a round, in its order."""
    if given.dry_run:
        order = [Entry("tiny", kind) for kind in ("bapo_grpo", "openrlhf_grpo", "ba_ppo", FLOOR)]
    elif given.models or given.kinds:
        kinds = given.kinds or [kind for kind in (*KINDS, FLOOR)]
        order = [Entry(model, kind) for model in given.models or ["0.6b"] for kind in kinds]
    else:
        order = list(ORDER)
    return order + [Entry(CHAT, "bapo_grpo", STAGE_2)] * (given.chat is not None)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and those of the training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)  # fmt: skip
    parser.add_argument("--seconds", type=float, help="for everything; without it there is no limit")
    parser.add_argument("--models", nargs="+", choices=[*MODELS][1:], help="instead of the prepared order")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, FLOOR], help="instead of the prepared order")
    parser.add_argument("--chat", type=Path, metavar="FOLDER", help="of a real chat model, which is trained on sums")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a run")
    parser.add_argument("--warm-up", type=int, default=2, help="first steps of a run, which are not measured")
    parser.add_argument("--prompts", type=int, default=32, help="of a step")
    parser.add_argument("--tokens", type=int, default=512, help="of a response")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for page and numbers; default: results")
    parser.add_argument("--peak-tflops", type=float, help="of one GPU in bf16, dense; else by the GPU's name")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, a tiny model and 3 steps")
    given, more = parser.parse_known_args(argv)
    if given.dry_run:
        vars(given).update(DRY_RUN)
    else:
        if cpu.active():
            parser.error(
                "this machine has no GPU, and a GPU is what is measured; --dry-run tries the script without one"
            )
        given.out = given.out or RESULTS
        if not (given.models or given.kinds) and "--ds.zero_stage" in more:
            parser.error("--ds.zero_stage is given, and the prepared order sets it; give --models or --kinds too")
    if given.steps <= given.warm_up:
        parser.error(f"--steps is {given.steps}; it must be above {given.warm_up}, the steps that are not measured")
    if given.warm_up < 1:
        parser.error(
            f"--warm-up is {given.warm_up}; it must be at least 1, because the first step has no step before it"
        )
    if given.chat is not None and not given.chat.is_dir():
        parser.error(f"--chat is {given.chat}; there is no such folder")
    return given, more


def main() -> None:
    """Measure and write."""
    given, more = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by a signal"))  # so that runs are ended
    gpu_run.adopt_orphans()
    with ExitStack() as block:
        folder = Path("runs/gpu").absolute()
        if given.dry_run:
            folder = Path(block.enter_context(tempfile.TemporaryDirectory()))
        for place in (folder, *[given.out] * (given.out is not None)):
            place.mkdir(parents=True, exist_ok=True)
        benchmark = Benchmark(given, more, folder)
        os.environ["PYTHONPATH"] = python_path()  # for processes that are forked
        block.enter_context(benchmark.watch)
        block.enter_context(cpu.forked_processes())
        benchmark.environment = block.enter_context(shared_ray(4 * given.gpus, 1))
        for number in range(1, given.rounds + 1):
            for entry in entries(given):
                benchmark.measure(entry, number)
        benchmark.write()
    benchmark.say(markdown(benchmark.result))
    if not measured(benchmark.result):
        sys.exit("error: nothing was measured")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"error: {error}")
