"""From which TV distance on replayed groups stop pointing the right way: research/study_design.md, "Why: the probe".

bapo-openrlhf study --config research/studies/map_probes.yaml
python research/replay_probe.py  # reads runs/studies/map_probes; writes results/map/ and docs/images/probes.svg
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import altair as alt
import numpy as np
import pandas as pd
from folders import DOCS_IMAGES, RESULTS, ROOT, STUDIES

from bapo_openrlhf.adapt.theory import bound_term, stability_constant
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.workbench.pages.colours import MUTED
from bapo_openrlhf.workbench.pages.figure import save_svg
from bapo_openrlhf.workbench.study.definition import read_study
from bapo_openrlhf.workbench.study.runner import plan

FOLDER = RESULTS / "map"
EDGES = (0.0, 0.02, 0.04, 0.08, 0.16, 0.32, 1.0)  # of the bins of the TV distance
FEWEST = 20  # groups of a bin that is shown
DRAWS = 1000  # of the bootstrap
ALL = "all settings"


def ratios(rows: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    """Mean projection of older groups, divided by that of fresh groups with the same mean rewards, by TV distance.

    The projection of a group is the length of its gradient times the cosine with the reference, in units of the mean
    projection of its setting's fresh groups. The interval is that of a bootstrap over steps, because all groups of a
    step share one reference.

    Args:
        rows: Lines of probes.jsonl: `step`, `source`, `tv`, `mean`, `cosine`, `norm`, and the run's `setting`. Those
            without a cosine are left out, and so are older groups with a mean that no fresh group of their setting has.

    Returns:
        A row for each bin with at least FEWEST groups: low_tv, high_tv, groups, tv (mean), age (mean), ratio, low, high
        (95 %), bound (mean term of Theorem 3.2 with S = 0).
    """
    rows = rows.dropna(subset=["cosine", "tv"])
    rows = rows.assign(
        projection=rows["cosine"] * rows["norm"],
        kind=rows.groupby(["setting", "mean"]).ngroup(),
        bound=[
            bound_term(0.0, stability_constant(mean * (1 - mean)), tv)
            for mean, tv in zip(rows["mean"], rows["tv"], strict=True)
        ],
    )
    unit = rows[rows["source"] == "fresh"].groupby("setting")["projection"].mean()
    rows["projection"] /= rows["setting"].map(unit)
    fresh, replayed = (rows[rows["source"] == source] for source in ("fresh", "replayed"))
    steps = rows["step"].nunique()
    weights = np.vstack([np.ones(steps), rng.multinomial(steps, np.full(steps, 1 / steps), DRAWS)])
    result = []
    for low, high in pairwise(EDGES):
        older = replayed[(replayed["tv"] >= low) & (replayed["tv"] < high) & replayed["kind"].isin(fresh["kind"])]
        if len(older) < FEWEST:
            continue
        whole, *draws = ratio(fresh, older, sorted(rows["step"].unique()), weights)
        spread = np.nanpercentile(draws, [2.5, 97.5])
        result.append({
            "low_tv": low, "high_tv": high, "groups": len(older), "tv": older["tv"].mean(), "age": older["age"].mean(),
            "ratio": whole, "low": spread[0], "high": spread[1], "bound": older["bound"].mean(),
        })  # fmt: skip
    return pd.DataFrame(result)


def ratio(fresh: pd.DataFrame, older: pd.DataFrame, steps: Sequence[int], weights: np.ndarray) -> np.ndarray:
    """Projection of the older groups over that of fresh groups of the same kinds, which are a setting and a mean.

    Args:
        steps: The steps in which there are probes.
        weights: How often each step counts, shape (D, steps).

    Returns:
        The ratio for each row of weights, shape (D,). nan if an older group then has a kind that no fresh group has.
    """
    kinds = sorted(fresh["kind"].unique())

    def table(rows: pd.DataFrame, what: str) -> np.ndarray:
        """`what` of the projections by step and kind, weighted: shape (D, kinds)."""
        projections = rows.pivot_table(index="step", columns="kind", values="projection", aggfunc=what)
        return weights @ projections.reindex(index=steps, columns=kinds).fillna(0).to_numpy()

    counts = table(older, "count")
    with np.errstate(invalid="ignore", divide="ignore"):
        expected = np.where(counts > 0, counts * table(fresh, "sum") / table(fresh, "count"), 0).sum(1)
        return table(older, "sum").sum(1) / expected


def picture(table: pd.DataFrame) -> alt.LayerChart:
    """The ratio over the TV distance (logarithmic), with its interval: a line for each setting."""
    base = alt.Chart(table).encode(
        x=alt.X("tv:Q", title="TV distance of replayed groups", scale=alt.Scale(type="log")),
        color=alt.Color("setting:N", title=None, sort=[ALL], legend=alt.Legend(orient="top", columns=2)),
        strokeWidth=alt.condition(alt.datum.setting == ALL, alt.value(4), alt.value(1)),
    )
    spread = base.mark_rule().encode(y=alt.Y("low:Q", title="projection, as a share of fresh groups'"), y2="high:Q")
    line = base.mark_line(point=True).encode(y="ratio:Q")
    marks = alt.Chart(pd.DataFrame({"y": [0, 0.5, 1]})).mark_rule(strokeDash=[4, 4], color=MUTED).encode(y="y:Q")
    return alt.layer(marks, spread, line).properties(width=350, height=260)


def read_probes() -> pd.DataFrame:
    """The lines of probes.jsonl of all finished runs, with `setting`, `seed`, and `halves` of their step."""
    study = read_study(STUDIES / "map_probes.yaml")
    frames = []
    for run in plan(study, ROOT / "runs" / "studies" / study.name):
        if run.done:
            steps = pd.DataFrame(record.read_metrics(run.folder))[["step", "probe/halves"]]
            rows = pd.read_json(run.folder / record.PROBES, lines=True).merge(steps, on="step")
            frames.append(rows.rename(columns={"probe/halves": "halves"}).assign(setting=run.arm.label, seed=run.seed))
    return pd.concat(frames, ignore_index=True)


def main() -> int:
    """Read the probes, or those that were kept, and write the tables and the figure."""
    kept = FOLDER / "probes.parquet"
    if (ROOT / "runs" / "studies" / "map_probes").is_dir():
        read_probes().to_parquet(kept, index=False)
    rows = pd.read_parquet(kept)
    rows = rows.assign(step=rows.groupby(["setting", "seed", "step"]).ngroup())  # steps of two runs are different steps
    tables = []
    for setting, each in [(ALL, rows), *rows.groupby("setting")]:
        halves = each.groupby("step")["halves"].first().mean()
        tables.append(ratios(each, np.random.default_rng(0)).assign(setting=setting, halves=halves))
    table = pd.concat(tables, ignore_index=True)
    table.round(4).to_csv(FOLDER / "probes.csv", index=False)
    save_svg(picture(table), DOCS_IMAGES / "probes.svg")
    print(table.round(3).to_markdown(index=False))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
