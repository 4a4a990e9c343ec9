"""Compares the counts that `bapo-openrlhf plan` predicts with runs that were measured.

    python research/plan.py RUNS            # writes research/results/plan.{json,md}

RUNS is the runs folder of the Countdown study (configs/studies/countdown.yaml). The plain runs (GRPO and PPO) give the
shares of groups and the mean lengths. With these, the command's own functions predict the responses and the update
tokens of every other arm. It also predicts the ratios of responses that the paper reports, from the preset of the
paper's mathematics runs.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from folders import RESULTS, ROOT
from plan_shares import measured_values
from report import CORES, opening, origin, write

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.flags.config import AdaptConfig
from bapo_openrlhf.record.run_record import read_metrics, read_run
from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.planning.constants import Constants
from bapo_openrlhf.workbench.planning.groups import average_groups, rollouts
from bapo_openrlhf.workbench.planning.workload import ALGORITHMS, Algorithm, Workload

PRESET = ROOT / "configs" / "bapo_grpo_math_r1_distill_qwen_1.5b.yaml"
BASES = {"group": "plain-group", "critic": "plain-critic"}
PAPER_ROLLOUTS = {"GRPO": 677e3, "DAPO": 1921e3, "BAPO-GRPO": 733e3}  # arXiv 2602.20722: Table 1 (a), responses
PAPER_STEPS = 471


def nested(flags: Mapping[str, Any]) -> SimpleNamespace:
    """The flags of run.json as parsed arguments, as far as `Workload` reads them."""
    args = SimpleNamespace()
    options = {name.removeprefix("adapt."): value for name, value in flags.items() if name.startswith("adapt.")}
    for name, value in flags.items():
        *parents, last = name.split(".")
        node = args
        for parent in parents:
            if not hasattr(node, parent):
                setattr(node, parent, SimpleNamespace())
            node = getattr(node, parent)
        setattr(node, last, value)
    args.adapt = AdaptConfig(**options)
    return args


def method_of(arm: str) -> Algorithm:
    """The method of an arm. DAPO has a KL penalty in the study, but not in the paper."""
    if arm.startswith("dapo"):
        return Algorithm("DAPO", dynamic=True)
    return Algorithm(arm, adapted=not arm.startswith("plain"), critic=arm.endswith("critic"))


def shares(runs: Sequence[Path], settings: Workload) -> Constants:
    """The constants with the mean shares that the runs measured, by the thresholds of `settings`."""
    each = [measured_values(run, settings) for run in runs]
    values = {name: statistics.fmean(one[name] for one in each) for name in each[0]}
    return Constants().with_values("measured", values)


def predict(method: Algorithm, settings: Workload, constants: Constants, steps: int) -> dict[str, float]:
    """Predicted responses and update tokens of a step, in the form of `measure`."""
    trained = settings.args.rollout.n_samples_per_prompt * average_groups(method, settings, constants).trained
    return {
        "rollouts": rollouts(method, settings, constants, steps) / steps,
        "tokens": trained * settings.lengths(constants)[1],
    }


def measure(run: Path) -> dict[str, float]:
    """Responses and trained tokens of a step: means over the whole run."""
    rows = read_metrics(run)
    return {
        "rollouts": rows[-1]["rollouts/total"] / len(rows),
        "tokens": rows[-1]["tokens/trained_total"] / len(rows),
    }


def validate(folder: Path) -> dict[str, Any]:
    """Predict and measure all arms that are complete in the folder."""
    arms: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.glob("*-s*")):
        if (path / "summary.json").is_file():
            arms[path.name.rpartition("-s")[0]].append(path)
    metadata = read_run(arms[BASES["group"]][0])
    result: dict[str, Any] = {
        "runs": [run.name for runs in arms.values() for run in runs],
        "study": {name: metadata[name] for name in ("commit", "versions")},
        "arms": {},
    }
    for arm, runs in arms.items():
        method, base = method_of(arm), BASES[arm.rpartition("-")[2]]
        settings = Workload(nested(read_run(runs[0])["config"]))
        constants = shares(arms[base], settings)
        if arm == BASES["group"]:
            adapted = shares(runs, Workload(nested(read_run(arms["bapo-group"][0])["config"])))
            result["shares"] = {name: getattr(adapted, name) for name in sorted(adapted.sources)}
        each = [measure(run) for run in runs]
        steps = round(statistics.fmean(len(read_metrics(run)) for run in runs))
        predicted = predict(method, settings, constants, steps)
        measured = {name: statistics.median(one[name] for one in each) for name in each[0]}
        result["arms"][arm] = {
            "runs": len(runs),
            "fitted_on": arm == base,
            "predicted": predicted,
            "measured": measured,
            "error": {name: predicted[name] / measured[name] - 1 for name in measured},
        }
    return result


def paper() -> dict[str, Any]:
    """Ratios of responses to GRPO's: predicted from the preset with the study's shares, and the paper's."""
    settings = Workload(arguments.parse(["--config", str(PRESET.relative_to(ROOT))]))
    counts = {one.name: rollouts(one, settings, Constants(), PAPER_STEPS) for one in ALGORITHMS}
    return {
        name: {
            "rollouts_to_grpo": counts[name] / counts["GRPO"],
            "paper_rollouts_to_grpo": published / PAPER_ROLLOUTS["GRPO"],
        }
        for name, published in PAPER_ROLLOUTS.items()
    }


