"""Measures the cost of batch adaptation at the size of the paper's math runs: time, memory, checkpoints, growth.

    python research/benchmarks/adaptation.py                    # writes results/adaptation.{json,md,png}
    python research/benchmarks/adaptation.py --groups 16 --tokens 64 --rounds 1 --results /tmp     # a short run

Each step generates 256 groups of 8 responses of 4096 tokens, and BAPO makes its batch of them with both buffers full.
The conversion of engines' answers to groups, and of groups to OpenRLHF's samples, is compared with OpenRLHF's own
padding of the same samples into forward-pass batches, which every step does anyway. The layer without the conversion is
also timed with 10 and 100 times as many groups. Their responses share one array there, because they would not fit into
memory; the layer never reads it. The result is also given as a share of the paper's step: 41.0 h for 3 epochs of 40,000
prompts in batches of 256, on 8 A100 (Table 2, GRPO). With --step-seconds it is also given as a share of a step that was
measured.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from adaptation_layer import LAYER, PERIOD, SCALES, WARM_UP, Clock, Run, World, engine_answers, layer_round
from adaptation_storage import checkpoint_round, memory_round, rounding
from report import CORES, RESULTS, again, origin, write

from bapo_openrlhf.adapt.arithmetic import deal, in_parts
from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.cpu import stack as cpu

PAPER_STEP_SECONDS = 40.97 * 3600 / (3 * math.ceil(40_000 / 256))  # 1d 16h 58m over 471 steps
CONVERSIONS = {"samples_to_groups": "answers to groups", "groups_to_samples": "groups to samples"}
ROUNDED = (2000, 4096)  # responses and their tokens
MEMORY_ROUNDS = 3  # at most, because each round starts two processes that import the stack
LEAST_GROUPS = 4  # with fewer, a round may have nothing to train on
DRAWN = {
    "layer": "the layer, a step",
    "build_batch": "build the batch",
    "hard buffer: add and evict": "hard buffer: add and evict",
    "replay buffer: sample": "replay buffer: sample",
    "replay buffer: add and evict": "replay buffer: add and evict",
}


class SampledRun(Run):
    """A run with the conversion of engines' answers, and to OpenRLHF's samples. It also times OpenRLHF's padding."""

    def __init__(self, groups: int, world: World) -> None:
        super().__init__(groups, world)
        self.handled: Counter[str] = Counter()  # samples in this round, by name

    def round(self) -> dict[str, float]:
        """Also NAME_a_sample: seconds for each of them."""
        self.handled.clear()
        seconds = super().round()
        return seconds | {f"{name}_a_sample": PERIOD * seconds[name] / count for name, count in self.handled.items()}

    def generated(self, prompts: Sequence[Prompt], weights_version: int, clock: Clock) -> list[Group]:
        """Groups made from what the rollout engines answer."""
        from bapo_openrlhf.training.trainer.generated import groups_of, usable_answers
        from bapo_openrlhf.training.trainer.samples import Answers, generated_response

        drawn, most = self.world.groups(prompts, self.step, weights_version), self.world.tokens
        answers, first = list(map(engine_answers, drawn)), self.world.uid - len(drawn)
        clock.skip()
        usable = usable_answers(
            [
                Answers(prompt, [generated_response(answer, max_len=most) for answer in prompt_answers])
                for prompt, prompt_answers in zip(prompts, answers, strict=True)
            ]
        )
        groups = groups_of(usable, first_uid=first, step=self.step, weights_version=weights_version)
        clock.lap("samples_to_groups")
        self.handled["samples_to_groups"] += sum(map(len, answers))
        return groups

    def trained(self, batch: Batch, clock: Clock) -> list[Group]:
        """The groups that are trained on, after they were also made samples and forward-pass batches."""
        from openrlhf.trainer.ppo_utils.experience import Experience

        from bapo_openrlhf.training.trainer.samples import samples_of

        groups = super().trained(batch, clock)
        clock.skip()
        samples = samples_of(groups)
        clock.lap("groups_to_samples")
        for index, sample in enumerate(samples):
            sample.index = [index]
        clock.skip()
        for share in deal([sample.sequences.shape[1] for sample in samples], self.arithmetic.ranks["actor"]):
            for positions in in_parts(share, self.arithmetic.micro_train):
                Experience.concat_experiences([samples[position] for position in positions], 0)
        clock.lap("openrlhf_padding")
        for name in ("groups_to_samples", "openrlhf_padding"):
            self.handled[name] += len(samples)
        return groups


