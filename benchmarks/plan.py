"""Compares what `bapo-openrlhf plan` predicts with runs that were measured.

    python benchmarks/plan.py RUNS            # writes benchmarks/results/plan.{json,md}

RUNS is the runs folder of the Countdown study (configs/studies/countdown.yaml). The plain runs (GRPO and PPO) give the
seconds for each generated response, each sample in a forward pass, each trained sample and each weight sync, and the
shares of groups. With these, the command's own functions predict the counts and the seconds by phase of every other
arm. It also predicts the ratios that the paper reports, from the preset of the paper's mathematics runs.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from report import CORES, RESULTS, origin, write

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.config import AdaptConfig
from bapo_openrlhf.record.run_record import read_metrics, read_run
from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.planning.constants import Constants, constants_of
from bapo_openrlhf.workbench.planning.groups import average_groups, groups_of_step, rollouts
from bapo_openrlhf.workbench.planning.measured import measured_values
from bapo_openrlhf.workbench.planning.plan import plan_entry
from bapo_openrlhf.workbench.planning.shapes import SHAPES
from bapo_openrlhf.workbench.planning.times import lengths, step_seconds
from bapo_openrlhf.workbench.planning.workload import ALGORITHMS, Algorithm, Workload

ROOT = Path(__file__).parents[1]
PRESET = ROOT / "configs" / "bapo_grpo_math_r1_distill_qwen_1.5b.yaml"
WARM_UP = 8  # steps left out of all times
NEAR = 30 * 60  # seconds between two starts; within them the machine was about equally busy
PHASES = ("generation", "experience", "training", "sync", "step")
TIMED = {"experience": "timing/make_experience", "training": "timing/ppo_train", "sync": "timing/broadcast"}
BASES = {"group": "plain-group", "critic": "plain-critic"}
# arXiv 2602.20722: Table 1 (a), responses; Table 2, hours on 8 A100, 471 steps.
PAPER_ROLLOUTS = {"GRPO": 677e3, "DAPO": 1921e3, "BAPO-GRPO": 733e3}
PAPER_HOURS = {"GRPO": 40 + 58 / 60, "DAPO": 63.5, "BAPO-GRPO": 46 + 37 / 60}
PAPER_STEPS = 471


@dataclass(frozen=True)
class LinearCosts:
    """Seconds in proportion to the work: the `Costs` of the machine that the study ran on.

    There is no fixed part: all steps of a plain run have one size, so it could not be told from the rest.
    """

    response: float
    forward: float
    trained: float
    weights: float

    def generation(self, responses: float, rounds: float) -> float:
        """The seconds of the responses. Several rounds cost nothing in addition here."""
        return self.response * responses

    def experience(self, samples: float) -> float:
        """In proportion to the batch."""
        return self.forward * samples

    def training(self, samples: float) -> float:
        """In proportion to the batch."""
        return self.trained * samples

    def sync(self) -> float:
        """The same for each sync."""
        return self.weights


def nested(flags: Mapping[str, Any]) -> SimpleNamespace:
    """The flags of run.json as parsed arguments, as far as `Workload` reads them."""
    args = SimpleNamespace()
    own = {name.removeprefix("adapt."): value for name, value in flags.items() if name.startswith("adapt.")}
    for name, value in flags.items():
        *parents, last = name.split(".")
        node = args
        for parent in parents:
            if not hasattr(node, parent):
                setattr(node, parent, SimpleNamespace())
            node = getattr(node, parent)
        setattr(node, last, value)
    args.adapt = AdaptConfig(**own)
    return args


def method_of(arm: str) -> Algorithm:
    """The method of an arm. DAPO has a KL penalty in the study, but not in the paper."""
    if arm.startswith("dapo"):
        return Algorithm("DAPO", dynamic=True)
    return Algorithm(arm, adapted=not arm.startswith("plain"), critic=arm.endswith("critic"))


def fit(runs: Sequence[Path]) -> LinearCosts:
    """Seconds for each kind of work: the median over all steps of all plain runs."""
    found = defaultdict(list)
    for run in runs:
        for row in read_metrics(run)[WARM_UP:]:
            samples = row["rollout/num_samples"]
            found["response"].append(row["timing/generation"] / row["rollouts/step"])
            found["forward"].append(row["timing/make_experience"] / samples)
            found["trained"].append(row["timing/ppo_train"] / samples)
            found["weights"].append(row["timing/broadcast"])
    return LinearCosts(**{name: statistics.median(values) for name, values in found.items()})


def nearest(run: Path, plain: Sequence[Path]) -> Path | None:
    """The other plain run that started nearest to a run, and within NEAR seconds of it."""

    def gap(other: Path) -> float:
        started = [datetime.fromisoformat(read_run(one)["started"]) for one in (run, other)]
        return abs((started[0] - started[1]).total_seconds())

    found = min((other for other in plain if other != run), key=gap)
    return found if gap(found) <= NEAR else None


def shares(runs: Sequence[Path], settings: Workload) -> Constants:
    """The constants with the mean shares that the runs measured, by the thresholds of `settings`."""
    each = [measured_values(run, settings) for run in runs]
    values = {name: statistics.fmean(one[name] for one in each) for name in each[0]}
    return Constants().replaced("measured", values)


def predict(
    method: Algorithm, settings: Workload, constants: Constants, costs: LinearCosts, steps: int
) -> dict[str, float]:
    """Predicted medians over the steps of a run, in the form of `measure`."""
    schedule, phases = settings.schedule(method), defaultdict(list)
    for row in range(WARM_UP + 1, steps + 1):
        again = schedule.reevaluation_due(row - 1)
        groups = groups_of_step(method, settings, constants, reevaluates=again)
        seconds = step_seconds(method, settings, constants, groups, costs,
                               together=schedule.sync_due(row - 1), synced=schedule.sync_due(row))  # fmt: skip
        phases["generation"].append(seconds["generation"] + seconds["reevaluation"])
        for phase in ("experience", "training"):
            phases[phase].append(seconds[phase])
        if schedule.sync_due(row):
            phases["sync"].append(seconds["sync"])
        phases["step"].append(sum(seconds.values()))
    found = {phase: statistics.median(values) for phase, values in phases.items()}
    batch = average_groups(method, settings, constants)
    found["rollouts"] = rollouts(method, settings, constants, steps) / steps
    found["tokens"] = settings.args.rollout.n_samples_per_prompt * batch.trained * lengths(settings, constants).response
    return found


def measure(run: Path, method: Algorithm, settings: Workload) -> dict[str, float]:
    """Medians over a run's steps without the first; responses and trained tokens are means over the whole run."""
    rows, schedule, phases = read_metrics(run), settings.schedule(method), defaultdict(list)
    for row in rows[WARM_UP:]:
        phases["generation"].append(row["timing/generation"] + (row.get("timing/reevaluation") or 0.0))
        phases["step"].append(row["timing/step_total"])
        for phase, name in TIMED.items():
            if row.get(name) is not None and (phase != "sync" or schedule.sync_due(row["step"])):
                phases[phase].append(row[name])
    found = {phase: statistics.median(values) for phase, values in phases.items()}
    found["rollouts"] = rows[-1]["rollouts/total"] / len(rows)
    found["tokens"] = rows[-1]["tokens/trained_total"] / len(rows)
    return found


