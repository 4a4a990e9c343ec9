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
    options = dict(table)
    if "algorithms" in table:
        options["algorithms"] = ALL if table["algorithms"] == "all" else tuple(table["algorithms"])
    if "from" in table:
        metrics = DECLARED[options.pop("from")]
        return tuple(replace(metric, **options) for metric in metrics)
    return declare(re.sub(r"\n +", " ", options.pop("metrics")), **options)


def _read(path: Path) -> dict[str, tuple[Metric, ...]]:
    """The sections of a file. A table that cannot be read is a ValueError; tests check the rest of metrics.yaml."""
    content = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    sections: dict[str, tuple[Metric, ...]] = {}
    for section, tables in content.items():
        try:
            sections[section] = tuple(metric for table in tables for metric in _metrics(table))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{path.name}: {section}: {error!r}") from error
    return sections


CATALOGUE = _read(FILE)
OPENRLHF = CATALOGUE.pop("OpenRLHF")


def all_metrics() -> list[Metric]:
    """The whole catalogue, in order."""
    return [*(metric for section in CATALOGUE.values() for metric in section), *OPENRLHF]


def names(algorithm: str, *, optional: bool) -> set[str]:
    """Names in the rows of a run of this algorithm, with or without those that depend on a setting or an incident."""
    metrics = [metric for metric in all_metrics() if optional or not metric.optional]
    return {name for metric in metrics for name in metric.names(algorithm, optional=optional)}
