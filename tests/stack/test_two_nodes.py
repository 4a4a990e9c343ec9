"""A run on two Ray nodes: ranks and engines on both, weights sync, checkpoints, and a node that dies.

docs/several_machines.md names this test. Both nodes are on this machine. So it shows that the run
needs nothing of a node but what Ray gives it, and not how fast a network is.
"""

import json
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_faults import AGAIN, AHEAD, GRPO, PROBE, RUN, assert_nothing_is_left, marked, same_steps

from bapo_openrlhf.cpu import stack as cpu

pytestmark = [pytest.mark.stack, pytest.mark.slow]

HERE = Path(__file__).parent
# Three ranks of the actor cannot be on one node. Two of them share a node, and an engine is on the other one.
PLACES = {"actor__num_gpus_per_node": 3, "train__batch_size": 24}


@contextmanager
def two_nodes():
    """The address of two nodes, and the process that is the second one."""
    words = [sys.executable, str(HERE / "two_nodes.py")]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.communicate()


@pytest.mark.parametrize("ahead", [{}, AHEAD], ids=["synchronous", "ahead"])
def test_a_node_dies_and_the_run_goes_on_as_if_on_one_node(train, ahead):
    """The run stops with the reason, resumes on two new nodes, and ends with the numbers of a run on one node."""
    name, values = f"nodes_{len(ahead)}", RUN | GRPO | PLACES | ahead
    reference = train(f"{name}_one", own_ray=True, **values)

    def on_two_nodes(*command, mark, status, more=AGAIN, **environment):
        with two_nodes() as nodes:
            environment |= marked(mark)["environment"] | {"FAULT_NODE": str(nodes["raylet"])}
            options = {"environment": environment, "shared": {cpu.SHARED_RAY: nodes["address"]}}
            return train(name, *command, status=status, **options, **values | more)

    result = on_two_nodes(*PROBE, mark=f"{name}_dies", status=None, more={}, FAULT="node/3/training/0.1")
    assert result.status != 0
    placed = json.loads(re.search(r"nodes: (\{.*?\})", result.output)[1])
    assert len(set(placed["actor"])) == 2 and set(placed["engine"]) < set(placed["actor"]), placed
    last = result.output.strip().splitlines()[-1]
    assert last.startswith("error: ") and re.search(r"lost the node .*: |node has died|node .* terminated", last), last
    assert_nothing_is_left(f"{name}_dies")

    result = on_two_nodes(mark=f"{name}_again", status=0)
    assert "resuming from global_step" in result.output
    same_steps(result.metrics, reference.metrics)
    assert all(any(row[f"groups/{name}"] for row in result.metrics) for name in ("reevaluated", "replayed"))
    assert_nothing_is_left(f"{name}_again")