def validate(folder: Path) -> dict[str, Any]:
    """Fit, predict and measure all arms that are complete in the folder."""
    arms: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.glob("*-s*")):
        if (path / "summary.json").is_file():
            arms[path.name.rpartition("-s")[0]].append(path)
    costs = {path: fit(arms[base]) for path, base in BASES.items()}
    about = read_run(arms[BASES["group"]][0])
    result: dict[str, Any] = {
        "runs": [run.name for runs in arms.values() for run in runs],
        "study": {name: about[name] for name in ("commit", "versions")},
        "costs": {BASES[path]: vars(cost) for path, cost in costs.items()},
        "arms": {},
    }
    for arm, runs in arms.items():
        method, path = method_of(arm), arm.rpartition("-")[2]
        settings = Workload(nested(read_run(runs[0])["config"]))
        constants = shares(arms[BASES[path]], settings)
        if arm == BASES["group"]:
            adapted = shares(runs, Workload(nested(read_run(arms["bapo-group"][0])["config"])))
            result["shares"] = {name: getattr(adapted, name) for name in sorted(adapted.sources)}
        each = [measure(run, method, settings) for run in runs]
        steps = round(statistics.fmean(len(read_metrics(run)) for run in runs))
        predicted = predict(method, settings, constants, costs[path], steps)
        near = {run.name: (one, other) for run, one in zip(runs, each, strict=True)
                if (other := nearest(run, arms[BASES[path]])) is not None}  # fmt: skip
        paired = [
            {name: value / one[name] - 1
             for name, value in predict(method, settings, constants, fit([other]), steps).items()}
            for one, other in near.values()
        ]  # fmt: skip
        measured = {name: statistics.median(one[name] for one in each) for name in each[0]}
        result["arms"][arm] = {
            "runs": len(runs),
            "fitted_on": arm == BASES[path],
            "predicted": predicted,
            "measured": measured,
            "error": {name: predicted[name] / measured[name] - 1 for name in measured},
            "near": {run: other.name for run, (_, other) in near.items()},
            "near_error": {name: statistics.median(one[name] for one in paired) for name in PHASES} if paired else None,
            "slowest_over_fastest": max(one["step"] for one in each) / min(one["step"] for one in each),
        }
    return result