def measure(groups: int, size: int, tokens: int, rounds: int) -> dict[str, Any]:
    """All numbers by name, each a list over the rounds."""
    cpu.prepare_environment()
    cpu.install()
    run = SampledRun(groups, World(size, tokens, shared=False))
    by_itself = {scale: Run(scale * groups, World(size, tokens, shared=True)) for scale in SCALES}
    seconds: dict[str, dict[str, list[float]]] = {"step": {}, "checkpoint": {}, "layer": {}, "memory": {}}
    for number in range(-WARM_UP, rounds):
        rows = {"step": run.round(), "checkpoint": checkpoint_round(run), "layer": layer_round(by_itself)}
        if 0 <= number < MEMORY_ROUNDS:
            rows["memory"] = memory_round(groups, size, tokens)
        for part, row in rows.items() if number >= 0 else ():
            for name, value in row.items():
                seconds[part].setdefault(name, []).append(value)
    one = run.world.groups(run.world.prompts(1), 0, 0)[0]
    return {
        "setting": {"groups": groups, "group_size": size, "tokens": tokens, "prompt_tokens": tokens // 8},
        "rounds": rounds,
        "paper_step_seconds": PAPER_STEP_SECONDS,
        "bytes_per_stored_token": one.nbytes / (size * tokens),
        "slopes": slopes(seconds["layer"], groups),
        "rounding": rounding(*ROUNDED),
        **seconds,
    }


def slopes(layer: Mapping[str, Sequence[float]], groups: int) -> dict[str, float]:
    """Slopes of log seconds over log groups, by name. 1 is linear. `layer` has seconds a group, by SCALE/NAME."""
    result = {}
    for name in (key.partition("/")[2] for key in layer if key.startswith(f"{SCALES[0]}/")):
        seconds = [scale * groups * statistics.median(layer[f"{scale}/{name}"]) for scale in SCALES]
        result[name] = float(np.polyfit(np.log(SCALES), np.log(seconds), 1)[0])
    return result


def number(value: float) -> str:
    """A number with three digits, or with all digits before the point if there are more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(values: Sequence[float], factor: float = 1.0) -> str:
    """The median, the smallest and the largest, each times `factor`."""
    middle, least, most = (number(factor * value) for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least} to {most})"


def ratios(part: Mapping[str, Sequence[float]], ours: str, theirs: str) -> str:
    """The ratio within each round."""
    return spread([one / other for one, other in zip(part[ours], part[theirs], strict=True)])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table. Numbers are aligned to the right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def markdown(result: Mapping[str, Any]) -> str:
    """The page of results."""
    setting, step, layer, saved = (result[name] for name in ("setting", "step", "layer", "checkpoint"))
    by_itself = [
        [
            "a step" if name == "layer" else name,
            *(spread(layer[f"{scale}/{name}"], 1e6) for scale in SCALES),
            f"{slope:.2f}",
        ]
        for name, slope in result["slopes"].items()
    ]
    beside = [["the layer", spread(step["layer"], 1e3), "", ratios(step, "layer", "openrlhf_padding")]]
    for name in (*CONVERSIONS, "openrlhf_padding"):
        each = f"{name}_a_sample"
        ratio = ratios(step, each, "openrlhf_padding_a_sample") if name in CONVERSIONS else "1"
        beside.append(
            [CONVERSIONS.get(name, "OpenRLHF's padding"), spread(step[name], 1e3), spread(step[each], 1e6), ratio]
        )
    kept = [
        ["the layer's groups, only the arrays", f"{result['bytes_per_stored_token']:.2f}", ""],
        ["the layer's groups", spread(result["memory"]["groups"]), ratios(result["memory"], "groups", "experience")],
        ["OpenRLHF's samples", spread(result["memory"]["experience"]), "1"],
    ]
    rounded = [
        [kind, *(f"{100 * value:.2g} %" for value in errors.values())] for kind, errors in result["rounding"].items()
    ]
    files = []
    for kind, name in (("layer", "the layer's state"), ("experience", "OpenRLHF's samples")):
        size = saved[f"{kind}_bytes"]
        cells = [spread(size, 1e-6)]
        for action in ("save", "load"):
            seconds = saved[f"{kind}_{action}"]
            speed = [bytes_ / second for bytes_, second in zip(size, seconds, strict=True)]
            cells += [spread(seconds), spread(speed, 1e-6)]
        files.append([name, *cells])
    both = [ratios(saved, f"layer_{action}", f"experience_{action}") for action in ("bytes", "save", "load")]
    files.append(["ratio", both[0], both[1], "", both[2], ""])
    everything = [sum(parts) for parts in zip(*(step[name] for name in ("layer", *CONVERSIONS)), strict=True)]
    whole = {f"the paper's step ({result['paper_step_seconds']:.0f} s)": result["paper_step_seconds"]}
    if result["step_seconds"]:
        whole[f"a measured step ({result['step_seconds']:g} s)"] = result["step_seconds"]
    shares = [
        [name, spread(step["layer"], 100 / seconds) + " %", spread(everything, 100 / seconds) + " %"]
        for name, seconds in whole.items()
    ]
    return "\n".join(
        [
            "# Cost of batch adaptation",
            "",
            f"{setting['groups']} prompts x {setting['group_size']} responses x {setting['tokens']} tokens (prompt "
            f"{setting['prompt_tokens']}), both buffers full. Numbers are medians of {result['rounds']} rounds, with "
            f"the smallest and the largest in brackets. A round is {PERIOD} steps (v = m = {PERIOD}), and "
            "each of the other measurements once. One of the steps re-evaluates. Ratios are within a round. "
            f"{result['machine']}; commit {result['commit']}.",
            "",
            f"`{result['command']}`",
            "",
            "## The layer by itself: microseconds a group",
            "",
            f"A step is {', '.join(LAYER)} together. The rows below them are their parts, each measured by itself. "
            "Buffers hold as many groups as a step generates. All responses share one array of tokens here, because "
            "100 times as many would not fit into memory; the layer never reads them. The slope is that of log "
            "seconds over log groups: 1 is linear.",
            "",
            *table(["", *(f"{scale * setting['groups']:,} groups" for scale in SCALES), "slope"], by_itself),
            "![Seconds a step over the number of groups](adaptation.png)",
            "",
            "## Compared with OpenRLHF's own padding of the same samples",
            "",
            "The ratio of the layer is for a step. The other ratios are for a sample, because not every generated "
            "sample is trained on.",
            "",
            *table(["", "ms a step", "us a sample", "ratio to the padding"], beside),
            "## Memory: bytes a stored token",
            "",
            f"The growth of a new process, in {len(result['memory']['groups'])} processes for each row.",
            "",
            *table(["", "bytes", "ratio"], kept),
            "A log-prob is a float32, which takes 4 of a generated token's 8 bytes. If it took 2 bytes, importance "
            f"ratios would have these errors, in {ROUNDED[0]:,} responses of {ROUNDED[1]:,} tokens whose negative "
            "log-probs are drawn from an exponential distribution of mean 1/2:",
            "",
            *table(["", "a token, at most", "a response, deviation", "a response, at most"], rounded),
            "## Checkpoint of the buffers",
            "",
            "The layer's checkpoint is synced to the disk, and has digests and a manifest, which are checked when it "
            "is read. The samples' checkpoint is made by `torch.save`, synced too, and read by `torch.load`. Reading "
            "is from the system's cache.",
            "",
            *table(["", "MB", "save, s", "save, MB/s", "load, s", "load, MB/s"], files),
            "## Share of a whole step",
            "",
            *table(["of", "the layer", "with the conversions"], shares),
        ]
    )


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Seconds a step over its groups."""
    import altair as alt
    import pandas as pd

    from bapo_openrlhf.workbench.pages.colours import INK, PALETTE
    from bapo_openrlhf.workbench.pages.figure import save_png

    groups = [scale * result["setting"]["groups"] for scale in SCALES]
    names = {name: f"{label} (slope {result['slopes'][name]:.2f})" for name, label in DRAWN.items()}
    rows = [
        {"groups": count, "seconds": count * statistics.median(result["layer"][f"{scale}/{name}"]), "part": label}
        for name, label in names.items()
        for scale, count in zip(SCALES, groups, strict=True)
    ]
    at = alt.Scale(type="log", nice=False)
    tens = [10.0**power for power in range(-6, 3)]
    order = list(names.values())
    shapes = ["circle", "square", "diamond", "triangle-up", "triangle-down"]  # colours are not enough for all readers
    base = alt.Chart(pd.DataFrame(rows)).encode(
        x=alt.X("groups:Q", scale=at, axis=alt.Axis(title="groups a step", values=groups, format=",d", grid=False)),
        y=alt.Y("seconds:Q", scale=alt.Scale(type="log"), axis=alt.Axis(format="~g", values=tens)),
        color=alt.Color("part:N", title=None, scale=alt.Scale(domain=order, range=[INK, *PALETTE[:4]])),
        shape=alt.Shape("part:N", title=None, scale=alt.Scale(domain=order, range=shapes)),
    )
    drawn = alt.layer(base.mark_line(), base.mark_point(filled=True, opacity=1, size=60))
    save_png(drawn.properties(width=420, height=300), path)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=256)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--step-seconds", type=float, help="of a step that was measured, for its share")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.groups < LEAST_GROUPS:
        parser.error(f"--groups is {given.groups}; it must be at least {LEAST_GROUPS}")
    result = measure(given.groups, given.size, given.tokens, given.rounds)
    result |= {"step_seconds": given.step_seconds}
    result |= origin(again("research/benchmarks/adaptation.py"), CORES, "no GPU")
    write(given.results, "adaptation", result, markdown(result))
    draw(result, given.results / "adaptation.png")


if __name__ == "__main__":
    main()
