"""Measures a step of the real stack: with and without the layer, for several methods, and for TRL.

    python research/benchmarks/steps.py                          # writes research/benchmarks/results/steps.{json,md}
    python research/benchmarks/steps.py --trl /path/to/python  # also TRL's GRPOTrainer, from an environment that has it

The kinds of runs take turns, and each runs several times, so that a machine that gets slower does so for all. Ratios
are within a round, to the plain OpenRLHF run with the same advantages. The setting is the quickstart's model and
prompts, 32 prompts x 8 responses, and one optimizer step a trainer step. Accuracy is measured on held-out problems, and
no evaluation is timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from report import CORES, RESULTS, opening, origin, write
from tqdm import tqdm

from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.cpu.prefork import serving
from bapo_openrlhf.record.run_record import read_evaluations, read_metrics

HERE = Path(__file__).parent
WARM_UP = 4  # not measured: the first steps do things that happen only once, and BAPO's buffers are empty
HELD_OUT = "runs/data/cd34.jsonl"
EVALUATED = {"n_samples_per_prompt": 4, "temperature": 0.6}
SETTING = {
    "train.batch_size": 256,
    "train.micro_batch_size": 128,  # the fastest of 16, 64 and 128
    "actor.lr_scheduler": "constant_with_warmup",
    "critic.lr_scheduler": "constant_with_warmup",
    "run.answer_chars": 0,
    "run.faster": "all",
}
DAPO = {
    "algo.dynamic_filtering_enable": "",
    "algo.dynamic_filtering_range": "0.01 0.99",
    "actor.eps_clip_low_high": "0.2 0.28",
    "train.num_episodes": 5,
}
THROUGH = {
    "adapt.filter": "none",
    "adapt.replay_steps": 0,
    "adapt.reevaluate_every": 0,
    "adapt.rollout_delay": 1,
}


@dataclass(frozen=True)
class Kind:
    """A kind of run.

    Attributes:
        base: name of the kind that it is compared with.
        flags: flags of `bapo-openrlhf train`; none for TRL.
        learns: whether it learns differently from the other kinds, so that its accuracy is worth a look.
    """

    name: str
    base: str
    algorithm: str = ""
    flags: dict[str, Any] = field(default_factory=dict)
    learns: bool = True


class Point(NamedTuple):
    """A run up to an evaluation.

    Attributes:
        seconds: seconds of the steps so far, without evaluations.
        responses: responses generated so far.
        trained: tokens of responses trained on so far.
        accuracy: accuracy on held-out problems, from 0 to 1.
    """

    seconds: float
    responses: float
    trained: float
    accuracy: float


KINDS = (
    Kind("GRPO, plain OpenRLHF", "GRPO, plain OpenRLHF", "grpo"),
    Kind("the layer with nothing to adapt", "GRPO, plain OpenRLHF", "bapo_grpo", THROUGH, learns=False),
    Kind("BAPO-GRPO", "GRPO, plain OpenRLHF", "bapo_grpo"),
    Kind("DAPO, plain OpenRLHF", "GRPO, plain OpenRLHF", "grpo", DAPO),
    Kind("PPO, plain OpenRLHF", "PPO, plain OpenRLHF", "ppo"),
    Kind("BA-PPO", "PPO, plain OpenRLHF", "ba_ppo"),
)
TRL = Kind("GRPO, TRL", "GRPO, plain OpenRLHF")


def words_of(kind: Kind, flags: Mapping[str, Any]) -> list[str]:
    """The command line of `bapo-openrlhf train` for this kind. Its own flags win over the others."""
    flags = {**flags, **kind.flags}
    words = [word for name, value in flags.items() for word in (f"--{name}", *str(value).split())]
    return ["--algorithm", kind.algorithm, *words]


def run(
    kind: Kind,
    folder: Path,
    flags: Mapping[str, Any],
    more: Sequence[str] = (),
    program: Sequence[str] = ("-m", "bapo_openrlhf.cli", "train"),
) -> list[dict[str, Any]]:
    """Run the stack once into `folder`; return the metrics of its steps.

    Args:
        more: words of the command line after the flags.
        program: words of the command line before the flags.

    Raises:
        RuntimeError: the run failed. The message has the end of its log.
    """
    places = {
        "run.dir": folder,
        "run.name": "run",
        "ckpt.path": folder / "checkpoints",
        "ckpt.output_dir": folder / "model",
    }
    command = [serving.python(), *program, *words_of(kind, {**flags, **places}), *more]
    with (folder / "output.log").open("w") as output:
        status = subprocess.run(command, stdout=output, stderr=output).returncode
    if status:
        raise RuntimeError(f"{kind.name} failed:\n{(folder / 'output.log').read_text()[-4000:]}")
    return read_metrics(folder / "run")


def in_turn(kinds: Sequence[Kind], rounds: int) -> Iterator[tuple[int, Kind]]:
    """(round, kind) of each run. Rounds count from 1, and every second round goes backwards. Shows a progress bar."""
    turns = [(one, kind) for one in range(1, rounds + 1) for kind in (kinds if one % 2 else reversed(kinds))]
    yield from tqdm(turns, unit="run")


def train(kind: Kind, folder: Path, steps: int, every: int, seed: int) -> dict[str, Any]:
    """Run the stack once: means over the steps after the first ones, and what was spent until each evaluation."""
    flags = SETTING | {"data.max_samples": 32 * steps, "train.num_episodes": 1, "train.seed": seed}
    if kind.learns:
        flags |= {"eval.dataset": HELD_OUT, "eval.steps": every, "ckpt.best_metric_key": "none"}
        flags |= {f"eval.{name}": value for name, value in EVALUATED.items()}
    rows = run(kind, folder, flags, ["--config", "configs/countdown/train.yaml"])[:steps]
    names = {"seconds": "timing/step_total", "responses": "rollouts/step", "trained": "tokens/trained"}
    means = {ours: statistics.mean(row[theirs] for row in rows[WARM_UP:]) for ours, theirs in names.items()}
    key = f"eval_{Path(HELD_OUT).stem}_pass1"
    points = [
        Point(
            *(sum(row[name] for row in rows[: evaluation["step"]]) for name in names.values()), accuracy=evaluation[key]
        )
        for evaluation in read_evaluations(folder / "run")
        if evaluation["step"] <= len(rows)
    ]
    return means | {"points": points}


def train_trl(python: str, folder: Path, steps: int, every: int, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """The same with TRL."""
    settings = {
        "model": "runs/base_model",
        "data": "runs/data/train.jsonl",
        "held_out": HELD_OUT,
        "evaluate_every": every,
        "evaluate_responses": EVALUATED["n_samples_per_prompt"],
        "evaluate_temperature": EVALUATED["temperature"],
        "out": str(folder / "trl.jsonl"),
        "steps": steps,
        "seed": seed,
        "prompts": 32,
        "responses": 8,
        "max_new_tokens": 24,
        "learning_rate": 5e-4,
        **options,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    words = [python, str(HERE / "trl_grpo.py"), str(folder / "settings.json")]
    here = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    subprocess.run(words, check=True, env=os.environ | {"PYTHONPATH": here}, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "trl.jsonl").read_text().splitlines()]
    responses, trained = 256.0, [256 * row["tokens"] for row in rows]
    return {
        "seconds": (rows[-1]["seconds"] - rows[WARM_UP - 1]["seconds"]) / (len(rows) - WARM_UP),
        "responses": responses,
        "trained": statistics.mean(trained[WARM_UP:]),
        "points": [
            Point(row["seconds"], responses * row["step"], sum(trained[: row["step"]]), row["accuracy"])
            for row in rows
            if row["accuracy"] is not None
        ],
    }


def reached(points: Sequence[Point], target: float) -> Point | None:
    """The point at which the accuracy reaches `target`, on straight lines between evaluations; None if it does not.

    If the first evaluation is above the target already, this is its point, because nothing before it is known.
    """
    if points and points[0].accuracy >= target:
        return points[0]
    for before, after in itertools.pairwise(points):
        if after.accuracy >= target:
            share = (target - before.accuracy) / (after.accuracy - before.accuracy)
            return Point(*(first + share * (last - first) for first, last in zip(before, after, strict=True)))
    return None


def measure(
    rounds: int, steps: int, every: int, trl: str | None, options: dict[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """Run every kind in every round; return lists over the rounds."""
    kinds = [*KINDS, *([TRL] if trl else [])]
    runs: dict[str, list[dict[str, Any]]] = {kind.name: [] for kind in kinds}
    subprocess.run([sys.executable, "examples/quickstart", "--size", "countdown", "--only-prepare"], check=True)
    with cpu.forked_processes():
        for seed, kind in in_turn(kinds, rounds):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                runs[kind.name].append(
                    train_trl(trl or "", folder, steps, every, seed, options)
                    if kind is TRL
                    else train(kind, folder, steps, every, seed)
                )
    return runs


def ratios(runs: dict[str, list[dict[str, Any]]], kind: Kind, name: str) -> list[float]:
    """Ratios to the base, for each round."""
    return [ours[name] / theirs[name] for ours, theirs in zip(runs[kind.name], runs[kind.base], strict=True)]


def with_spread(values: list[float], digits: int = 2) -> str:
    """The median, the smallest and the largest."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def markdown(result: dict[str, Any]) -> str:
    """The page of results."""
    results, kinds = result["runs"], [kind for kind in (*KINDS, TRL) if kind.name in result["runs"]]
    text = (
        f"A run has {result['steps']} steps, and its numbers are means over the steps after the first {WARM_UP}. The "
        f"table has the median over {result['rounds']} rounds, with the smallest and the largest in brackets. Each "
        "ratio is to the plain run of the same round."
    )
    lines = [
        *opening("A step of the real stack", text, result),
        "| | seconds a step | ratio | samples a second | responses a step | tokens trained a step |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind in kinds:
        runs = results[kind.name]
        seconds = [run["seconds"] for run in runs]
        speed = [run["responses"] / run["seconds"] for run in runs]
        counts = [f"{statistics.median(run[name] for run in runs):,.0f}" for name in ("responses", "trained")]
        ratio = with_spread(ratios(results, kind, "seconds")) if kind.name != kind.base else "1"
        cells = [kind.name, with_spread(seconds), ratio, with_spread(speed, 0), *counts]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *accuracy_lines(result, kinds)]
    if TRL.name in results:
        options = ", ".join(f"{name} {value}" for name, value in result["trl"].items())
        lines += [
            "",
            f"TRL {result['trl_version']} generates with transformers, because vLLM under TRL needs a GPU; {options}. "
            "OpenRLHF and TRL both have bf16 forward passes, and KL and entropy terms of configs/countdown/train.yaml. "
            "TRL no longer has a trainer with a replay buffer.",
        ]
    return "\n".join(lines) + "\n"


