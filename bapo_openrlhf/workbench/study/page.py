"""A study's page: what was claimed and what came out, and everything that it rests on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bapo_openrlhf.workbench.report.charts import Chart
from bapo_openrlhf.workbench.report.data import Condition
from bapo_openrlhf.workbench.report.figures import accuracy_bins, by_source, composition, migrations
from bapo_openrlhf.workbench.report.page import render
from bapo_openrlhf.workbench.report.sections import Section, Verdict
from bapo_openrlhf.workbench.study import claims, data, figures, tables
from bapo_openrlhf.workbench.study.data import Results, StudyRun
from bapo_openrlhf.workbench.study.definition import Study

VERDICTS = {"held": "Holds", "unknown": "Undecided", "broken": "Does not hold"}


def make_study_page(
    study: Study,
    runs: Sequence[StudyRun],
    provenance: Mapping[str, Any],
    progress: Callable[[Iterable[Chart], int], Iterable[Chart]] | None = None,
) -> str:
    """The whole page.

    Args:
        runs: those that are there, of arms of the study; what is missing is said.
        provenance: name and value of what made the study.
        progress: wraps the charts (and their number) while they are drawn.
    """
    return render([study.name], build(study, runs, provenance), title="study", made_by="study", progress=progress)


def build(study: Study, runs: Sequence[StudyRun], provenance: Mapping[str, Any]) -> list[Section]:
    """The page's sections."""
    results = Results(study, runs)
    first = [_claims(results), _overview(results)]
    last = [_configuration(results), _provenance(provenance)]
    if not runs:
        return [*first, *last]
    return [
        *first,
        _final(results),
        _aggregates(results),
        _learning(results),
        _targets(results),
        _cost(results),
        _batches(results),
        _accuracy(results),
        _theory(results),
        _training(results),
        *last,
    ]


def _claims(results: Results) -> Section:
    intro = (
        "A claim holds where the whole 95 % interval of its effect says so, does not hold where the whole interval "
        "speaks against it, and is undecided else. Effects are over pairs of runs of the same seed: Student's interval "
        "of the differences, for rollouts that of the log ratios. Claims are judged one by one: of 40 that are not so, "
        "one may seem to hold by chance."
    )
    if not results.study.claims:
        return Section("claims", "Claims", notes=["The study makes no claim."])
    found = []
    for verdict in claims.judge(results):
        parts = []
        if verdict.effect:
            parts.append(claims.effect_in_words(verdict))
            if verdict.effect.low is not None:
                parts.append(f"95 % interval {claims.interval_in_words(verdict)}")
        parts.append(tables.count_of(verdict.effect.count if verdict.effect else 0, "pair"))
        note = "; ".join([", ".join(parts), *verdict.notes])
        found.append(Condition(f"{claims.sentence(verdict)} ({verdict.claim.source}).", verdict.holds, note))
    return Section(
        "claims", "Claims", intro, verdicts=[Verdict("", found, "", VERDICTS)], folded=[claims.table_of(results)]
    )


def _overview(results: Results) -> Section:
    planned = len(results.study.arms) * len(results.study.seeds)
    notes = [f"{len(results.runs)} of {planned} runs are there.", *data.missing(results)]
    if not results.runs:
        return Section("overview", "At a glance", notes=notes[:1])
    missing = notes[1:]
    if len(missing) > 8:
        missing = [*missing[:8], f"… and {len(missing) - 8} more of this kind."]
    return Section("overview", "At a glance", tables=[tables.overview(results)], notes=[*notes[:1], *missing])


def _final(results: Results) -> Section:
    intro = (
        "Held-out accuracy after the last step. p is of a sign-flip test: were an arm like the baseline, each seed's "
        "difference could as well have the other sign; p is the share of all flips that are at least as extreme, "
        "two-sided. With few seeds it cannot be small, whatever is true; Holm's correction is over the arms of a path. "
        "Mind the intervals first."
    )
    drawn = figures.final_accuracy(results)
    return Section(
        "final", "Final accuracy", intro, drawn, tables=tables.tests(results), folded=[tables.every_run(results)]
    )


