"""The numbers and the tables of the page: what became of the groups, what the runs spent, and their flags."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bapo_openrlhf.adapt.vocabulary import REASONS, shown_sources
from bapo_openrlhf.record.run_record import REWARD, SOURCES, end_means, phase_seconds
from bapo_openrlhf.workbench.pages.colours import PHASE_LABELS, SOURCE_LABELS, STATE_LABELS
from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.pages.text import duration, is_number, number
from bapo_openrlhf.workbench.report.figures import Comparison
from bapo_openrlhf.workbench.report.runs import TRIPPED, Run, tokens_spared

ALL_SECONDS = "time of all steps"


def _by_run(page: Comparison, head: str, rows: Sequence[Sequence[Any]], title: str = "") -> Table:
    return Table.of([head, *(run.name for run in page.runs)], rows, title)


# ── at a glance ──


def overview(page: Comparison) -> Table:
    facts: dict[str, Callable[[Run], Any]] = {
        "algorithm": lambda run: run.metadata.get("algorithm"),
        "seed": lambda run: value_in_words(run.metadata.get("seed")),
        "trainer steps": _progress,
        "reward, first steps": lambda run: end_means(run.curve(REWARD))[0],
        "reward, last steps": lambda run: end_means(run.curve(REWARD))[1],
        "capacity of the batches that was used": _capacity_used,
        "gap of engine and actor, right after a sync": _gap,
    }
    return _by_run(page, "", [[name, *map(fact, page.runs)] for name, fact in facts.items()])


def _progress(run: Run) -> str:
    total = run.metadata.get("total_steps")
    return f"{len(run.rows):,}" + (f" of {total:,}" if total and total != len(run.rows) else "")


def _capacity_used(run: Run) -> str | None:
    shares = run.curve("groups/capacity_used")
    return None if shares.empty else f"{shares.mean():.0%}"


def _gap(run: Run) -> str | None:
    names = ("gap/kl", "gap/absolute", "gap/cut_share")
    rows = [row for row in run.rows if row.get("gap/age") == 0 and all(is_number(row.get(name)) for name in names)]
    if not rows:
        return None
    kl, absolute, cut = (sum(row[name] for row in rows) / len(rows) for name in names)
    return f"KL {kl:.1e} a token; log-probs differ by {absolute:.1e}; {cut:.2%} of tokens would be cut"


# ── groups ──


def outcomes_of(run: Run) -> dict[str, int]:
    """How many generated groups ended in each of STATE_LABELS. States that never occurred are left out."""
    counts = {state: run.total(f"{'filtered' if state in REASONS else 'groups'}/{state}") for state in STATE_LABELS}
    counts["filtered"] = max(0, counts["filtered"] - sum(counts[reason] for reason in REASONS))
    return {state: round(count) for state, count in counts.items() if count}


def sources(page: Comparison) -> Table:
    counts = [{source: run.total(f"groups/{source}") for source in SOURCES} for run in page.runs]
    rows = [
        [SOURCE_LABELS[source], *(share(of_run[source], sum(of_run.values())) for of_run in counts)]
        for source in shown_sources({source: sum(of_run[source] for of_run in counts) for source in SOURCES})
    ]
    title = "Groups trained on, over the whole run. In the paper 40 to 60 % of them are fresh (A.6)"
    return _by_run(page, "source", rows, title)


def outcomes(page: Comparison) -> Table:
    counts = [outcomes_of(run) for run in page.runs]
    rows: list[list[Any]] = [
        [words, *(share(of_run.get(state, 0), sum(of_run.values())) for of_run in counts)]
        for state, words in STATE_LABELS.items()
        if any(state in of_run for of_run in counts)
    ]
    rows.append(["generated in all", *(number(sum(of_run.values())) for of_run in counts)])
    return _by_run(page, "what became of it", rows, "Every generated group ends in one of these states")


def share(count: float, total: float) -> str:
    """A count with its share of the total."""
    return f"{count:,.0f} ({count / total:.1%})" if total else "–"


# ── cost ──


def cost_of(run: Run) -> dict[str, float | None]:
    """What a run spent, by the names on the page (Table 2 and Fig. 9); None if the record does not say it."""
    totals = ("rollouts/total", "tokens/generated_total", "tokens/trained_total")
    responses, generated, trained = (next(reversed(run.curve(total).to_list()), None) for total in totals)
    epochs, size = (run.config.get(name) or 1 for name in ("train.max_epochs", "train.batch_size"))
    if trained is not None:
        spared = tokens_spared(run.metrics, epochs, size).sum() if TRIPPED in run.metrics else 0.0
        trained = (trained + run.total("demonstrations/tokens")) * epochs - spared
    return {
        "trainer steps": len(run.rows),
        "responses generated": responses,
        "tokens generated": generated,
        "tokens trained on": trained,
        "groups trained on": round(sum(run.total(f"groups/{source}") for source in SOURCES)),
        ALL_SECONDS: phase_seconds(run.rows).get("step_total"),
    }


def cost(page: Comparison) -> Table:
    costs = [cost_of(run) for run in page.runs]
    seconds = [of_run[ALL_SECONDS] for of_run in costs]
    by_phase = [phase_seconds(run.rows) for run in page.runs]
    last_starts = [(run.summary.get("seconds") or {}).get("whole_run") for run in page.runs]
    rows = [
        _against_first(name, [of_run[name] for of_run in costs], duration if name == ALL_SECONDS else number)
        for name in costs[0]
    ]
    phases = dict.fromkeys([*PHASE_LABELS, *(phase for of_run in by_phase for phase in of_run)])
    for phase in phases:
        values = [of_run.get(phase) for of_run in by_phase]
        if phase != "step_total" and any(value is not None for value in values):
            rows.append(_against_first(f"time: {PHASE_LABELS.get(phase, phase)}", values, duration, totals=seconds))
    if any(map(is_number, last_starts)):
        rows.append(_against_first("time of the last start, loading included", last_starts, duration))
    title = "Cost (the paper's Table 2 has the time). In brackets: share of all steps' time, ratio to the first run"
    return _by_run(page, "spent", rows, title)


def _against_first(
    name: str, values: Sequence[float | None], words: Callable, *, totals: Sequence[float | None] = ()
) -> list[Any]:
    cells: list[Any] = [name]
    for index, value in enumerate(values):
        if value is None:
            cells.append("–")
            continue
        parts = [f"{value / totals[index]:.1%}"] if totals and totals[index] else []
        parts += [f"× {value / values[0]:.2f}"] if index and values[0] else []
        cells.append(words(value) + (f" ({', '.join(parts)})" if parts else ""))
    return cells


# ── configuration ──


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The sorted names of the flags whose values are not the same in all runs. A run may also lack the flag."""
    names = sorted({name for config in configs for name in config})
    return [name for name in names if any(name not in one or one[name] != configs[0].get(name) for one in configs)]


