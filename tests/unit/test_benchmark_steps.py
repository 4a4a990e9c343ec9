"""The table of benchmarks/steps.py: ratios within a round, to the plain run of the same advantages."""

import importlib.util
import sys
from pathlib import Path

import pytest

from bapo_openrlhf.cli import arguments

FILE = Path(__file__).parents[2] / "benchmarks" / "steps.py"


@pytest.fixture(scope="module")
def steps():
    spec = importlib.util.spec_from_file_location("benchmark_steps", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def run(seconds, responses=256.0, trained=1000.0):
    return {"seconds": seconds, "responses": responses, "trained": trained}


def test_ratios_are_within_a_round(steps):
    found = {
        "GRPO, plain OpenRLHF": [run(1.0), run(2.0), run(4.0)],
        "BAPO-GRPO": [run(0.9), run(2.2), run(2.0, responses=320.0, trained=500.0)],
        "PPO, plain OpenRLHF": [run(10.0)] * 3,
        "BA-PPO": [run(5.0)] * 3,
    }
    kinds = {kind.name: kind for kind in steps.KINDS}
    assert steps.ratios(found, kinds["BAPO-GRPO"], "seconds") == pytest.approx([0.9, 1.1, 0.5])
    assert steps.ratios(found, kinds["BA-PPO"], "seconds") == [0.5, 0.5, 0.5]
    about = {"runs": found, "steps": 24, "rounds": 3, "machine": "a machine", "commit": "abc", "command": "python"}
    page = steps.markdown(about)
    assert "| BAPO-GRPO | 2.00 (0.90 to 2.20) | 0.90 (0.50 to 1.10) | 160 (116 to 284) | 256 | 1,000 |" in page
    assert "| GRPO, plain OpenRLHF | 2.00 (1.00 to 4.00) | 1 |" in page
    assert "DAPO" not in page and "TRL" not in page


def test_flags_are_flags_and_each_base_is_plain(steps):
    kinds = {kind.name: kind for kind in steps.KINDS}
    for kind in steps.KINDS:
        flags = steps.SETTING | kind.flags
        words = [word for name, value in flags.items() for word in (f"--{name}", *str(value).split())]
        args = arguments.parse(["--config", "configs/quickstart.yaml", "--algorithm", kind.algorithm, *words])
        base = arguments.parse(["--config", "configs/quickstart.yaml", "--algorithm", kinds[kind.base].algorithm])
        assert not base.adapt.enabled
        assert base.algo.advantage.estimator == args.algo.advantage.estimator
        assert args.algo.dynamic_filtering_enable is kind.name.startswith("DAPO")
