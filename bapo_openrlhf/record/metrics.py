"""The catalogue: every metric that a run can write, OpenRLHF's own included. docs/metrics.md is made from it.

A method declares its own metrics (`METRICS` of its class and of its buffers). All others are in metrics.yaml.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from bapo_openrlhf.adapt.metric import ALL, ATTEMPTS, Metric, declare
from bapo_openrlhf.methods import BAPO, registry

FILE = Path(__file__).with_name("metrics.yaml")


def _of_single_methods() -> tuple[Metric, ...]:
    """Metrics of the built-in methods that BAPO does not have, each with the methods that report it."""
    methods: dict[Metric, list[str]] = {}
    for name in registry.METHODS:
        for metric in registry.method_class(name).METRICS:
            methods.setdefault(metric, []).append(name)
    return tuple(
        replace(metric, when=f"`--adapt.method {', '.join(names)}`", optional=True)
        for metric, names in methods.items()
        if metric not in BAPO.METRICS
    )


# Metrics of methods, by the names that `from` has in the file.
DECLARED = {
    "ATTEMPTS": (ATTEMPTS,),
    "BAPO": tuple(metric for metric in BAPO.METRICS if metric != ATTEMPTS),
    "other methods": _of_single_methods(),
}


def _metrics(table: dict[str, Any]) -> tuple[Metric, ...]:
    if "from" in table:
        return DECLARED[table["from"]]
    options = dict(table)
    if "algorithms" in table:
        options["algorithms"] = ALL if table["algorithms"] == "all" else tuple(table["algorithms"])
    return declare(re.sub(r"\n +", " ", options.pop("metrics")), **options)


def _read(path: Path) -> dict[str, tuple[Metric, ...]]:
    content = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {
        section: tuple(metric for table in tables for metric in _metrics(table)) for section, tables in content.items()
    }


CATALOGUE = _read(FILE)
OPENRLHF = CATALOGUE.pop("OpenRLHF")


def all_metrics() -> list[Metric]:
    """The whole catalogue, in order."""
    return [*(metric for section in CATALOGUE.values() for metric in section), *OPENRLHF]


def names(algorithm: str, *, optional: bool) -> set[str]:
    """Names in the rows of a run of this algorithm, with or without those that depend on a setting or an incident."""
    metrics = [metric for metric in all_metrics() if optional or not metric.optional]
    return {name for metric in metrics for name in metric.names(algorithm, optional=optional)}
