"""A study's page: all arms at their end, the claims with their verdicts, and the numbers that these rest on.

`summary` has the tables of the page that are quoted most, in Markdown: for a paper, an issue, or a README.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bapo_openrlhf.workbench.pages.page import Condition, Section, Verdict, render
from bapo_openrlhf.workbench.pages.text import many
from bapo_openrlhf.workbench.report.figures import accuracy_bins, by_source, composition, migrations
from bapo_openrlhf.workbench.report.sections import ACCURACY, THEORY
from bapo_openrlhf.workbench.study import claims, data, figures, tables
from bapo_openrlhf.workbench.study.data import ROLLOUTS, Results
from bapo_openrlhf.workbench.study.statistics import DRAWN_FLIPS, MAX_EXACT

VERDICTS = {"held": "Holds", "unknown": "Undecided", "broken": "Does not hold"}
MAX_MISSING = 8  # sentences about what is not there
MEANS = "Means over the seeds."
POOLED = "The prompts of all seeds of an arm are together here; each seed counts a prompt once."


def make_study_page(results: Results, provenance: Mapping[str, Any]) -> str:
    """The whole page, which says which runs are missing. `provenance` has facts by name about what made the study."""
    sections = build(results, provenance)
    return render([results.study.name], sections, command="study", lead=_lead(results))


def _lead(results: Results) -> str:
    verdicts = [verdict.holds for verdict in claims.judge(results)]
    lead = f"{len(results.runs)} of {len(results.study.runs)} runs are there."
    if not verdicts:
        return lead
    kinds = {True: "hold", False: "do not hold", None: "are undecided"}
    parts = [f"{verdicts.count(holds)} {words}" for holds, words in kinds.items()]
    return f"{lead} Of {many(len(verdicts), 'claim')}, {', '.join(parts)}."


def build(results: Results, provenance: Mapping[str, Any]) -> list[Section]:
    outcome = [figures.outcome(results)] if results.runs else []
    sections = [_claims(results), *(_parts(results) if results.runs else []), _configuration(results, provenance)]
    return [Section("outcome", "Outcome", figures=outcome), *(section for section in sections if section.shows)]


def _parts(results: Results) -> list[Section]:
    page, over_steps = figures.comparison_of(results, results.arms), figures.arms_over_steps
    cost = over_steps(results, ROLLOUTS, "tokens/generated_total")
    training = over_steps(results, "entropy_loss", "response_length", "actor_grad_norm")
    theory = [*over_steps(results, "theory/bound"), *by_source(page, "theory/bound_{}"), *by_source(page, "tv/{}")]
    accuracy, solutions = [*accuracy_bins(page), *migrations(page)], tables.later_solutions(results)
    return [
        _overview(results),
        _final(results),
        _learning(results),
        _targets(results),
        Section("cost", "What it cost", MEANS, cost, tables=[tables.seconds(results)]),
        Section("batches", "Where the batches came from", MEANS, composition(page), tables=[tables.sources(results)]),
        Section("accuracy", "Prompts by accuracy", f"{POOLED} {ACCURACY}", accuracy, tables=solutions),
        Section("theory", "Theory monitor", f"{THEORY} {MEANS}", theory),
        Section("training", "Training", MEANS, training),
    ]


def _claims(results: Results) -> Section:
    intro = (
        "A claim holds if the whole 95 % interval of its effect supports it, does not hold if the whole interval "
        "contradicts it, and is undecided otherwise. Effects are over pairs of runs of the same seed, with Student's "
        "interval of the differences; for rollouts, with that of the log ratios. Each claim is judged on its own, so "
        "of 40 claims that are not true, about one seems to hold by chance."
    )
    conditions = []
    for verdict in claims.judge(results):
        effect, interval = claims.effect_in_words(verdict)
        parts = [effect] if verdict.effect else []
        parts += [f"95 % interval {interval}"] if interval != "–" else []
        parts.append(many(verdict.effect.count if verdict.effect else 0, "pair"))
        note = "; ".join([", ".join(parts), *verdict.notes])
        conditions.append(Condition(f"{verdict.claim.says} ({verdict.claim.source}).", verdict.holds, note))
    if not conditions:
        return Section("claims", "Claims")
    verdicts = [Verdict("", conditions, VERDICTS)]
    return Section("claims", "Claims", intro, verdicts=verdicts, folded=[claims.claims_table(results)])


def _overview(results: Results) -> Section:
    missing = data.missing(results)
    notes = missing[:MAX_MISSING]
    if (more := len(missing) - MAX_MISSING) > 0:
        notes.append(f"… and {more} more of this kind.")
    return Section("overview", "At a glance", tables=[tables.overview(results), tables.costs(results)], notes=notes)


def _final(results: Results) -> Section:
    intro = (
        "Held-out accuracy of the last evaluation. p is that of a two-sided sign-flip test: if an arm were equal to "
        "the baseline, each seed's difference could also have had the other sign. p is the share of all flips whose "
        f"mean is at least as extreme; above {MAX_EXACT} pairs, of {DRAWN_FLIPS:,} drawn ones. With few seeds p cannot "
        "be small, so look at the intervals first. Holm's correction is over the arms of a path."
    )
    why = f": {results.why_no_accuracy}" if results.accuracy.empty else ""
    notes = [f"No run has a final accuracy{why}."] if results.final.empty else []
    changes, every = tables.tests(results), tables.every_run(results)
    return Section("final", "Final accuracy", intro, tables=changes, folded=[every], notes=notes)


def _learning(results: Results) -> Section:
    intro = (
        "Arms with the baseline of their path, which is grey and dashed. The line is the median over the seeds; the "
        "band reaches from the lower to the upper quartile. A curve ends when fewer than half of the seeds continue."
    )
    kinds = (figures.accuracy_curves, figures.reward_curves)
    charts = [figure for kind in kinds for total in ("", ROLLOUTS) for figure in kind(results, total)]
    return Section("learning", "Learning curves", intro, charts)


def _targets(results: Results) -> Section:
    intro = (
        "What had been spent at the first evaluation whose accuracy, the mean over the benchmarks, was at or above a "
        "target. There are several steps between two evaluations, so these numbers are not exact. A curve that reaches "
        "the target only once, by chance, counts too."
    )
    rows = [tables.target_costs(results, target) for target in results.study.targets]
    return Section("targets", "Until an accuracy was reached", intro, tables=rows)


def _configuration(results: Results, provenance: Mapping[str, Any]) -> Section:
    origins = [tables.arms(results), tables.provenance(provenance)]
    return Section("configuration", "Configuration and provenance", tables=origins, folded=tables.flags(results))


# ── in Markdown ──


def summary(results: Results, provenance: Mapping[str, Any]) -> str:
    """The most important tables of the page: the arms, the claims, the sources of the batches, seconds, and runs."""
    head = [f"# {results.study.name}", ""]
    head += [f"- {name}: {value}" for name, value in provenance.items() if isinstance(value, str)]
    head += [f"- {sentence}" for sentence in data.missing(results)]
    verdicts = claims.claims_table(results)
    table_of = {
        "Arms": replace(tables.overview(results), words=2),
        "What the arms spent": tables.costs(results),
        "Claims": replace(verdicts, words=len(verdicts.head)),
        "Where the groups came from": tables.sources(results),
        "Seconds": tables.seconds(results),
        "Runs": tables.every_run(results),
    }
    parts = [replace(table, title=title, notes=[table.title]).markdown() for title, table in table_of.items()]
    return "\n".join([*head, "", *parts])