def different_flags(runs: Sequence[Run]) -> list[Table]:
    """Flags whose values are not the same in all runs that have flags; no table for a single such run."""
    runs = [run for run in runs if run.config]
    names = differing([run.config for run in runs])
    return [_flags(runs, names, f"Different in these runs: {len(names)} flags")] if len(runs) > 1 else []


def all_flags(runs: Sequence[Run]) -> Table:
    names = sorted({name for run in runs for name in run.config})
    return _flags(runs, names, f"All {len(names)} flags")


def _flags(runs: Sequence[Run], names: Sequence[str], title: str) -> Table:
    rows = [[name, *(value_in_words(run.config.get(name, "(no such flag)")) for run in runs)] for name in names]
    return Table.of(["flag", *(run.name for run in runs)], rows, title)


def value_in_words(value: Any) -> str:
    if value is None:
        return "–"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def provenance(page: Comparison) -> list[Table]:
    """Where the runs come from; no table if nothing says it."""
    names = ("algorithm", "seed", "started", "resumed", "finished", "commit", "command")
    of_runs = [{**run.summary, **run.metadata} for run in page.runs]
    facts = {name: [of_run.get(name) for of_run in of_runs] for name in names}
    versions = [of_run.get("versions") or {} for of_run in of_runs]
    for package in dict.fromkeys(name for of_run in versions for name in of_run):
        facts[f"version of {package}"] = [of_run.get(package, "–") for of_run in versions]
    rows = [[name, *map(value_in_words, row)] for name, row in facts.items() if any(cell is not None for cell in row)]
    return [_by_run(page, "", rows)] if rows else []
