"""What the page says, in its order: sections of figures, tables and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bapo_openrlhf.record.run_record import ANSWERS, RUN, SUMMARY
from bapo_openrlhf.workbench.report import charts, data, figures, tables
from bapo_openrlhf.workbench.report.charts import Chart, Key, Table
from bapo_openrlhf.workbench.report.figures import Comparison, by_run, by_source, in_each
from bapo_openrlhf.workbench.report.runs import Run
from bapo_openrlhf.workbench.report.words import NO_THEORY

MAX_ANSWERS = 20  # prompts of each kind and run
NO_ANSWERS = (
    f"{ANSWERS} is not there or is empty: no prompt failed, the run kept none (--run.answer_chars 0), or it is of an "
    "older version"
)


@dataclass(frozen=True)
class Verdict:
    """Conditions, such as the theorem's for a run, and whether they held; `run` is empty where there is one only."""

    run: str
    conditions: Sequence[data.Condition]
    missing: str
    words: Mapping[str, str] = field(
        default_factory=lambda: {"held": "Held", "unknown": "Not known", "broken": "Did not hold"}
    )


@dataclass(frozen=True)
class Answers:
    """Prompts of one run and one kind: those that are shown, each with what tells it from the others, of `total`."""

    run: str
    title: str
    shown: Sequence[tuple[data.Tried, str]]
    total: int
    missing: str


@dataclass(frozen=True)
class Section:
    """A part of the page under a heading of its own; folded tables open when asked for."""

    anchor: str
    title: str
    intro: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    folded: Sequence[Table] = ()
    verdicts: Sequence[Verdict] = ()
    answers: Sequence[Answers] = ()
    notes: Sequence[str] = ()


def build(runs: Sequence[Run]) -> list[Section]:
    """The page's sections."""
    page = Comparison(runs)
    return [
        _overview(page),
        Section("reward", "Reward", charts=[figures.reward(page), _reward_for_responses(page)]),
        _batches(page),
        _filtered(page),
        _accuracy(page),
        _cost(page),
        _buffers(page),
        _theory(page),
        _training(page),
        _answers(page),
        _configuration(page),
        _provenance(page),
    ]


def _overview(page: Comparison) -> Section:
    notes = []
    for run in page.runs:
        if not run.summary:
            notes.append(f"{run.name} has no {SUMMARY}: it is still going on, or it was interrupted.")
        if resumed := run.about.get("resumed"):
            notes.append(f"{run.name} was resumed {len(resumed)} time(s), last at {resumed[-1]}.")
    return Section("overview", "At a glance", tables=[tables.overview(page)], notes=notes)


def _reward_for_responses(page: Comparison) -> Chart:
    return figures.reward_for(page, "rollouts/total", "responses generated")


def _batches(page: Comparison) -> Section:
    drawn = [*figures.composition(page), by_run(page, "groups/capacity_used")]
    return Section("batches", "Where the batches came from", charts=drawn, tables=[tables.sources(page)])


def _filtered(page: Comparison) -> Section:
    return Section(
        "filtered", "What was filtered, and why", charts=figures.filtered(page), tables=[tables.outcomes(page)]
    )


def _accuracy(page: Comparison) -> Section:
    intro = (
        "The accuracy of a prompt is the mean reward of a group of G responses; it is in bin k/G when k of them were "
        "right. A pass is as many fresh groups as there are different prompts. One group says little of a prompt: some "
        "of the movement is chance."
    )
    notes = []
    for run in page.runs:
        if figures.why_no_bins(run) or not (found := data.unlocked(run.groups)).at_first:
            continue
        notes.append(
            f"{run.name}: {found.at_first:,} prompts had no right response in their first group. A later group solved "
            f"{found.ever:,} of them ({found.ever / found.at_first:.0%}), the latest group {found.now:,} "
            f"({found.now / found.at_first:.0%}). In the paper, 3 passes unlocked 31 % with BAPO and 19 % with GRPO."
        )
    pairs = tables.paired(page)
    return Section(
        "accuracy", "Prompts by accuracy", intro, figures.accuracy(page), [pairs] if pairs else [], notes=notes
    )