def paper() -> dict[str, Any]:
    """Ratios of responses and time to GRPO's: predicted from the preset with the study's shares, and the paper's."""
    args = arguments.parse(["--config", str(PRESET.relative_to(ROOT))])
    settings, constants = Workload(args), constants_of("A100")
    found = {}
    for method in ALGORITHMS:
        if method.name in PAPER_ROLLOUTS:
            entry = plan_entry(SHAPES["1.5B"], 8, method, settings, constants, PAPER_STEPS)
            found[method.name] = {"rollouts": entry.rollouts, "step_seconds": entry.step_seconds}
    return {
        name: {
            "rollouts_to_grpo": one["rollouts"] / found["GRPO"]["rollouts"],
            "paper_rollouts_to_grpo": PAPER_ROLLOUTS[name] / PAPER_ROLLOUTS["GRPO"],
            "step_seconds": one["step_seconds"],
            "paper_step_seconds": PAPER_HOURS[name] * 3600 / PAPER_STEPS,
            "time_to_grpo": one["step_seconds"] / found["GRPO"]["step_seconds"],
            "paper_time_to_grpo": PAPER_HOURS[name] / PAPER_HOURS["GRPO"],
        }
        for name, one in found.items()
    }


def cell(one: Mapping[str, Any], name: str, digits: str) -> str:
    """Predicted / measured (error)."""
    return f"{one['predicted'][name]:{digits}} / {one['measured'][name]:{digits}} ({one['error'][name]:+.0%})"


def share_cell(one: Mapping[str, Any], name: str) -> str:
    """The same for the share of a phase in generation, experience and training together."""
    parts = [one[kind][name] / sum(one[kind][part] for part in PHASES[:3]) for kind in ("predicted", "measured")]
    return f"{parts[0]:.0%} / {parts[1]:.0%}"


