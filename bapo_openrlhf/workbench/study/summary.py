"""The tables of a study that are quoted most, in Markdown: for a paper, an issue, or a README."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bapo_openrlhf.workbench.study import claims, tables
from bapo_openrlhf.workbench.study.data import Results, missing


def summary(results: Results, provenance: Mapping[str, Any]) -> str:
    """The most important tables of the page: the arms, the claims, the sources of the batches, seconds, and runs."""
    head = [f"# {results.study.name}", ""]
    head += [f"- {name}: {value}" for name, value in provenance.items() if isinstance(value, str)]
    head += [f"- {lack}" for lack in missing(results)]
    judged = claims.claims_table(results)
    shown = [
        ("Arms", tables.overview(results), 2),
        ("What the arms spent", tables.spent(results), 1),
        ("Claims", judged, len(judged.head)),
        ("Where the groups came from", tables.sources(results), 1),
        ("Seconds", tables.seconds(results), 1),
        ("Runs", tables.every_run(results), 1),
    ]
    parts = [replace(table, title=title, words=words, notes=[table.title]).markdown() for title, table, words in shown]
    return "\n".join([*head, "", *parts])