def _cost(page: Comparison) -> Section:
    drawn = [
        by_run(page, "rollouts/total"),
        by_run(page, "tokens/generated_total"),
        figures.reward_for(page, "hours", "hours of all steps"),
        *figures.phases(page),
    ]
    return Section("cost", "What it cost", charts=drawn, tables=[tables.cost(page)])


def _buffers(page: Comparison) -> Section:
    thresholds = {
        "threshold/c2": Key("c2", charts.PALETTE[0]),
        "threshold/c3": Key("c3", charts.PALETTE[1], "7 3"),
        "threshold/average_reward": Key("average reward", charts.MUTED, "2 2"),
    }
    replayed = {
        "staleness/replayed_steps_mean": Key("mean", charts.SOURCE_COLOURS["replayed"]),
        "staleness/replayed_steps_max": Key("oldest", charts.PALETTE[1], "7 3"),
    }
    drawn = [
        by_run(page, "buffer/hard"),
        by_run(page, "buffer/replay"),
        by_run(page, "reevaluation/improved_share"),
        *in_each(page, thresholds),
        *in_each(page, replayed),
        by_run(page, "staleness/rollout_policy"),
    ]
    return Section("buffers", "Buffers, thresholds, staleness", charts=drawn)


def _theory(page: Comparison) -> Section:
    intro = (
        "Theorem 3.2 bounds from below how much an update improves the policy; these are its conditions and numbers. "
        "TV is the total variation distance of today's policy to the one that generated a source, from 0 (equal) to 1."
    )
    constants = {f"theory/k{n}": Key(f"K{n}", charts.PALETTE[n - 1], charts.DASHES[n - 1]) for n in (1, 2, 3)}
    drawn = [
        *by_source(page, "tv/{}"),
        *in_each(page, constants, log=True),
        *by_source(page, "theory/bound_{}"),
        by_run(page, "theory/bound"),
        *by_source(page, "importance/{}_effective_share"),
    ]
    verdicts, notes = [], []
    for run in page.runs:
        found = data.conditions(run)
        verdicts.append(Verdict(page.label(run), found, "" if found else NO_THEORY))
        if bound := data.points(run.rows, "theory/bound"):
            above = sum(value > 0 for _, value in bound)
            notes.append(
                f"{run.name}: the bound was above 0, and so promised something, at {above:,} of {len(bound):,} steps."
            )
    return Section("theory", "Theory monitor", intro, drawn, verdicts=verdicts, notes=notes)


def _training(page: Comparison) -> Section:
    metrics = ("entropy_loss", "response_length", "actor_grad_norm", "kl")
    of_sources = ("length/{}", "clip/{}", "advantage/{}_abs", "value/{}_error", "value/{}_bias")
    drawn = [by_run(page, metric) for metric in metrics]
    drawn += [chart for metric in of_sources for chart in by_source(page, metric)]
    return Section("training", "Training", charts=drawn)


def _answers(page: Comparison) -> Section:
    intro = "Prompts that had a group without a right response, with sampled answers: text as it was written."
    found = []
    for run in page.runs:
        for title, tried in (
            ("Solved after a failure, the newest first", data.newly_solved(run)),
            ("Never solved, the most often tried first", data.never_solved(run)),
        ):
            parts = data.telling_parts([one.text for one in tried])
            shown = list(zip(tried, parts, strict=True))[:MAX_ANSWERS]
            found.append(Answers(page.label(run), title, shown, len(tried), "" if run.answers else NO_ANSWERS))
    return Section("answers", "Hard prompts and their answers", intro, answers=found)


def _configuration(page: Comparison) -> Section:
    known = [run for run in page.runs if run.config]
    notes = [f"{run.name} has no {RUN}: it is of an older version." for run in page.runs if not run.config]
    shown = []
    if len(known) > 1:
        different = tables.different_flags(known)
        shown = [different] if different.rows else []
        notes += [] if different.rows else ["All flags are the same."]
    folded = [tables.all_flags(known)] if known else []
    return Section("configuration", "Configuration", tables=shown, folded=folded, notes=notes)


def _provenance(page: Comparison) -> Section:
    found = tables.provenance(page)
    notes = [] if found else [f"Neither {RUN} nor {SUMMARY} says where these runs come from."]
    return Section("provenance", "Provenance", "What made these runs.", tables=[found] if found else [], notes=notes)
