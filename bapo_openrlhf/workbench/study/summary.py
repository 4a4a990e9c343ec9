"""The tables of a study that are quoted most, in Markdown: for a paper, an issue, a README."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bapo_openrlhf.workbench.pages import table as pages
from bapo_openrlhf.workbench.report.charts import Table, number
from bapo_openrlhf.workbench.study import claims, tables
from bapo_openrlhf.workbench.study.data import Results, missing


def summary(results: Results, provenance: Mapping[str, Any]) -> str:
    """What the page says in tables: arms at a glance, claims, sources of the batches, seconds, every run."""
    head = [f"# {results.study.name}", ""]
    head += [f"- {name}: {value}" for name, value in provenance.items() if isinstance(value, str)]
    head += [f"- {lack}" for lack in missing(results)]
    judged = claims.table_of(results)
    shown = [
        _markdown("Arms", tables.overview(results), words=2),
        _markdown("Claims", judged, words=len(judged.head)),
        _markdown("Where the groups came from", tables.sources(results)),
        _markdown("Seconds", tables.seconds(results)),
        _markdown("Runs", tables.every_run(results)),
    ]
    return "\n".join([*head, "", *shown])


def _markdown(title: str, table: Table, words: int = 1) -> str:
    rows = [tuple(number(cell) for cell in row) for row in table.rows]
    return pages.Table.of(table.head, rows, title, words=words, notes=[table.title]).markdown()
