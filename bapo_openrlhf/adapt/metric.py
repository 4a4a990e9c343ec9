"""What a metric is: its name, its unit, and the words that documentation and pages show with it."""

import re
from dataclasses import dataclass

from bapo_openrlhf.adapt.vocabulary import SOURCES

ADAPTED = ("ba_ppo", "bapo_grpo")
CRITIC = ("ba_ppo", "ppo")
ALL = ("ba_ppo", "bapo_grpo", "ppo", "grpo")


@dataclass(frozen=True)
class Metric:
    """One metric, or one for each source.

    Attributes:
        name: Name in metrics.jsonl. SOURCE in it stands for each of the sources.
        unit, paper: Unit, and equation or place in the paper. "" if there is none.
        title: Title of a figure that shows it.
        when: Which steps or settings have it. "" if every step has it.
        algorithms: Values of `--algorithm` whose runs have it.
        optional: Whether `when` names a setting or an incident, so that a run may end without it.
    """

    name: str
    unit: str
    title: str
    sentence: str
    paper: str = ""
    when: str = ""
    algorithms: tuple[str, ...] = ADAPTED
    optional: bool = False

    def names(self, algorithm: str, *, optional: bool = True) -> list[str]:
        """Its names in a run of this algorithm, with prefixes if `optional`. Plain ones have only fresh groups."""
        if algorithm not in self.algorithms:
            return []
        sources = SOURCES[: 1 if algorithm not in ADAPTED else 4 if optional else 3]
        return [self.name.replace("SOURCE", source) for source in sources] if "SOURCE" in self.name else [self.name]


def declare(
    table: str, algorithms: tuple[str, ...] = ADAPTED, when: str = "", *, optional: bool = False
) -> tuple[Metric, ...]:
    """Metrics from a table with one line for each: name | unit | title | paper | sentence.

    The spaces around a bar make it a border of a cell. A backslash at the end of a line continues the row.

    Raises:
        ValueError: A line lacks a cell.
    """
    rows = [re.split(r"(?<=\s)\|(?=\s)", line, maxsplit=4) for line in table.strip().splitlines()]
    if short_rows := [" | ".join(map(str.strip, row)) for row in rows if len(row) < 5]:
        raise ValueError(f"a metric is: name | unit | title | paper | sentence; found {short_rows[0]!r}")
    cells = [[" ".join(cell.split()) for cell in row] for row in rows]
    return tuple(
        Metric(name, unit, title, sentence, paper, when, algorithms, optional)
        for name, unit, title, paper, sentence in cells
    )


# Metrics that several methods report.
ATTEMPTS, EXCHANGE_AGE = declare("""
    groups/reevaluation_attempts | groups | Re-evaluation attempts | Alg. 1, line 14 | Prompts that were generated \
        again with today's policy and gave a group.
    exchange/age_mean | steps | Age of the stored responses | | Mean age of the weights that generated the stored \
        responses in this step's groups. Missing if there are none.
""")
