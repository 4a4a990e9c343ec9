"""Estimates from the finished problems, and the files for readers: results.json, .csv and .md.

The paper's results are those of Table 1 of "Buffer Matters" (arXiv 2602.20722, Sec. 5.1). Its rows are in paper.yaml.
"""

import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from bapo_openrlhf.record.durable import write_atomically, write_json
from bapo_openrlhf.record.run_record import provenance
from bapo_openrlhf.workbench.evaluation import estimators, store
from bapo_openrlhf.workbench.evaluation.estimators import Estimate, with_interval
from bapo_openrlhf.workbench.evaluation.problems import Benchmark, Request
from bapo_openrlhf.workbench.pages.table import Table

RESULTS = "results"
PAPER, PAPER_RUNS = "arXiv 2602.20722", 32


def write(
    request: Request, benchmarks: Sequence[Benchmark], settings: Mapping[str, Any], too_long: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Write the three files, and return results.json. `too_long` are the problems left out, as (benchmark, id)."""
    entries: dict[str, Any] = {}
    means: dict[str, np.ndarray] = {}
    for benchmark in benchmarks:
        rows = store.read_rows(request.out, benchmark.name)
        finished = [rows[problem.id] for problem in benchmark.problems if problem.id in rows]
        scores = estimators.scores_of(finished, benchmark.reward_range)
        seed = [request.sampling.seed, zlib.crc32(benchmark.name.encode())]
        metrics, means[benchmark.name] = estimate(finished, scores, request.ks, seed)
        entries[benchmark.name] = {
            "title": benchmark.title,
            "problems": len(finished),
            "in_file": benchmark.size,
            "generator": benchmark.generator,
            "left_out": [problem for name, problem in too_long if name == benchmark.name],
            "responses": len(finished) * request.sampling.runs,
            "unjudged": sum(failure is not None for row in finished for failure in row["failures"]),
            "outside": int(((scores < 0) | (scores > 1)).sum()),
            "text_as_is": all(row["prompt"] == row["input"] for row in finished),
            "reward_range": [str(end) for end in benchmark.reward_range],
            "metrics": metrics,
        }
    results = {
        "name": request.name,
        "unit": "percent; tokens in tokens",
        "interval": f"{estimators.LEVEL:.0%} bootstrap over problems",
        "benchmarks": entries,
        "averages": _averages(entries, means, request.sampling.runs),
        "settings": settings,
        "k": list(request.ks),
        **provenance(),
    }
    write_json(request.out / f"{RESULTS}.json", results)
    for ending, text in (("csv", _csv(results)), ("md", _markdown(results))):
        write_atomically(request.out / f"{RESULTS}.{ending}", text.encode())
    return results


# ── estimates ──


def estimate(
    rows: Sequence[Mapping[str, Any]], scores: np.ndarray, ks: Sequence[int], seed: Sequence[int]
) -> tuple[dict[str, Estimate], np.ndarray]:
    """The metrics of one benchmark in percent and tokens, and resampled means of its avg, shape (resamples,).

    `scores` are those of the rows, from `scores_of`.
    """
    right = scores >= estimators.SOLVED
    runs = scores.shape[1]
    by_name = {f"avg@{runs}": 100 * scores.mean(axis=1)}
    by_name |= {f"pass@{k}": 100 * estimators.pass_at_k(right.sum(axis=1), runs, k) for k in ks}
    if runs > 1 and all(row["answers"] is not None for row in rows):
        votes = [estimators.majority(row["answers"], r) for row, r in zip(rows, right, strict=True)]
        by_name[f"maj@{runs}"] = 100 * np.array(votes)
    by_name["truncated"] = 100 * np.array([np.mean(row["truncated"]) for row in rows])
    by_name["tokens"] = np.array([np.mean(row["tokens"]) for row in rows])
    values = np.stack(list(by_name.values()), axis=1)  # (P, metrics)
    means = estimators.resampled_means(values, seed)
    metrics = {name: estimators.estimate(values[:, i].mean(), means[:, i]) for i, name in enumerate(by_name)}
    return metrics, means[:, 0]


def _averages(entries: Mapping[str, Any], means: Mapping[str, np.ndarray], runs: int) -> dict[str, Estimate]:
    """The average of each complete block of the paper. Benchmarks weigh the same, and are resampled independently."""
    averages = {}
    for block in BLOCKS:
        if all(name in entries for name in block.benchmarks):
            value = np.mean([entries[name]["metrics"][f"avg@{runs}"]["value"] for name in block.benchmarks])
            resampled = np.mean([means[name] for name in block.benchmarks], axis=0)
            averages[block.title] = estimators.estimate(float(value), resampled)
    return averages


# ── the paper ──


@dataclass(frozen=True)
class Row:
    base: str  # the model that was fine-tuned
    method: str  # as printed; a star means that the paper took the row from the method's own paper
    values: tuple[float, ...]  # percent, in the order of the block's benchmarks
    average: float
    rollouts: str | None = None  # this and `kind` are only in Table 1 (a)
    kind: str | None = None


@dataclass(frozen=True)
class Block:
    """Rows that share their columns. `benchmarks` and `average` are the printed heads of these."""

    part: str
    title: str
    benchmarks: Mapping[str, str]
    average: str
    rows: tuple[Row, ...]


def _block(rows: dict[str, dict[str, list[Any]]], **fields: Any) -> Block:
    """A block from its rows: for each base model and method a number for each benchmark, the average, and the rest."""
    count = len(fields["benchmarks"])
    block_rows = [
        Row(base, method, tuple(cells[:count]), *cells[count:])
        for base, rows_of in rows.items()
        for method, cells in rows_of.items()
    ]
    return Block(**fields, rows=tuple(block_rows))


BLOCKS = tuple(_block(**block) for block in yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text("utf-8")))


def blocks_with(names: Container[str]) -> list[Block]:
    """The blocks that have at least one benchmark in `names`."""
    return [block for block in BLOCKS if any(name in names for name in block.benchmarks)]


# ── tables ──


def tables(results: Mapping[str, Any]) -> list[Table]:
    """A table of the paper with this run for each block that has a finished benchmark, and a table of all metrics."""
    blocks = blocks_with(results["benchmarks"])
    return [*(_paper_table(results, block) for block in blocks), _metrics_table(results)]


def _paper_table(results: Mapping[str, Any], block: Block) -> Table:
    entries, runs = results["benchmarks"], results["settings"]["sampling"]["runs"]
    more = block.rows[0].rollouts is not None  # Table 1 (a) has two more columns.
    columns = ("", "Method", *block.benchmarks.values(), block.average, *(("Rollouts", "Type") if more else ()))
    rows = [
        ("paper", row.method, *(f"{value:.2f}" for value in (*row.values, row.average)),
         *((row.rollouts, row.kind) if more else ()))
        for row in block.rows
    ]  # fmt: skip
    metrics = [entries[name]["metrics"][f"avg@{runs}"] if name in entries else None for name in block.benchmarks]
    cells = map(with_interval, [*metrics, results["averages"].get(block.title)])
    rows.append(("this run", results["name"], *cells, *(("-", "-") if more else ())))
    notes = [f"paper: {PAPER}, Table {block.part}, percent, mean of {PAPER_RUNS} runs"]
    if any("*" in row.method for row in block.rows):
        notes.append("*: the paper took it from the method's own paper")
    notes.append(f"this run: avg@{runs} in percent, [{results['interval']}]")
    notes += _notes(results, block.benchmarks)
    title = f"Table {block.part}: {block.title}"
    return Table.of(columns, rows, title, strong=frozenset({len(rows) - 1}), words=2, notes=notes)


def _metrics_table(results: Mapping[str, Any]) -> Table:
    entries = results["benchmarks"]
    names = dict.fromkeys(metric for entry in entries.values() for metric in entry["metrics"])
    del names["tokens"]
    rows = [(name, *(with_interval(entry["metrics"].get(name)) for entry in entries.values())) for name in names]
    rows += [("tokens", *(f"{entry['metrics']['tokens']['value']:.1f}" for entry in entries.values()))]
    rows += [(count, *(str(entry[count]) for entry in entries.values())) for count in ("problems", "unjudged")]
    note = (
        f"percent, [{results['interval']}]; tokens: mean length of a response; unjudged: responses whose judge failed, "
        "counted as wrong"
    )
    columns = ("", *(entry["title"] for entry in entries.values()))
    return Table.of(columns, rows, f"{results['name']}: every metric", notes=[note, *_notes(results, entries)])


def _notes(results: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    for name in names:
        entry = results["benchmarks"].get(name)
        if entry is None:
            continue
        title, left_out = entry["title"], len(entry["left_out"])
        if entry["generator"]:
            yield f"{title}: generated problems ({entry['generator']}), not the paper's"
        if left_out > 0:
            yield f"{title}: {left_out} problems are left out, too long for the model (--skip-long)"
        if entry["problems"] + left_out < entry["in_file"]:
            yield f"{title}: only the first {entry['problems'] + left_out} of {entry['in_file']} problems"
        if entry["unjudged"]:
            yield f"{title}: {entry['unjudged']} of {entry['responses']} responses unjudged, counted as wrong"
        if entry["outside"]:
            ends = " to ".join(entry["reward_range"])
            yield f"{title}: {entry['outside']} rewards are not in {ends}; --reward-range LOW HIGH gives their range"
        if entry["text_as_is"]:
            yield f"{title}: prompts are the problems' text as it is, without a chat template"


# ── files ──


def _markdown(results: Mapping[str, Any]) -> str:
    facts = [
        ("model", results["settings"]["model"]["path"]),
        *((name.replace("_", " "), value) for name, value in results["settings"]["sampling"].items()),
        ("commit", results["commit"] or "not in a git checkout"),
        ("command", f"`{results['command']}`"),
        ("versions", ", ".join(f"{name} {version}" for name, version in results["versions"].items())),
    ]
    parts = [f"# {results['name']}", "", *(table.markdown() for table in tables(results))]
    return "\n".join([*parts, "", "## How it was made", "", *(f"- {name}: {value}" for name, value in facts), ""])


def _csv(results: Mapping[str, Any]) -> str:
    runs, lines = results["settings"]["sampling"]["runs"], []
    for block in blocks_with(results["benchmarks"]):
        for row in block.rows:
            names = (*block.benchmarks, f"{block.title} average")
            for name, value in zip(names, (*row.values, row.average), strict=True):
                number = (f"avg@{PAPER_RUNS}", f"{value:.2f}", "", "", "", PAPER_RUNS)
                lines.append(("paper", row.base, row.method, name, *number))
    for name, entry in results["benchmarks"].items():
        for metric, value in entry["metrics"].items():
            number = (metric, *_digits(value), entry["problems"], runs)
            lines.append(("this run", "", results["name"], name, *number))
    for title, value in results["averages"].items():
        lines.append(("this run", "", results["name"], f"{title} average", f"avg@{runs}", *_digits(value), "", runs))
    columns = ["source", "base", "method", "benchmark", "metric", "value", "low", "high", "problems", "runs"]
    return pd.DataFrame(lines, columns=columns, dtype=object).to_csv(index=False, lineterminator="\n")


def _digits(estimate: Estimate) -> list[str]:
    return [f"{estimate[name]:.6g}" for name in ("value", "low", "high")]
