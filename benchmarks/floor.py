"""Measures how far a step of the real stack is from what this machine could do: the ratio to a floor.

    python benchmarks/floor.py                                    # writes benchmarks/results/floor.{json,md}
    python benchmarks/floor.py --sizes 25m --kinds grpo --rounds 1

Each run of the real stack records token ids, micro-batches and weight syncs (floor_classes.py). Its floor does the same
work in one process (floor_replay.py): generation with vLLM's offline `LLM`, forward and training passes in a bare
PyTorch loop, and a copy of the weights where they were synced. The kinds of runs and their floors take turns in rounds.
Results are written after each round of a size. The same command continues an interrupted measurement of one commit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import steps
from floor_replay import PARTS, Step, chosen_variants, every_variant, recorded
from floor_setting import SIZES, M, V, make_inputs
from report import CORES, RESULTS, again, opening, origin, python_path, write
from tqdm import tqdm

from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.cpu.prefork import serving

HERE = Path(__file__).parent
NAMES = {"grpo": "GRPO", "bapo_grpo": "BAPO-GRPO", "ppo": "PPO", "ba_ppo": "BA-PPO"}
KINDS = {algorithm: steps.Kind(name, name, algorithm) for algorithm, name in NAMES.items()}
THREADS = sorted({1, os.cpu_count() or 1})
# The parts of the real step that do what a part of the floor does; the rest of the step is "between the parts".
REAL = {
    "generation": ("timing/generation", "timing/reevaluation"),
    "forward": ("timing/make_experience",),
    "training": ("timing/ppo_train",),
    "weights": ("timing/broadcast",),
    "adapt": ("timing/adapt",),
}


def window(count: int, warm_up: int, v: int, m: int) -> tuple[int, int]:
    """First and last + 1 of the steps that are replayed: lcm(v, m) steps after the warm-up, counted from 0.

    Raises:
        ValueError: There are not so many steps.
    """
    last = warm_up + math.lcm(v, m)
    if count < last:
        raise ValueError(f"a run has {count} steps; {last} are needed")
    return warm_up, last


def real_seconds(rows: Sequence[Mapping[str, Any]], recording: Sequence[Step]) -> dict[str, float]:
    """Mean seconds of the parts of a step of the real stack, and `total`, the time from its start to its end.

    Args:
        rows: metrics of the steps.
        recording: the same steps.
    """
    parts = {
        part: sum(row.get(name) or 0.0 for row in rows for name in names) / len(rows) for part, names in REAL.items()
    }
    total = statistics.mean(step.seconds for step in recording)
    return parts | {"between": total - sum(parts.values()), "total": total}


def floor_of(entry: Mapping[str, Any]) -> float:
    """Seconds of the floor of a step."""
    return sum(entry["floor"][part] for part in PARTS)


def ratio(entry: Mapping[str, Any]) -> float:
    """A step of the real stack over its floor."""
    return entry["real"]["total"] / floor_of(entry)


def work_of(recording: Sequence[Step]) -> dict[str, float]:
    """What a step did on average: responses, their tokens, samples of training and weight syncs."""
    groups = [lengths for step in recording for call in step.calls for _, lengths in call]
    trained = [batch["sequences"].shape[0] for step in recording for batch in step.train.get("actor", [])]
    totals = {
        "responses": sum(map(len, groups)),
        "tokens": sum(map(sum, groups)),
        "trained": sum(trained),
        "syncs": sum(step.syncs for step in recording),
    }
    return {name: total / len(recording) for name, total in totals.items()}


def measure(
    size: str, kinds: Sequence[str], seed: int, folder: Path, before: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Run each kind once on the real stack, then all floors; return an entry for each kind.

    The first round of a kind tries all variants of its floor. The others take the fastest ones of that round.
    """
    count = steps.WARM_UP + math.lcm(V, M)
    flags, more = make_inputs(size, folder, count)
    first, last = window(count, steps.WARM_UP, V, M)
    entries, recordings = {}, {}
    for kind in tqdm(kinds, desc=f"{size}, round {seed}", unit="run"):
        place = folder / kind
        (place / "recording").mkdir(parents=True)
        os.environ["FLOOR_FOLDER"] = str(place / "recording")
        program = (str(HERE / "floor.py"), "--inside")
        rows = steps.run(KINDS[kind], place, flags | {"train.seed": seed}, more, program)
        recording = recorded(place / "recording")
        window(len(recording), steps.WARM_UP, V, M)
        recordings[kind] = str(place / "recording")
        entries[kind] = {
            "real": real_seconds(rows[first:last], recording[first:last]),
            "work": work_of(recording[first:last]),
        }
    settings = {"model": str(flags["actor.model_name_or_path"]), "max_len": 256, "threads": THREADS}
    settings |= {"window": [first, last], "recordings": recordings, "out": str(folder / "floor.json")}
    settings["variants"] = {
        kind: chosen_variants(before[kind][0]["floor"]) if before.get(kind) else every_variant(THREADS)
        for kind in kinds
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    with (folder / "floor.log").open("w") as log:
        words = [serving.python(), str(HERE / "floor_replay.py"), str(folder / "settings.json")]
        if subprocess.run(words, stdout=log, stderr=log).returncode:
            raise RuntimeError(f"the floor failed:\n{(folder / 'floor.log').read_text()[-4000:]}")
    floors = json.loads((folder / "floor.json").read_text())
    return {kind: {**entry, "floor": floors[kind]} for kind, entry in entries.items()}


def inside(words: Sequence[str]) -> int:
    """Train, in the process of a run, with the recording classes."""
    cpu.prepare_environment()
    cpu.install()

    import floor_classes

    from bapo_openrlhf.cli.main import run as command

    floor_classes.install()
    return command(["train", *words])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown. Numbers are aligned to the right."""
    return [
        f"| {' | '.join(head)} |",
        f"| --- |{' ---: |' * (len(head) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def section(size: str, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """The tables of a size: the ratio, what a step did, and where the time beyond the floor goes."""
    setting = SIZES[size]
    ratios, losses = [], []
    for kind in (kind for kind in KINDS if runs.get(kind)):
        entries, name = runs[kind], NAMES[kind]
        real = {part: statistics.median(one["real"][part] for one in entries) for part in entries[0]["real"]}
        floor = {part: statistics.median(one["floor"][part] for one in entries) for part in PARTS}
        variants = [statistics.mode(one["floor"][f"{part}_variant"] for one in entries) for part in PARTS[:3]]
        variants[0] = variants[0].split()[0]  # vLLM has its own attention
        work = {what: statistics.median(one["work"][what] for one in entries) for what in entries[0]["work"]}
        ratios.append(
            [
                name,
                steps.with_spread([one["real"]["total"] for one in entries]),
                steps.with_spread([floor_of(one) for one in entries]),
                *(f"{floor[part]:.3f}" for part in PARTS),
                "; ".join(variants),
                f"**{steps.with_spread([ratio(one) for one in entries])}**",
                f"{work['responses']:.0f} ({work['tokens']:.0f})",
                f"{work['trained']:.0f}",
            ]
        )
        beyond = [f"{real[part]:.3f} - {floor[part]:.3f}" for part in PARTS]
        lost = real["total"] - sum(floor.values())
        losses.append([name, *beyond, f"{real['adapt']:.3f}", f"{real['between']:.3f}", f"{lost:.3f}"])
    rounds = min(len(runs[kind]) for kind in runs if runs[kind])
    return [
        f"## {setting.title}",
        "",
        f"{setting.prompts} prompts x {setting.responses} responses a step; the aim is a ratio of at most "
        f"{setting.aim:g}; median of {rounds} rounds, with the smallest and the largest.",
        "",
        *table(
            ["", "real step, s", "floor, s", *PARTS, "variant", "ratio", "responses (tokens)", "samples trained"],
            ratios,
        ),
        "Where the time goes, in seconds a step: the real stack's part minus the floor's.",
        "",
        *table(["", *PARTS, "batch adaptation", "between the parts", "all beyond the floor"], losses),
    ]


def markdown(result: Mapping[str, Any]) -> str:
    """The page of results."""
    text = (
        f"A run records its steps. The floor does the work of {math.lcm(V, M)} of them, after the first "
        f"{steps.WARM_UP}, in one process. The variant is the fastest one of the first round for each part "
        f"(generation; forward; training): the number of threads ({', '.join(map(str, THREADS))}) and the kind of "
        "attention. The ratio is a step of the real stack over its floor, within a round."
    )
    lines = opening("The floor of a step", text, result)
    for size in SIZES:
        if any(result["runs"].get(size, {}).values()):
            lines += section(size, result["runs"][size])
    return "\n".join(lines).rstrip() + "\n"


def begun(header: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The result of an interrupted measurement on this machine and commit; one without runs if there is none.

    The files of results are changed by the measurement, so a commit with changed files counts as this commit.
    """
    path = folder / "floor.json"
    previous = json.loads(path.read_text()) if path.exists() else {"commit": ""}
    same = all(previous.get(name) == header[name] for name in ("machine", "versions"))
    same = same and previous["commit"].removesuffix("-dirty") == header["commit"].removesuffix("-dirty")
    return previous if same else {**header, "runs": {}}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    return parser.parse_args(argv)


def main() -> None:
    """Measure and write."""
    given = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by a signal"))  # so that the run is ended
    result = begun(origin(again("benchmarks/floor.py"), CORES, "no GPU"), RESULTS)
    os.environ["PYTHONPATH"] = python_path()
    with cpu.forked_processes():
        for number in range(1, given.rounds + 1):
            for size in given.sizes:
                of_size = result["runs"].setdefault(size, {})
                kinds = [kind for kind in given.kinds if len(of_size.setdefault(kind, [])) < number]
                if not kinds:
                    continue
                with tempfile.TemporaryDirectory() as name:
                    turn = kinds if number % 2 else kinds[::-1]
                    for kind, entry in measure(size, turn, number, Path(name), of_size).items():
                        of_size[kind].append(entry)
                write(RESULTS, "floor", result, markdown(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        sys.exit(inside(sys.argv[2:]))
    main()
