"""The numbers of halves_design.md: what the halves of groups are worth, as shares of one another.

python research/halves_shares.py                # the kept records; writes results/halves/halves.md
python research/halves_shares.py --runs FOLDER  # keeps the runs of another worktree first
"""

from __future__ import annotations

import argparse
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
from age_or_distance import EQUAL, by_setting, prepared, share
from folders import RESULTS, STUDIES
from halves import Kind, kind
from replay_probe import ALL
from smollm2 import keep

from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.workbench.study.definition import read_study
from bapo_openrlhf.workbench.study.runner import RUNS, plan
from bapo_openrlhf.workbench.study.statistics import LEVEL

PRIMARY = 0.975  # level of the intervals of the two primary shares
# What is compared: the kind above, the kind below, and the question.
PAIRS: tuple[tuple[Kind, Kind, str], ...] = (
    ("same", "other", "the responses"),
    ("other", "apart", "the prompt"),
    ("same", "apart", "both"),
)


def shares(probes: pd.DataFrame, level: float = LEVEL) -> pd.DataFrame:
    """For each of PAIRS, the projection of the kind above as a share of that of the kind below, with intervals.

    Args:
        probes: As in `age_or_distance.tables`.
        level: That of the intervals.
    """
    rows = prepared(probes)
    rows["kind"] = rows["uid"].map(kind)
    table = []
    for above, below, question in PAIRS:
        pair = rows[rows["kind"].isin([above, below])].assign(trained=lambda some, above=above: some["kind"] == above)
        for name, strata in EQUAL.items():
            for setting, each in by_setting(pair):
                found = share(each, strata, level)
                numbers = {end: found[end] for end in ("ratio", "low", "high")}
                table.append({"of": question, "above": above, "below": below, "at equal": name, "setting": setting,
                              "groups above": found["trained on"], "groups below": found["held out"],
                              **numbers})  # fmt: skip
    return pd.DataFrame(table)


def answer(responses: Mapping[str, float], prompt: Mapping[str, float]) -> str:
    """What the page says to the two primary shares, each with `low` and `high`."""
    both = {"the responses": responses, "the prompt": prompt}
    if gained := [name for name, found in both.items() if found["low"] > 1]:
        return f"a share above 1, which the page does not foresee: {' and '.join(gained)}"
    lost = [name for name, found in both.items() if found["high"] < 1]
    return f"the loss is that of {' and '.join(lost)}" if lost else "the runs say nothing"


def read_probes(study_folder: Path) -> pd.DataFrame:
    """The lines of probes.jsonl of all runs, with their `setting` and `seed`.

    Raises:
        ValueError: A run has not ended.
    """
    tables = []
    for run in plan(read_study(STUDIES / "halves.yaml"), study_folder):
        if not run.done:
            raise ValueError(f"{run.folder} has not ended, and no number is shown before all four runs have")
        rows = pd.read_json(run.folder / record.PROBES, lines=True)
        tables.append(rows.assign(setting=run.arm.label, seed=run.seed))
    return pd.concat(tables, ignore_index=True)


def write_page(probes: pd.DataFrame) -> str:
    """The page of these probes as Markdown."""
    primary = shares(probes, PRIMARY)
    primary = primary[(primary["at equal"] == "age") & (primary["setting"] == ALL)][:2]
    tables = {
        f"The primary shares, with intervals of {PRIMARY:.1%}": primary,
        "All shares, with 95 % intervals": shares(probes),
    }
    parts = [
        "# Halves: the numbers",
        "Made by `python research/halves_shares.py`. [The design](../../halves_design.md) has the questions and words.",
        f"By its table the answer is: **{answer(*primary.to_dict('records'))}**.",
    ]
    for heading, table in tables.items():
        parts += [f"## {heading}", table.round(3).to_markdown(index=False)]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Read the runs that are kept, or those of another folder, which are kept then, and write the page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="runs/studies/halves of some worktree")
    given = parser.parse_args(argv)
    folder = RESULTS / "halves"
    folder.mkdir(exist_ok=True)
    with TemporaryDirectory() as unpacked:
        if given.runs:
            read_probes(given.runs)
            keep(given.runs / RUNS, folder / "halves.tar.xz")
        with tarfile.open(folder / "halves.tar.xz") as file:
            file.extractall(Path(unpacked) / RUNS, filter="data")
        text = write_page(read_probes(Path(unpacked)))
    (folder / "halves.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