def _aggregates(results: Results) -> Section:
    intro = (
        "After Agarwal et al. 2021 (rliable, arXiv 2108.13264): all seeds and benchmarks of an arm at once. The "
        "bootstrap draws whole runs, for a run's accuracies on the benchmarks rise and fall together; with 5 seeds its "
        "95 % cover some 85 to 90 %, with 3 some 75 %."
    )
    drawn = [*figures.interquartile_means(results), *figures.improvements(results), *figures.profiles(results)]
    return Section("aggregates", "Seeds and benchmarks together", intro, drawn)


def _learning(results: Results) -> Section:
    intro = (
        "Each arm beside the baseline of its path, grey and dashed: the median over the seeds, and the band from the "
        "lower to the upper quartile. A curve ends where fewer than half of the seeds go on."
    )
    kinds = [
        figures.accuracy_kind(results),
        figures.accuracy_kind(results, "rollouts/total"),
        figures.reward_kind(),
        figures.reward_kind("rollouts/total"),
    ]
    drawn = [chart for kind in kinds for chart in figures.against_baseline(results, kind)]
    return Section("learning", "Learning curves", intro, drawn)


def _targets(results: Results) -> Section:
    intro = (
        "What had been spent at the first evaluation at or above an accuracy, the mean over the benchmarks. "
        "Evaluations are some steps apart: so are these numbers, and a curve that touches the target by chance counts."
    )
    notes = [] if results.study.targets else ["The study names no accuracy to reach."]
    return Section("targets", "Until an accuracy was reached", intro, tables=tables.targets(results), notes=notes)


def _cost(results: Results) -> Section:
    drawn = [
        *figures.phases(results),
        *figures.compared(results, "rollouts/total"),
        *figures.compared(results, "tokens/generated_total"),
    ]
    return Section("cost", "What it cost", "Means over the seeds.", drawn, tables=[tables.seconds(results)])


def _batches(results: Results) -> Section:
    page = figures.all_arms(results)
    drawn = composition(page)
    return Section(
        "batches", "Where the batches came from", "Means over the seeds.", drawn, tables=[tables.sources(results)]
    )


def _accuracy(results: Results) -> Section:
    intro = (
        "The prompts of all seeds of an arm together, a prompt counted once a seed. The accuracy of a prompt is the "
        "mean reward of a group of G responses; it is in bin k/G when k of them were right. A pass is as many fresh "
        "groups as there are different prompts. One group says little of a prompt: some of the movement is chance."
    )
    page = figures.all_arms(results)
    found = tables.unlocked(results)
    drawn = [*accuracy_bins(page), *migrations(page, [page.last_step])]
    return Section("accuracy", "Prompts by accuracy", intro, drawn, tables=[found] if found else [])


def _theory(results: Results) -> Section:
    intro = (
        "Theorem 3.2 bounds from below how much an update improves the policy; below 0 it promises nothing. TV is the "
        "total variation distance of today's policy to the one that generated a source, from 0 (equal) to 1. Means "
        "over the seeds."
    )
    page = figures.all_arms(results)
    found = tables.theory(results)
    drawn = [*figures.compared(results, "theory/bound"), *by_source(page, "theory/bound_{}"), *by_source(page, "tv/{}")]
    return Section("theory", "Theory monitor", intro, drawn, tables=[found] if found else [])


def _training(results: Results) -> Section:
    metrics = ("entropy_loss", "response_length", "actor_grad_norm")
    drawn = [chart for metric in metrics for chart in figures.compared(results, metric)]
    return Section("training", "Training", "Means over the seeds.", drawn)


def _configuration(results: Results) -> Section:
    different = tables.flags(results)
    return Section(
        "configuration", "Configuration", tables=[tables.arms(results)], folded=[different] if different else []
    )


def _provenance(about: Mapping[str, Any]) -> Section:
    found = tables.provenance(about)
    notes = [] if found else ["Nothing says what made this study."]
    return Section("provenance", "Provenance", "What made this study.", tables=[found] if found else [], notes=notes)