def cell(one: Mapping[str, Any], name: str) -> str:
    """Predicted / measured (error)."""
    return f"{one['predicted'][name]:,.0f} / {one['measured'][name]:,.0f} ({one['error'][name]:+.0%})"


def markdown(result: Mapping[str, Any]) -> str:
    """The result as tables."""
    counts = [
        (arm + " (fitted on)" * one["fitted_on"], str(one["runs"]), cell(one, "rollouts"), cell(one, "tokens"))
        for arm, one in result["arms"].items()
    ]
    published = [
        (name, f"{one['rollouts_to_grpo']:.2f} / {one['paper_rollouts_to_grpo']:.2f}")
        for name, one in result["paper"].items()
    ]
    signal = 1 / result["paper"]["DAPO"]["paper_rollouts_to_grpo"]
    return "\n".join(
        [
            *opening("Predicted and measured", ABOUT, result),
            "## Counts, a step\n",
            Table.of(("arm", "runs", "responses generated", "update tokens"), counts).markdown(),
            REMARKS,
            "## What was fitted\n",
            "These shares of groups are from the GRPO runs, by the thresholds of BAPO-GRPO. They are the command's "
            "defaults:\n",
            Table.of(
                ("share", "value"), [(name, f"{value:.3f}") for name, value in result["shares"].items()]
            ).markdown(),
            "## Compared with the paper, mathematics\n",
            f"`{PRESET.relative_to(ROOT)}`, {PAPER_STEPS} steps, with the command's default constants; predicted / "
            f"paper (Table 1 (a)). DAPO's ratio is 1 / signal_share, so the paper's ratio means that {signal:.2f} of "
            "its groups had a signal.\n",
            Table.of(("method", "ratio of rollouts to GRPO's"), published).markdown(),
        ]
    )


ABOUT = (
    "Cells are predicted / measured (relative error). The measurements are records of the Countdown study "
    "([the first study](../first_study.md#methods-against-each-other)), with a model of 0.8M parameters: the "
    "mean over a run's steps, then the median over seeds. Shares of groups and lengths are those of the runs of GRPO "
    "and PPO. The functions of `bapo-openrlhf plan` predict everything else."
)
REMARKS = """\
- **DAPO generates more than predicted.** Its ratio is 1 / signal_share with GRPO's share. DAPO passes over the data
  five times instead of twice, and its own share was lower.
- **v = 8, the gaussian filter and BA-PPO train on other batches than predicted**, by about a tenth to a fifth. The
  shares are those of a plain run, but the policy of another arm has other shares.
"""


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="runs folder of the Countdown study")
    given = parser.parse_args()
    runs = given.runs.resolve()
    os.chdir(ROOT)  # presets name files by their paths in the project's folder
    result = validate(runs) | {"paper": paper()}
    command = "python research/plan.py runs/studies/countdown/runs"
    result |= origin(command, platform.system(), CORES, "no GPU")
    write(RESULTS, "plan", result, markdown(result))


if __name__ == "__main__":
    main()
