"""benchmarks/simulation.py, short: what it drives is the real layer, and what it says of it adds up."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "simulation.py"


@pytest.fixture(scope="module")
def simulation():
    spec = importlib.util.spec_from_file_location("simulation", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.BATCH = 64
    return module


@pytest.mark.parametrize("method", ["bapo", "mopps", "exgrpo"])
def test_buffers_stay_in_bounds_and_the_policy_learns(simulation, method):
    found = simulation.simulate(method, 4000, 1.0, 0)
    rows = found["rows"]
    assert rows[-1]["solved"] > rows[0]["solved"] + 0.02
    assert all(row["trained"] <= 64 and row["trained"] % 8 == 0 for row in rows)
    assert any(row["attempts"] for row in rows) is (method != "mopps")
    if method == "bapo":
        assert all(row["buffer/hard"] <= 256 and row["buffer/replay"] <= 256 for row in rows)
        assert all(0.125 <= row["threshold/c2"] <= 0.5 for row in rows)
        assert 0 < sum(row["improved"] for row in rows) < sum(row["attempts"] for row in rows)


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
        sys, "argv", ["simulation.py", "--prompts", "700", "--methods", "bapo", "--results", str(tmp_path)]
    )
    simulation.main()
    assert "| `bapo` | 700 | 10 |" in (tmp_path / "simulation.md").read_text()
    assert json.loads((tmp_path / "simulation.json").read_text())["methods"][0]["steps"] == 10
    assert (tmp_path / "simulation.png").stat().st_size > 10_000
