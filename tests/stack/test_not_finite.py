"""A gradient that is not finite, on DeepSpeed, which says nothing of it."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from not_finite_workers import CASES

from bapo_openrlhf.cpu.prefork.serving import python

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.fixture(scope="module")
def said(workspace):
    words = [python(), str(Path(__file__).with_name("not_finite_workers.py")), str(workspace)]
    done = subprocess.run(words, env=os.environ | {"BAPO_OPENRLHF_CPU": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return dict(zip(CASES, json.loads((workspace / "said.json").read_text()), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stops_the_run(said, case):
    kind, stage = case
    (norm,), then = said[case]
    assert norm > 0
    name = {"Policy": "WholeBatchActorTrainer", "Critic": "WholeBatchCriticTrainer"}[kind]
    end = ", so the weights are not; those of the last checkpoint are" if stage == 3 else "; it was not applied"
    assert then == f"a gradient of {name} is not finite{end}"
