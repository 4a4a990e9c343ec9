"""Measures which judge of mathematical answers makes the fewest mistakes, on answers that were checked by hand.

    python research/benchmarks/math_verifiers.py            # writes results/math_verifiers.{json,md}

Each case in `tests/unit/tasks/math_answers.jsonl` has the end of a response, a label, and whether a person calls the
response right. Half of the cases are near misses, and those with "limit" are judged wrongly by this project. The cases
of the category "unseen" were written after everything else was fixed. Each judge sees each case in a process of its
own, with a time and a memory limit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import multiprocessing
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import CORES, RESULTS, again, origin, write

HERE = Path(__file__).parent
CASES = HERE.parents[1] / "tests" / "unit" / "tasks" / "math_answers.jsonl"
PACKAGES = ("math-verify", "latex2sympy2_extended", "antlr4-python3-runtime", "sympy", "openrlhf", "pylatexenc")
KINDS = ("true positive", "true negative", "false positive", "false negative", "no verdict")
MEMORY = 4 * 2**30  # bytes

Judge = Callable[[str, str], bool]


def openrlhf(response: str, label: str) -> bool:
    """OpenRLHF's judge: it normalises the strings, then uses sympy's simplify."""
    from openrlhf.utils.math_utils import extract_boxed_answer, grade_answer

    answer = extract_boxed_answer(response)
    return answer is not None and grade_answer(answer, label)


def math_verify(response: str, label: str) -> bool:
    """math-verify as its documentation calls it."""
    from math_verify import parse, verify

    return verify(parse(f"${label}$"), parse(response))


def math_verify_box(response: str, label: str) -> bool:
    """math-verify, which gets only the last box."""
    from math_verify import LatexExtractionConfig, parse, verify
    from openrlhf.utils.math_utils import extract_boxed_answer

    answer = extract_boxed_answer(response)
    config = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
    if answer is None:
        return False
    return verify(*(parse(rf"\boxed{{{text}}}", config) for text in (label, answer)))


def this_project(response: str, label: str) -> bool:
    """This project's judge, tasks/math.py."""
    from bapo_openrlhf.tasks.math import score

    return score(response, label) == 1.0


# name -> (judge, the module that a process must load for it)
JUDGES: dict[str, tuple[Judge, str]] = {
    "OpenRLHF": (openrlhf, "openrlhf.utils.math_utils"),
    "math-verify": (math_verify, "math_verify"),
    "math-verify, last box": (math_verify_box, "math_verify"),
    "tasks/math.py": (this_project, "bapo_openrlhf.tasks.math, math_verify"),
}


def load_cases() -> list[dict[str, Any]]:
    """The cases, in the order of the file."""
    return [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]


def judged(judge: Judge, response: str, label: str, limit: float) -> tuple[bool | None, float]:
    """Verdict and seconds, from a process forked for the case. The verdict is None if it hung, crashed or raised."""

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        start = time.perf_counter()
        verdict = judge(response, label)
        theirs.send((verdict, time.perf_counter() - start))

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(limit) else (None, limit)
    except EOFError:
        return None, limit
    finally:
        process.kill()
        process.join()


def kind(verdict: bool | None, correct: bool) -> str:
    """Which of KINDS a verdict is."""
    if verdict is None:
        return "no verdict"
    return f"{'true' if verdict == correct else 'false'} {'positive' if verdict else 'negative'}"


def measure(name: str, cases: list[dict[str, Any]], limit: float) -> dict[str, Any]:
    """Run one judge on all cases."""
    judge, module = JUDGES[name]
    judge(r"\boxed{x}", "y")  # each case's process forks from this one, so it finds this loaded
    kinds, seconds = [], []
    for case in cases:
        verdict, took = judged(judge, case["response"], case["label"], limit)
        kinds.append(kind(verdict, case["correct"]))
        seconds.append(took)
    categories: dict[str, Counter[str]] = {}
    for case, what in zip(cases, kinds, strict=True):
        categories.setdefault(case["category"], Counter())[what] += 1
    return {
        "total": Counter(kinds),
        "categories": categories,
        "misses": [
            {"kind": what, "category": case["category"], "label": case["label"], "response": case["response"]}
            for case, what in zip(cases, kinds, strict=True)
            if not what.startswith("true")
        ],
        "seconds": {"median": statistics.median(seconds), "max": max(seconds), "load": load_seconds(module)},
    }


