"""Comparison of two evaluations of the same problems, paired problem by problem."""

import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bapo_openrlhf.adapt.rewards import UNIT, Range, as_range
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.record.durable import write_atomically, write_json
from bapo_openrlhf.record.run_record import provenance
from bapo_openrlhf.workbench.evaluation import estimators, store
from bapo_openrlhf.workbench.evaluation.estimators import with_interval
from bapo_openrlhf.workbench.evaluation.problems import titles
from bapo_openrlhf.workbench.pages.table import Table

COMPARE = "compare"
SEED = 0  # Seed of the resamples.


class Evaluation(NamedTuple):
    """The content of an evaluation's folder: settings.json, and the rows by benchmark and problem id."""

    folder: Path
    settings: Mapping[str, Any]
    rows: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @property
    def runs(self) -> int:
        """Number of responses to each problem."""
        return self.settings["sampling"]["runs"]

    def reward_range(self, benchmark: str) -> Range:
        return as_range(self.settings["benchmarks"][benchmark].get("reward_range", UNIT))


def read(folder: Path) -> Evaluation:
    settings = store.read_settings(folder)
    evaluation = Evaluation(folder, settings, {name: store.read_rows(folder, name) for name in settings["benchmarks"]})
    for name, rows in evaluation.rows.items():
        for identity, row in rows.items():
            if len(row["scores"]) != evaluation.runs or not {"input", "label"} <= row.keys():
                raise ConfigError(
                    f"{folder / name}.jsonl is damaged: problem {identity} is no row of {evaluation.runs} runs"
                )
    return evaluation


def compare(folder_a: Path, folder_b: Path, out: Path) -> dict[str, Any]:
    """Compare B with A (B minus A), and write compare.json and compare.md; a ConfigError if they share no problem."""
    a, b = read(folder_a), read(folder_b)
    shared = [name for name in a.rows if name in b.rows]
    if not shared:
        raise ConfigError(
            f"no benchmark in common: {a.folder} has {', '.join(a.rows)}; {b.folder} has {', '.join(b.rows)}"
        )
    unique = a.settings["name"] != b.settings["name"]
    result = {
        "a": _description(a, unique=unique),
        "b": _description(b, unique=unique),
        "unit": "percent",
        "interval": f"{estimators.LEVEL:.0%} bootstrap over paired problems",
        "different_settings": _differences(a.settings, b.settings),
        "benchmarks": {name: _benchmark(name, a, b) for name in shared},
        **provenance(),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"{COMPARE}.json", result)
    write_atomically(out / f"{COMPARE}.md", _markdown(result).encode())
    return result


