"""A run proves in its first steps that engine and actor are the same policy."""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow]

OTHER = (str(Path(__file__).parent / "probe.py"), "other_weights")
FLAGS = {"algorithm": "bapo_grpo", "algo__kl__init_coef": 0.0, "adapt__rollout_delay": 1, "actor__adam__lr": 1e-2}


@pytest.mark.parametrize(("other", "cause"), [("read", "a second set of them"), ("sent", "did not reach the engines")])
def test_a_run_whose_engines_hold_other_weights_ends(train, other, cause):
    """Before its first update; or as soon as there are enough tokens after updates that did not reach the engines."""
    result = train(f"other_{other}", *OTHER, status=1, environment={"OTHER": other}, ckpt__save_steps=1, **FLAGS)
    last = result.output.strip().splitlines()[-1]
    assert cause in last and "adapt.max_gap is 0.02" in last, last
    steps = len(result.metrics if (result.folder / "metrics.jsonl").exists() else [])
    assert last.startswith(f"error: step {steps + 1}, making experience: ")
    assert steps == 0 if other == "read" else 1 <= steps < 6
