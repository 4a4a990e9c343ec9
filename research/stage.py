"""A stage of a study: some of its runs. decision_stages.py says how, and the other `*_stages.py` have some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

RATE = "actor.adam.lr"
REST = 40.0  # seconds of a run of decision_design.md that are not steps, at the least


@dataclass(frozen=True)
class Stage:
    """A part of the runs.

    Attributes:
        name: Its folder in runs/studies is `TRIAL_NAME`.
        part: Part of the design that it belongs to.
        study: Its file in research/studies, without the ending.
        seeds: Its seeds. Those of a stage of unit times are its rounds.
        seconds: Estimated seconds of a run, by method, with `parallel` of them at a time. Only these methods are run.
        grid: Learning rates of a search, in rising order; empty if it is none.
        rates_from: Name of the search that the learning rates come from, which may be one of another trial. Without it,
            they are those of the study.
        rates_of: Methods that take the rate of another method of this search: {"prefixes": "wide"}.
        flags: Flags of all runs, which win over those of the study and its arms. A learning rate in them becomes a part
            of the names of the methods, so that such an arm and one of the stage that it is beside differ.
        solved: Whether the problems that each trained model solves are counted.
        beside: Name of an earlier stage with the same seeds, with whose runs these are compared when they have ended.
        climb: Methods of a climb, step by step. Each keeps what the steps before it have gained.
        settings_from: Name of the climb whose settings all arms take. Without enough of them there are no arms.
        trial: The study that it belongs to: "decision" (decision_design.md), "fair" (fair_trial_design.md), "critic"
            (critic_design.md) or "reuse" (reuse_design.md).
        rate: The flag that a search is about, and that `rates_from` gives.
        paired: Whether runs with the same seed are compared with each other, so that they need the same kind of CPU.
        parallel: Runs at a time.
        by_mean: A rate of a search is judged by the mean of its runs, the highest one is taken, and no rate is added.
            Without it, the rule is that of `choose`.
        share: What the heights of a search are equal in: the cost of a step, if generation is this share of GRPO's.
            None: responses.
        matched: Methods that make as many optimizer steps as another one, with the method whose batches they have:
            {"matched": ("wide", "filter_only")}. See `matched_size`.
        best_of: Of these methods, only the one that the search found to be the highest is run.
        place: Name of the stage in whose folder its runs are, if it is another one.
    """

    name: str
    part: int | str
    study: str
    seeds: tuple[int, ...]
    seconds: Mapping[str, float]
    grid: tuple[float, ...] = ()
    rates_from: str = ""
    rates_of: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, object] = field(default_factory=dict)
    solved: bool = False
    beside: str = ""
    climb: tuple[tuple[str, ...], ...] = ()
    settings_from: str = ""
    trial: str = "decision"
    rate: str = RATE
    paired: bool = True
    parallel: int = 1
    by_mean: bool = False
    share: float | None = None
    matched: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    best_of: tuple[str, ...] = ()
    place: str = ""

    def folder(self, root: Path) -> Path:
        """Where its runs are, in the project's folder `root`."""
        return root / "runs" / "studies" / f"{self.trial}_{self.place or self.name}"


def resized(seconds: Mapping[str, float], step_part: float, rest: float) -> dict[str, float]:
    """Seconds of shorter or longer runs: their steps take `step_part` of the time, and start and evaluations `rest`."""
    return {method: step_part * (of_run - REST) + rest for method, of_run in seconds.items()}