def _description(evaluation: Evaluation, *, unique: bool) -> dict[str, Any]:
    name = evaluation.settings["name"] + ("" if unique else f" ({evaluation.folder})")
    return {"name": name, "folder": str(evaluation.folder), "settings": evaluation.settings}


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The settings that differ, except the model and the seed. A fair comparison has none."""
    both = [{"chat_template": s["chat_template"], **s["sampling"]} for s in (a, b)]
    for settings, values in zip((a, b), both, strict=True):
        for name in a["benchmarks"].keys() & b["benchmarks"].keys():
            benchmark = settings["benchmarks"][name]
            values[f"{name}, content of the reward file"] = str(benchmark.get("reward_sha256"))[:8]
            values[f"{name}, reward range"] = " ".join(map(str, benchmark.get("reward_range", UNIT)))
    of_a, of_b = both
    names = [name for name in of_a if name != "seed" and of_a[name] != of_b.get(name)]
    return [f"{name}: {of_a[name]} and {of_b.get(name)}" for name in sorted(names)]


# ── one benchmark ──


def _benchmark(name: str, a: Evaluation, b: Evaluation) -> dict[str, Any]:
    """A problem is gained if B, but not A, solves it in at least half of its runs, and lost the other way round."""
    rows_a, rows_b = a.rows[name], b.rows[name]
    ids = sorted(rows_a.keys() & rows_b.keys(), key=_natural)
    if not ids:
        raise ConfigError(f"benchmark {name}: {a.folder} and {b.folder} have no problem in common")
    for identity in ids:
        for what in ("input", "label"):
            in_a, in_b = rows_a[identity][what], rows_b[identity][what]
            if in_a != in_b:
                raise ConfigError(
                    f"benchmark {name}, problem {identity}: the {what} is {in_a!r:.100} in one and {in_b!r:.100} in "
                    "the other; only evaluations of the same problems can be compared"
                )
    k = min(a.runs, b.runs)
    avg_a, pass_a, right_a = _values([rows_a[identity] for identity in ids], k, a.reward_range(name))
    avg_b, pass_b, right_b = _values([rows_b[identity] for identity in ids], k, b.reward_range(name))
    half_a, half_b = 2 * right_a >= a.runs, 2 * right_b >= b.runs
    differences = np.stack([avg_b - avg_a, pass_b - pass_a], axis=1)
    means = estimators.resampled_means(differences, [SEED, zlib.crc32(name.encode())])
    avg, passed = (estimators.estimate(differences[:, i].mean(), means[:, i]) for i in (0, 1))
    names = np.array(ids, dtype=object)
    return {
        "title": titles().get(name, name),
        "problems": len(ids),
        "only_in_a": len(rows_a) - len(ids),
        "only_in_b": len(rows_b) - len(ids),
        "k": k,
        "avg": {"a": float(avg_a.mean()), "b": float(avg_b.mean()), "difference": avg},
        "pass": {"a": float(pass_a.mean()), "b": float(pass_b.mean()), "difference": passed},
        "gained": names[half_b & ~half_a].tolist(),
        "lost": names[half_a & ~half_b].tolist(),
        "differences": dict(zip(ids, (avg_b - avg_a).tolist(), strict=True)),
    }


def _natural(identity: str) -> list[str | int]:
    """A key that sorts aime24-9 before aime24-10. The rows themselves are in the order in which they were finished."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", identity)]


def _values(
    rows: Sequence[Mapping[str, Any]], k: int, reward_range: Range
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """avg and pass@k in percent and the number of solved responses of each problem, each of shape (P,)."""
    scores = estimators.scores_of(rows, reward_range)
    right = (scores >= estimators.SOLVED).sum(axis=1)
    return 100 * scores.mean(axis=1), 100 * estimators.pass_at_k(right, scores.shape[1], k), right


# ── table and page ──


def table(result: Mapping[str, Any]) -> Table:
    a, b = result["a"]["name"], result["b"]["name"]
    runs = [result[side]["settings"]["sampling"]["runs"] for side in "ab"]
    rows = []
    for entry in result["benchmarks"].values():
        cells = [f"{entry['avg'][side]:.2f}" for side in "ab"]
        cells += [with_interval(entry[metric]["difference"], signed=True) for metric in ("avg", "pass")]
        cells.append(f"+{len(entry['gained'])} / -{len(entry['lost'])}")
        rows.append((entry["title"], str(entry["problems"]), *cells))
    k = min(runs)
    notes = [
        f"percent; A is {a} (avg@{runs[0]}), B is {b} (avg@{runs[1]}); [{result['interval']}]",
        "solved: in at least half of the runs; +: by B and not by A, -: by A and not by B",
    ]
    for entry in result["benchmarks"].values():
        if entry["only_in_a"] or entry["only_in_b"]:
            only = f"{entry['only_in_a']} problems only in A and {entry['only_in_b']} only in B"
            notes.append(f"{entry['title']}: {only}, left out")
    notes += [f"A and B were asked differently: {difference}" for difference in result["different_settings"]]
    columns = ("Benchmark", "problems", "A", "B", "B - A", f"pass@{k}, B - A", "solved")
    return Table.of(columns, rows, f"{b} (B) compared with {a} (A)", notes=notes)


def _markdown(result: Mapping[str, Any]) -> str:
    parts = [f"# {result['b']['name']} compared with {result['a']['name']}", "", table(result).markdown()]
    for entry in result["benchmarks"].values():
        parts += [f"## {entry['title']}", ""]
        parts += [f"- {kind}: {', '.join(entry[kind]) or 'none'}" for kind in ("gained", "lost")]
        parts += [""]
    return "\n".join(parts)
