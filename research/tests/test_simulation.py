"""research/simulation.py, short: what it drives is the real layer, and what it says of it adds up."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bapo_openrlhf.adapt.arithmetic import deal, micro_batch_plan
from bapo_openrlhf.adapt.batch import Batch

FILE = Path(__file__).parents[1] / "simulation.py"


@pytest.fixture(scope="module")
def simulation():
    spec = importlib.util.spec_from_file_location("simulation", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.BATCH = 64
    return module


@pytest.mark.parametrize("method", ["bapo", "mopps", "exgrpo"])
def test_buffers_stay_in_bounds_and_the_policy_learns(simulation, method):
    result = simulation.simulate(method, 4000, 1.0, 0, ranks=7)
    rows = result["rows"]
    assert rows[-1]["solved"] > rows[0]["solved"] + 0.02
    assert all(row["trained"] <= 64 for row in rows) and any(row["trained"] % 8 for row in rows)
    # A full batch has 512 samples. An eighth of them is 64, and 7 ranks can share 63 of these equally.
    assert (result["train_batch"], result["totals"]["left_out"]) == (63, 0)
    for row in rows:
        assert (row["samples"], row["left_out"]) == (8 * row["trained"], 0)
        assert row["updates"] == -(-row["samples"] // 63) and row["fillers"] == -row["samples"] % 7
    assert any(row["attempts"] for row in rows) is (method != "mopps")
    if method == "bapo":
        assert all(row["buffer/hard"] <= 256 and row["buffer/replay"] <= 256 for row in rows)
        assert all(0.125 <= row["threshold/c2"] <= 0.5 for row in rows)
        assert 0 < sum(row["improved"] for row in rows) < sum(row["attempts"] for row in rows)


def test_each_method_of_the_benchmark_runs(simulation):
    for method in simulation.METHODS:
        assert simulation.simulate(method, 640, 1.0, 0, ranks=3)["totals"]["samples"] > 0, method


@pytest.mark.parametrize(
    ("groups", "ranks", "expected"),
    [
        (0, 5, (0, 0, 0)),
        (64, 1, (512, 0, 8)),
        (9, 1024, (72, 952, 1)),  # more ranks than samples: most take a filler
        (64, 1024, (512, 512, 1)),
        (61, 16, (488, 8, 8)),  # seven steps of 64, and 40 samples on 16 ranks: 8 have 3, 8 have 2
        (64, 16, (512, 0, 8)),
    ],
)
def test_what_the_ranks_get(simulation, groups, ranks, expected):
    world = simulation.World(64, 0)
    batch = Batch(fresh=world.groups(world.draw(groups), 0, 0))
    counts = simulation.shared(batch, ranks)
    assert (counts["samples"], counts["fillers"], counts["updates"]) == expected and counts["left_out"] == 0


def test_what_is_wrong_is_found(simulation, monkeypatch):
    world = simulation.World(64, 0)
    batch = Batch(fresh=world.groups(world.draw(61), 0, 0))

    def planned(*changes):
        """The plans of ranks with 31 samples are changed, those with 30 are not."""

        def plan(total, count, *more):
            parts = micro_batch_plan(total, count, *more)
            if count == 30:
                return parts
            return [replace(part, **change) for part, change in zip(parts, changes, strict=False)]

        return plan

    def twice(lengths, ranks):
        shares = deal(lengths, ranks)
        shares[0][0] = shares[1][0]
        return shares

    def uneven(lengths, ranks):
        shares = deal(lengths, ranks)
        shares[0] += [shares[1].pop(), shares[2].pop()]
        return shares

    with monkeypatch.context() as patch:
        patch.setattr(simulation, "deal", twice)
        assert simulation.shared(batch, 16)["left_out"] == 2  # the group of the lost sample, and of the doubled one
    with monkeypatch.context() as patch:
        patch.setattr(simulation, "deal", uneven)
        with pytest.raises(RuntimeError, match="shares of"):
            simulation.shared(batch, 16)
    for changes, text in (
        ([{}] * 30, "out of step"),  # a micro-batch less
        ([{"closes": True}] + [{}] * 30, "out of step"),
        ([{"samples": 0}] + [{}] * 30, "optimizer steps of"),
        ([{"samples": 2}, *[{}] * 29, {"samples": 0}], "optimizer steps of"),  # its sum is right, its steps are not
    ):
        with monkeypatch.context() as patch:
            patch.setattr(simulation, "micro_batch_plan", planned(*changes))
            with pytest.raises(RuntimeError, match=text):
                simulation.shared(batch, 16)
    extra = world.groups(world.draw(2), 0, 0)
    assert simulation.shared(replace(batch, cut=extra), 16)["left_out"] == 2  # the batch had room for them
    assert simulation.shared(replace(batch, fresh=batch.fresh + extra + extra[:1], cut=extra), 16)["left_out"] == 0


def test_chances_are_those_that_are_drawn(simulation):
    world = simulation.World(50, 0)
    world.difficulty[:] = np.linspace(-3, 3, 50)
    groups = [world.groups(world.draw(50), 0, 0) for _ in range(60)]
    drawn = {}
    for group in (group for step in groups for group in step):
        drawn.setdefault(group.prompt.text, []).append(float(group.mean))
    for place, difficulty in enumerate(world.difficulty):
        chance = 1 / (1 + np.exp(difficulty))
        assert np.mean(drawn[f"prompt {place}"]) == pytest.approx(chance, abs=4 * np.sqrt(0.25 / 480))
    before = world.mean_chance()
    world.learn(groups[0])
    assert world.mean_chance() > before


def test_the_page(simulation, tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "apart", simulation.simulate)
    monkeypatch.setattr(
        sys,
        "argv",
        ["simulation.py", "--prompts", "700", "--methods", "bapo", "--ranks", "5", "--results", str(tmp_path)],
    )
    simulation.main()
    page = (tmp_path / "simulation.md").read_text()
    assert "| `bapo` | 700 | 10 |" in page and "about 5 data-parallel ranks" in page
    (row,) = [line for line in page.splitlines() if line.startswith("| `bapo`")]
    totals = json.loads((tmp_path / "simulation.json").read_text())["methods"][0]["totals"]
    assert row.endswith(f"| {totals['samples'] / 10:,.0f} | {totals['fillers'] / 10:,.0f} | 0 |")
    assert json.loads((tmp_path / "simulation.json").read_text())["methods"][0]["steps"] == 10
    assert (tmp_path / "simulation.png").stat().st_size > 10_000
