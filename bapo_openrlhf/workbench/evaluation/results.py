"""Estimates from the finished problems, and the files that a reader opens: results.json, .csv, .md and .png."""

from __future__ import annotations

import csv
import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bapo_openrlhf.record.run_record import provenance
from bapo_openrlhf.workbench.evaluation import estimators, paper, store
from bapo_openrlhf.workbench.evaluation.paper import Block
from bapo_openrlhf.workbench.evaluation.problems import Benchmark
from bapo_openrlhf.workbench.evaluation.request import Request
from bapo_openrlhf.workbench.evaluation.tables import Table, markdown, percent, with_interval

RESULTS = "results"
Estimate = dict[str, float]  # value, low, high


def write(
    request: Request, benchmarks: Sequence[Benchmark], settings: Mapping[str, Any], too_long: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Estimate and write the four files; returns the content of results.json.

    Args:
        too_long: problems that were left out, as (benchmark, id).
    """
    from bapo_openrlhf.workbench.evaluation.plots import draw_results

    found: dict[str, Any] = {}
    means: dict[str, np.ndarray] = {}
    for benchmark in benchmarks:
        rows = store.read_rows(request.out, benchmark.name)
        finished = [rows[problem.id] for problem in benchmark.problems if problem.id in rows]
        seed = [request.sampling.seed, zlib.crc32(benchmark.name.encode())]
        metrics, means[benchmark.name] = estimate(finished, request.ks, seed)
        found[benchmark.name] = {
            "title": benchmark.title,
            "problems": len(finished),
            "in_file": benchmark.size,
            "generator": benchmark.generator,
            "left_out": [problem for name, problem in too_long if name == benchmark.name],
            "responses": len(finished) * request.sampling.runs,
            "unjudged": sum(failure is not None for row in finished for failure in row["failures"]),
            "text_as_is": all(row["prompt"] == row["input"] for row in finished),
            "metrics": metrics,
        }
    results = {
        "name": request.name,
        "unit": "percent; tokens in tokens",
        "interval": f"{estimators.LEVEL:.0%} bootstrap over problems",
        "benchmarks": found,
        "averages": _averages(found, means, request.sampling.runs),
        "settings": settings,
        "k": list(request.ks),
        "seed": request.sampling.seed,
        **provenance(),
    }
    store.replace(request.out / f"{RESULTS}.json", json.dumps(results, indent=2) + "\n")
    store.replace(request.out / f"{RESULTS}.csv", _csv(results))
    store.replace(request.out / f"{RESULTS}.md", _markdown(results))
    draw_results(results, request.out / f"{RESULTS}.png")
    return results


# ── estimates ──


def estimate(
    rows: Sequence[Mapping[str, Any]], ks: Sequence[int], seed: Sequence[int]
) -> tuple[dict[str, Estimate], np.ndarray]:
    """The metrics of one benchmark.

    Args:
        rows: of its finished problems (`store.read_rows`), at least one, all with the same number of runs.
        ks: k of pass@k and maj@k.
        seed: of the resamples.

    Returns:
        By name avg@runs, pass@k, maj@k (where the reward file can tell a response's answer) and truncated, in percent,
        and tokens; and the resampled means of avg, percent, (resamples,).
    """
    scores = np.array([row["scores"] for row in rows], dtype=float)  # (P, runs)
    right = estimators.solved(scores)
    runs = scores.shape[1]
    by_name = {f"avg@{runs}": 100 * estimators.average(scores)}
    by_name |= {f"pass@{k}": 100 * estimators.pass_at_k(right.sum(axis=1), runs, k) for k in ks}
    if all(row["answers"] is not None for row in rows):
        for k in (k for k in ks if k > 1):  # a single vote is pass@1
            votes = [estimators.majority_at_k(row["answers"], r, k) for row, r in zip(rows, right, strict=True)]
            by_name[f"maj@{k}"] = 100 * np.array(votes)
    by_name["truncated"] = 100 * np.array([np.mean(row["truncated"]) for row in rows])
    by_name["tokens"] = np.array([np.mean(row["tokens"]) for row in rows])
    values = np.stack(list(by_name.values()), axis=1)  # (P, metrics)
    means = estimators.resampled_means(values, seed)
    metrics = {name: _estimate(values[:, i].mean(), means[:, i]) for i, name in enumerate(by_name)}
    return metrics, means[:, 0]


def _estimate(value: float, means: np.ndarray) -> Estimate:
    low, high = estimators.interval(means)
    return {"value": float(value), "low": low, "high": high}


def _averages(found: Mapping[str, Any], means: Mapping[str, np.ndarray], runs: int) -> dict[str, Estimate]:
    """By the title of each of the paper's blocks that was run as a whole: the mean over its benchmarks, each weighing
    the same. The benchmarks are resampled independently."""
    averages = {}
    for block in paper.BLOCKS:
        if all(name in found for name in block.benchmarks):
            value = np.mean([found[name]["metrics"][f"avg@{runs}"]["value"] for name in block.benchmarks])
            averages[block.title] = _estimate(value, np.mean([means[name] for name in block.benchmarks], axis=0))
    return averages


# ── tables ──


def tables(results: Mapping[str, Any]) -> list[Table]:
    """The paper's tables beside this run, for the blocks of which anything was run; then every metric."""
    found = results["benchmarks"]
    shown = [_paper_table(results, block) for block in paper.BLOCKS if any(name in found for name in block.benchmarks)]
    return [*shown, _metrics_table(results)]


def _average(results: Mapping[str, Any], benchmark: str) -> Estimate | None:
    entry = results["benchmarks"].get(benchmark)
    return entry and entry["metrics"][f"avg@{results['settings']['sampling']['runs']}"]


def _paper_table(results: Mapping[str, Any], block: Block) -> Table:
    runs = results["settings"]["sampling"]["runs"]
    more = block.rows[0].rollouts is not None  # (a) has two columns more
    columns = ("", "Method", *block.benchmarks.values(), block.average, *(("Rollouts", "Type") if more else ()))
    rows = [
        ("paper", row.method, *map(percent, (*row.values, row.average)), *((row.rollouts, row.kind) if more else ()))
        for row in block.rows
    ]
    cells = [with_interval(_average(results, name)) for name in block.benchmarks]
    average = with_interval(results["averages"].get(block.title))
    rows.append(("this run", results["name"], *cells, average, *(("-", "-") if more else ())))
    notes = [f"paper: {paper.SOURCE.removesuffix('1')}{block.part}, percent, mean of {paper.RUNS} runs"]
    if any("*" in row.method for row in block.rows):
        notes.append("*: the paper took it from the method's own paper")
    notes.append(f"this run: avg@{runs} in percent, [{results['interval']}]")
    notes += _notes(results, block.benchmarks)
    return Table(f"Table {block.part}: {block.title}", columns, rows, frozenset({len(rows) - 1}), words=2, notes=notes)


def _metrics_table(results: Mapping[str, Any]) -> Table:
    """One row a metric, one column a benchmark."""
    found = results["benchmarks"]
    names = dict.fromkeys(metric for entry in found.values() for metric in entry["metrics"])
    del names["tokens"]
    rows = [(name, *(with_interval(entry["metrics"].get(name)) for entry in found.values())) for name in names]
    rows += [("tokens", *(f"{entry['metrics']['tokens']['value']:.1f}" for entry in found.values()))]
    rows += [(count, *(str(entry[count]) for entry in found.values())) for count in ("problems", "unjudged")]
    notes = [
        f"percent, [{results['interval']}]; tokens: mean length of a response; unjudged: responses whose judge failed, "
        "counted as wrong"
    ]
    return Table(
        f"{results['name']}: every metric",
        ("", *(entry["title"] for entry in found.values())),
        rows,
        notes=[*notes, *_notes(results, found)],
    )


def _notes(results: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    """What a reader of numbers must know about this run."""
    for name in names:
        entry = results["benchmarks"].get(name)
        if entry is None:
            continue
        if entry["generator"]:
            yield f"{entry['title']}: generated problems ({entry['generator']}), not the paper's"
        if (left_out := len(entry["left_out"])) > 0:
            yield f"{entry['title']}: {left_out} problems are left out, too long for the model (--skip-long)"
        if entry["problems"] + left_out < entry["in_file"]:
            yield f"{entry['title']}: only the first {entry['problems'] + left_out} of {entry['in_file']} problems"
        if entry["unjudged"]:
            yield f"{entry['title']}: {entry['unjudged']} of {entry['responses']} responses unjudged, counted as wrong"
        if entry["text_as_is"]:
            yield f"{entry['title']}: prompts are the problems' text as it is, without a chat template"


# ── files ──


def _markdown(results: Mapping[str, Any]) -> str:
    sampling = results["settings"]["sampling"]
    facts = [
        ("model", results["settings"]["model"]["path"]),
        *((name.replace("_", " "), value) for name, value in sampling.items()),
        ("commit", results["commit"] or "not in a git checkout"),
        ("command", f"`{results['command']}`"),
        ("versions", ", ".join(f"{name} {version}" for name, version in results["versions"].items())),
    ]
    parts = [f"# {results['name']}", "", *(markdown(table) for table in tables(results)), "![results](results.png)"]
    return "\n".join([*parts, "", "## How it was made", "", *(f"- {name}: {value}" for name, value in facts), ""])


def _csv(results: Mapping[str, Any]) -> str:
    """One line a number: the paper's and this run's, in percent (tokens in tokens)."""
    file = io.StringIO()
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(("source", "base", "method", "benchmark", "metric", "value", "low", "high", "problems", "runs"))
    runs, found = results["settings"]["sampling"]["runs"], results["benchmarks"]
    for block in paper.BLOCKS:
        if not any(name in found for name in block.benchmarks):
            continue
        for row in block.rows:
            values = zip((*block.benchmarks, f"{block.title} average"), (*row.values, row.average), strict=True)
            for name, value in values:
                metric = f"avg@{paper.RUNS}"
                lines.writerow(("paper", row.base, row.method, name, metric, percent(value), "", "", "", paper.RUNS))
    for name, entry in found.items():
        for metric, value in entry["metrics"].items():
            lines.writerow(("this run", "", results["name"], name, metric, *_exact(value), entry["problems"], runs))
    for title, value in results["averages"].items():
        lines.writerow(("this run", "", results["name"], f"{title} average", f"avg@{runs}", *_exact(value), "", runs))
    return file.getvalue()


def _exact(estimate: Estimate) -> list[str]:
    return [f"{estimate[name]:.6g}" for name in ("value", "low", "high")]