def load_seconds(module: str) -> float:
    """Seconds that the import takes in a new process, without the start of Python; the median of three."""
    code = f"import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    return statistics.median(float(run.stdout) for run in runs)


def markdown(result: dict[str, Any]) -> str:
    """The page of results."""
    judges = result["judges"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        "# Judges of mathematical answers",
        "",
        f"{result['cases']} cases were checked by hand: {result['right']} are right, the others are near misses. "
        f"A judge has {result['limit']:g} s for a case. {result['machine']}; commit {result['commit']}.",
        "",
        f"{versions}",
        "",
        f"`{result['command']}`",
        "",
        "## All cases",
        "",
        "| judge | " + " | ".join(f"{kind}s" for kind in KINDS[:4]) + " | no verdict | median | longest | loading |",
        "| --- |" + " ---: |" * 8,
    ]
    for name, judge in judges.items():
        median, longest, load = (judge["seconds"][key] for key in ("median", "max", "load"))
        counts = " | ".join(str(judge["total"].get(kind, 0)) for kind in KINDS)
        lines.append(f"| {name} | {counts} | {median * 1e3:.0f} ms | {longest:.1f} s | {load:.2f} s |")
    lines += [
        "",
        "- **OpenRLHF**: `openrlhf.utils.math_utils`, a part of the training stack.",
        "- **math-verify**: `verify(parse(label), parse(response))`, as documented.",
        "- **math-verify, last box**: the same, but it gets only the last box of the response.",
        "- **tasks/math.py**: the same, after a normalisation of the answers (thousands, `4.5e33`, and its own "
        "treatment of units and bases instead of math-verify's) and a guard that compares the form of the answer with "
        "that of the label. It also compares inequalities with intervals, and has a relative tolerance for decimals. "
        f"Most of these cases were known when its rules were made; {result.get('blind', 0)}, which are marked blind, "
        "were written before the rules that they try. "
        "Another table, in docs/tasks.md, has rows whose author did not know its rules.",
        "",
        "A false positive is worse than a false negative, because the policy learns to write what is rewarded by "
        "mistake.",
        "",
        "## Mistakes by category (false positives + false negatives + no verdict)",
        "",
        "| category | cases | " + " | ".join(judges) + " |",
        "| --- |" + " ---: |" * (1 + len(judges)),
    ]
    for category, number in result["categories"].items():
        cells = []
        for judge in judges.values():
            counts = judge["categories"][category]
            cells.append(" + ".join(str(counts.get(kind, 0)) for kind in KINDS[2:]))
        lines.append(f"| {category} | {number} | " + " | ".join(cells) + " |")
    for name, judge in judges.items():
        lines += ["", f"## {name}: {len(judge['misses'])} mistakes", "", "| kind | label | end of the response |"]
        lines += ["| --- | --- | --- |"]
        for miss in judge["misses"]:
            end = " ".join(miss["response"].split())[-70:]
            label, end = (f"`{text}`".replace("|", "\\|") if text else "" for text in (miss["label"], end))
            lines.append(f"| {miss['kind']} | {label} | {end} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a judge may take for a case")
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # math-verify warns at each of its timeouts
    cases = load_cases()
    result = {
        **origin(again("research/benchmarks/math_verifiers.py"), CORES),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "limit": given.limit,
        "cases": len(cases),
        "right": sum(case["correct"] for case in cases),
        "blind": sum(case.get("blind", False) for case in cases),
        "categories": Counter(case["category"] for case in cases),
        "judges": {name: measure(name, cases, given.limit) for name in JUDGES},
    }
    write(RESULTS, "math_verifiers", result, markdown(result))


if __name__ == "__main__":
    main()
