"""A plan as a page of tables."""

from collections.abc import Mapping

import pandas as pd

from bapo_openrlhf.workbench.pages.table import Table
from bapo_openrlhf.workbench.planning.constants import GIB
from bapo_openrlhf.workbench.planning.memory import PHASES, REASONS
from bapo_openrlhf.workbench.planning.plan import Plan, Row
from bapo_openrlhf.workbench.planning.verdict import verdict
from bapo_openrlhf.workbench.planning.workload import ALGORITHMS


def page(plan: Plan) -> str:
    """The whole plan as Markdown. It can also be read in a terminal."""
    lines = _lines(plan)
    words = dict.fromkeys(row["word"] for rows in lines.values() for row in rows)
    constants = pd.DataFrame(plan.constants.rows(), dtype=object)
    constants["value"] = constants["value"].map("{:g}".format)
    parts = [
        *(f"{verdict(shape, plan.gpus, plan.workload, plan.constants, plan.gpu)}\n" for shape in plan.shapes),
        *_not_predicted(plan),
        "# Plan: predicted, not measured\n",
        f"{plan.gpu}, {plan.steps} trainer steps. All numbers are predictions from the flags and from the constants at "
        "the end; no model was loaded.\n",
        "## Groups of an average step, responses, tokens\n",
        _groups(plan),
        "## Predicted GiB on the fullest GPU: while generating / while training\n",
        _memory(lines),
        "".join(f"- {word}: {REASONS[word]}\n" for word in words if word != "fits"),
        "## Predicted buffers\n",
        _buffers(plan),
        "## Constants\n",
        Table(constants, words=5).markdown(),
    ]
    return "\n".join(parts)


def _not_predicted(plan: Plan) -> list[str]:
    """A line that says so if the flags ask for another method than BAPO."""
    adapt = plan.workload.args.adapt
    if not adapt.enabled or adapt.method == "bapo":
        return []
    return [f"adapt.method is {adapt.method}; it is not predicted, and the rows of BAPO stand for it.\n"]


def _groups(plan: Plan) -> str:
    head = ("fresh", "again", "x1", "x2", "x3", "trained", "responses", "update_tokens", "rollouts")
    counts = [plan.counts(algorithm) for algorithm in ALGORITHMS]
    rows = [(e["method"], *(e[name] for name in head), e["rollouts"] / counts[0]["rollouts"]) for e in counts]
    table = Table.of(("method", *(name.replace("_", " ").replace("x", "X") for name in head), "x GRPO"), rows)
    return table.markdown() + f'\n"rollouts" are the responses of all {plan.steps} steps.\n'


def _lines(plan: Plan) -> dict[str, list[Row]]:
    """The sizes of all models on all numbers of GPUs, by algorithm. Algorithms of the same memory share a line."""
    by_memory: dict[str, tuple[list[str], list[Row]]] = {}
    for algorithm in ALGORITHMS:
        rows = [plan.sizes(shape, gpus, algorithm) for shape in plan.shapes for gpus in plan.gpus]
        memory = [[row[name] for name in (*PHASES, "word")] for row in rows]
        by_memory.setdefault(str(memory), ([], rows))[0].append(algorithm.name)
    return {", ".join(names): rows for names, rows in by_memory.values()}


def _memory(lines: Mapping[str, list[Row]]) -> str:
    def cell(row: Row) -> str:
        word = "" if row["word"] == "fits" else f" {row['word']}"
        return f"{row['generation'] / GIB:.1f} / {max(row['experience'], row['training']) / GIB:.1f}{word}"

    rows = [
        (sizes[0]["model"], str(sizes[0]["gpus"]), sizes[0]["engine_gpus"], *map(cell, sizes))
        for sizes in zip(*lines.values(), strict=True)
    ]
    return Table.of(("model", "GPUs", "GPUs per engine", *lines), rows).markdown()


def _buffers(plan: Plan) -> str:
    adapted = plan.counts(next(one for one in ALGORITHMS if one.adapted))
    return (
        f"Replay buffer, on the host: {adapted['replay_bytes'] / GIB:.3g} GiB expected, "
        f"{adapted['replay_bytes_most'] / GIB:.3g} GiB full of the longest samples. Hard buffer, which holds only "
        f"prompts: {adapted['hard_bytes'] / 2**20:.3g} MiB full.\n"
    )