def accuracy_lines(result: Mapping[str, Any], kinds: Sequence[Kind]) -> list[str]:
    """What each kind needs to reach the accuracy, and its last accuracy."""
    target = result["target"]
    lines = [
        f"The next table shows what a run needs to reach a held-out accuracy of {100 * target:g} %. Runs are evaluated "
        f"every {result['evaluate_every']} steps (`{HELD_OUT}`, {EVALUATED['n_samples_per_prompt']} responses a "
        f"problem at temperature {EVALUATED['temperature']}), with straight lines in between, and no evaluation is "
        "timed. The seed of a round is its number. Numbers are medians over the runs that reach the accuracy.",
        "",
        "| | runs that reach it | seconds | responses | tokens trained | last accuracy, % |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind in kinds:
        if kind.learns:
            runs = [[Point(*point) for point in run["points"]] for run in result["runs"][kind.name]]
            there = [point for points in runs if (point := reached(points, target))]
            cells = [kind.name, f"{len(there)} of {len(runs)}"]
            for name, digits in (("seconds", 1), ("responses", 0), ("trained", 0)):
                cells.append(with_spread([getattr(point, name) for point in there], digits) if there else "–")
            cells.append(with_spread([100 * points[-1].accuracy for points in runs], 1))
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--evaluate-every", type=int, default=8, metavar="STEPS")
    parser.add_argument("--target", type=float, default=0.25, help="held-out accuracy, from 0 to 1")
    parser.add_argument("--trl", metavar="PYTHON", help="interpreter of an environment with TRL")
    parser.add_argument("--trl-options", type=json.loads, default={}, metavar="JSON", help="micro, dtype, ...")
    given = parser.parse_args()
    options = {"micro": 256, "dtype": "float32", "attention": "sdpa", "threads": 2} | given.trl_options
    command = " ".join(["python", "research/benchmarks/steps.py", *(["--trl PYTHON"] if given.trl else [])])
    result = {
        "steps": given.steps,
        "rounds": given.rounds,
        "evaluate_every": given.evaluate_every,
        "target": given.target,
        **origin(command, CORES, "no GPU"),
        "trl": options if given.trl else {},
        "runs": measure(given.rounds, given.steps, given.evaluate_every, given.trl, options),
    }
    if given.trl:
        asked = [given.trl, "-c", "import importlib.metadata as m; print(m.version('trl'))"]
        result["trl_version"] = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    write(RESULTS, "steps", result, markdown(result))


if __name__ == "__main__":
    main()