def markdown(result: Mapping[str, Any]) -> str:
    """The result as tables."""
    arms = result["arms"]
    names = {arm: arm + (" (fitted on)" if one["fitted_on"] else "") for arm, one in arms.items()}
    counts = [
        (names[a], str(o["runs"]), cell(o, "rollouts", ",.0f"), cell(o, "tokens", ",.0f")) for a, o in arms.items()
    ]
    times = [
        (names[a], *(cell(o, phase, ".2f") for phase in PHASES), f"x {o['slowest_over_fastest']:.1f}")
        for a, o in arms.items()
    ]
    near = [
        (names[a], f"{len(o['near'])} of {o['runs']}", *(f"{o['near_error'][phase]:+.0%}" for phase in PHASES))
        for a, o in arms.items()
        if o["near_error"] and not o["fitted_on"]
    ]
    parts = [(names[a], *(share_cell(o, phase) for phase in PHASES[:3])) for a, o in arms.items()]
    costs = [(base, *(f"{1e3 * value:.3g} ms" for value in one.values())) for base, one in result["costs"].items()]
    published = [
        (name, f"{o['rollouts_to_grpo']:.2f} / {o['paper_rollouts_to_grpo']:.2f}",
         f"{o['step_seconds']:.0f} / {o['paper_step_seconds']:.0f}",
         f"{o['time_to_grpo']:.2f} / {o['paper_time_to_grpo']:.2f}")
        for name, o in result["paper"].items()
    ]  # fmt: skip
    signal = 1 / result["paper"]["DAPO"]["paper_rollouts_to_grpo"]
    return "\n".join(
        [
            "# Predicted and measured\n",
            f"{result['machine']}; commit {result['commit']}.\n\n`{result['command']}`\n",
            "Cells are predicted / measured (relative error). The measurements are records of the Countdown study "
            "([Results](../../docs/results.md#methods-against-each-other)), with a model of 0.8M parameters: the "
            f"median over the steps after the first {WARM_UP}, then the median over seeds. Costs and shares of groups "
            "were fitted only to the runs of GRPO and PPO. The functions of `bapo-openrlhf plan` predict everything "
            "else. The study had no GPU, so this does not test the part for GPUs.\n",
            "## Counts, a step\n",
            Table.of(("arm", "runs", "responses generated", "update tokens"), counts).markdown(),
            "## Seconds, a step\n",
            "**These are from a shared machine of 2 cores, with two runs at a time and other work.** The last column "
            "is the step time of an arm's slowest run divided by that of its fastest, which shows the effect of the "
            "machine.\n",
            Table.of(("arm", *PHASES, "seeds"), times).markdown(),
            "## Relative error of seconds, each run predicted from the plain run nearest in time\n",
            f"Costs are fitted only to that one run, which started at most {NEAR // 60} minutes before or after. "
            "Numbers are medians over an arm's runs that have such a run. The other arms have none.\n",
            Table.of(("arm", "runs", *PHASES), near).markdown(),
            "## Parts of generation, experience and training together\n",
            "What slows all parts of a run in the same way cancels here.\n",
            Table.of(("arm", *PHASES[:3]), parts).markdown(),
            "## What was fitted\n",
            Table.of(("runs", "a response", "a sample, forward", "a sample, training", "a sync"), costs).markdown(),
            "These shares of groups are from the GRPO runs, by the thresholds of BAPO-GRPO. They are the command's "
            "defaults:\n",
            Table.of(
                ("share", "value"), [(name, f"{value:.3f}") for name, value in result["shares"].items()]
            ).markdown(),
            "## Compared with the paper, mathematics on 8 A100\n",
            f"`{PRESET.relative_to(ROOT)}`, {PAPER_STEPS} steps, with the command's default constants; predicted / "
            f"paper (Table 1 (a), Table 2). DAPO's ratio is 1 / signal_share, so the paper's ratio means that "
            f"{signal:.2f} of its groups had a signal.\n",
            Table.of(
                ("method", "ratio of rollouts to GRPO's", "seconds a step", "ratio of time to GRPO's"), published
            ).markdown(),
            REMARKS,
        ]
    )


REMARKS = """\
## Where it is wrong, and why

- **Seconds of most arms are about twice too many, and those of their weight syncs up to three times.** The costs were
  fitted to the plain runs. Most of these were made first, when the machine had more other work. Arms that ran at that
  time too (BAPO-GRPO, BA-PPO) are right within 30 %; those that ran later are not. For the same work, the runs of one
  arm differ by as much (the last column). Predicted from a plain run of the same half-hour, steps are right within a
  fifth. The effect of a busy machine cancels in the parts of a step, which are right within five points for most arms.
- **DAPO generates more than predicted**, and so takes longer. Its ratio is 1 / signal_share with GRPO's share. DAPO
  passes over the data five times instead of twice, and its own share was lower. It also waits for one replacement
  after another. Seconds in proportion to responses leave this out; `plan` counts these rounds on a GPU.
- **v = 8, the gaussian filter and BA-PPO train on other batches than predicted**, by about a tenth to a fifth. The
  shares are those of a plain run, but the policy of another arm has other shares.
- **A fixed part of a phase cannot be distinguished**, because all steps of a plain run have one size. In the arms with
  smaller batches, experience takes up to 40 % more than predicted, which suggests that there is one. Their generation
  takes 5 to 40 % more, perhaps because their rewards come from processes of their own, which plain runs do not have.
- **The paper's BAPO is slower than GRPO in mathematics, but the prediction is faster.** The prediction assumes that
  half of the batch is empty, as in the study here, and that responses to hard prompts are as long as others. The paper
  says of its mathematics runs that re-evaluation costs more than the smaller batches save (A.5). On its other two tasks
  BAPO took 0.89 and 0.74 of GRPO's time (Table 2).
- GRPO's step is right within an eighth, but this says little: utilisations and mean length are assumptions, and their
  errors may cancel.
"""


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="runs folder of the Countdown study")
    given = parser.parse_args()
    runs = given.runs.resolve()
    os.chdir(ROOT)  # presets name files by their paths in the project's folder
    result = validate(runs) | {"paper": paper()}
    command = "python benchmarks/plan.py runs/studies/countdown/runs"
    result |= origin(command, platform.system(), CORES, "no GPU")
    write(RESULTS, "plan", result, markdown(result))


if __name__ == "__main__":
    main()
