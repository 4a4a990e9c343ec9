"""A gradient that is not finite, on DeepSpeed, which says nothing of it."""

import json

import pytest
from not_finite_workers import CASES
from one_process import run_script

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.fixture(scope="module")
def reports(workspace):
    run_script("not_finite_workers.py", workspace)
    return dict(zip(CASES, json.loads((workspace / "said.json").read_text()), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stops_the_run(reports, case):
    kind, stage = case
    (norm,), then = reports[case]
    assert norm > 0
    name = {"Policy": "WholeBatchActorTrainer", "Critic": "WholeBatchCriticTrainer"}[kind]
    end = ", so the weights are not; those of the last checkpoint are" if stage == 3 else "; it was not applied"
    assert then == f"a gradient of {name} is not finite{end}"
