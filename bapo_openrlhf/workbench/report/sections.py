"""The report: its sections, in the order of the page."""

from collections.abc import Sequence
from dataclasses import replace

from bapo_openrlhf.record.run_record import RUN, SUMMARY
from bapo_openrlhf.workbench.findings import staleness_findings
from bapo_openrlhf.workbench.pages.page import Section, Verdict, render
from bapo_openrlhf.workbench.pages.text import many
from bapo_openrlhf.workbench.report import figures, tables
from bapo_openrlhf.workbench.report.accuracy import hard_prompts_in_words, why_no_bins
from bapo_openrlhf.workbench.report.answers import listings
from bapo_openrlhf.workbench.report.conditions import conditions
from bapo_openrlhf.workbench.report.figures import Comparison, by_run, by_source
from bapo_openrlhf.workbench.report.opening import opening
from bapo_openrlhf.workbench.report.runs import Run

OF_STEPS = ("entropy_loss", "response_length", "actor_grad_norm", "kl", "value/explained_variance")
OF_SOURCES = ("length/{}", "clip/{}", "advantage/{}_abs", "value/{}_error", "value/{}_bias")
OF_BUFFERS = ("buffer/hard", "buffer/replay", "reevaluation/improved_share", "staleness/rollout_policy")
ACCURACY = (
    "The accuracy of a prompt is the mean reward of a group of G responses. It is in bin k/G if k of them were right. "
    "A pass is as many fresh groups as there are different prompts. One group says little about a prompt, so some of "
    "the movement is chance."
)
THEORY = (
    "Theorem 3.2 gives a lower bound on how much an update improves the policy; a bound below 0 promises nothing. TV "
    "is the total variation distance between today's policy and the policy that generated a source, from 0 (equal) to "
    "1."
)
OF_THEORY = ("tv/{}", "shift/{}", "theory/bound_{}", "theory/bound", "importance/{}_effective_share")


def make_page(runs: Sequence[Run]) -> str:
    """The report of runs of different names."""
    return render([run.name for run in runs], build(runs), command="report", lead=opening(runs))


def build(runs: Sequence[Run]) -> list[Section]:
    page = Comparison(runs)
    held_out = figures.held_out(page)
    outcome = [*held_out, replace(figures.reward(page), wide=not held_out)]
    cost = [
        figures.reward_for(page, "rollouts/total", "responses generated"),
        figures.reward_for(page, "seconds", "minutes of all steps", 60.0),
        *_over_steps(page, ("rollouts/total", "tokens/generated_total")),
    ]
    answers = [listing for run in runs for listing in listings(run, page.label(run))]
    about = "Prompts that had a group without a right response, with sampled answers: text as it was written."
    sections = [
        Section("outcome", "Outcome", figures=outcome),
        _overview(page),
        Section(
            "batches", "Where the batches came from", figures=figures.composition(page), tables=[tables.sources(page)]
        ),
        Section(
            "filtered", "What was filtered, and why", figures=figures.filtered(page), tables=[tables.outcomes(page)]
        ),
        _accuracy(page),
        Section("cost", "What it cost", figures=cost, tables=[tables.cost(page)]),
        Section(
            "buffers",
            "Buffers, thresholds, staleness",
            figures=[*_over_steps(page, OF_BUFFERS), *figures.thresholds(page), *figures.ages(page)],
        ),
        _theory(page),
        Section("training", "Training", figures=_over_steps(page, OF_STEPS + OF_SOURCES)),
        Section("others", "Numbers of the method and the rewards", figures=figures.of_others(page)),
        Section("answers", "Hard prompts and their answers", about, listings=answers),
        _configuration(page),
    ]
    return [section for section in sections if section.anchor == "outcome" or section.shows]


def _over_steps(page: Comparison, metrics: Sequence[str]) -> list[figures.Figure]:
    return [
        figure
        for metric in metrics
        for figure in (by_source(page, metric) if "{}" in metric else [by_run(page, metric)])
    ]


def _overview(page: Comparison) -> Section:
    notes = []
    for run in page.runs:
        if end := run.metadata.get("ended", {}).get("text"):
            notes.append(f"{run.name}: {end}")
        elif not run.summary:
            notes.append(f"{run.name} has no {SUMMARY}: it is still going on, or it was interrupted.")
        if times := run.metadata.get("resumed"):
            notes.append(f"{run.name} was resumed {len(times)} time(s), last at {times[-1]}.")
        for row in run.metadata.get("changed", []):
            old, new = tables.value_in_words(row["before"]), tables.value_in_words(row["now"])
            notes.append(f"{run.name}: from step {row['step']} on, {row['flag']} is {new}, and was {old}.")
        notes += [f"{run.name}: {text}" for text in staleness_findings(run.rows, many(len(run.rows), "step"))]
    return Section("overview", "At a glance", tables=[tables.overview(page)], notes=notes)


def _accuracy(page: Comparison) -> Section:
    reasons = [(run, why_no_bins(run)) for run in page.runs]
    sentences = {run.name: hard_prompts_in_words(run.groups) for run, why in reasons if not why}
    notes = [f"{name}: {text}" for name, text in sentences.items() if text]
    notes += [f"{run.name} has no accuracies: {why}." for run, why in reasons if why]
    charts = [*figures.accuracy_bins(page), *figures.migrations(page)]
    return Section("accuracy", "Prompts by accuracy", ACCURACY, charts, notes=notes)


def _theory(page: Comparison) -> Section:
    intro = f"{THEORY} The shift is a distance for each token, without the rounding of engine and actor."
    verdicts, notes = [], []
    for run in page.runs:
        of_run = conditions(run)
        verdicts += [Verdict(page.label(run), of_run)] if of_run else []
        bound = run.curve("theory/bound")
        if len(bound):
            steps = f"{(bound > 0).sum():,} of {len(bound):,} steps"
            notes.append(f"{run.name}: the bound was above 0, and so promised something, at {steps}.")
    return Section("theory", "Theory monitor", intro, _over_steps(page, OF_THEORY), verdicts=verdicts, notes=notes)


def _configuration(page: Comparison) -> Section:
    runs = [run for run in page.runs if run.config]
    notes = [f"{run.name} has no {RUN}, so its flags are not known." for run in page.runs if not run.config]
    differences = tables.different_flags(runs)
    if differences and not differences[0].rows:
        differences, notes = [], [*notes, "All flags are the same."]
    folded = [tables.all_flags(runs)] if runs else []
    content = [*differences, *tables.provenance(page)]
    return Section("configuration", "Configuration and provenance", tables=content, folded=folded, notes=notes)
