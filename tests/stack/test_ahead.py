"""Generation ahead of training (`--train.async_enable`) on the real stack: weights, ratios, counts, and kills."""

import random
import re
import shutil

import numpy as np
import pytest
from test_faults import AGAIN, AHEAD, GRPO, PROBE, RUN, assert_nothing_is_left, marked, same_steps
from test_training import noted_weights, recomputed

from bapo_openrlhf.record.checkpoint_store import CheckpointStore
from bapo_openrlhf.record.state_file import load_state

pytestmark = pytest.mark.stack

EVERY = 2  # m
slow = pytest.mark.slow


SIZES = [(1, 1), *(pytest.param(case, marks=slow) for case in ((2, 1), (1, 3), (2, 3)))]  # of the queue, and v


@pytest.fixture(scope="module", params=SIZES, ids=lambda case: "q{} v{}".format(*case))
def probe_run(watch, request):
    """Five steps with 2 engines; what the probe noted."""
    queue, delay = request.param
    flags = {
        "algorithm": "bapo_grpo", "train__async_queue_size": queue, "adapt__rollout_delay": delay,
        "adapt__reevaluate_every": EVERY, "adapt__c3": "7/8", "vllm__num_engines": 2, "data__max_samples": 40,
    }  # fmt: skip
    return *watch(f"ahead_{queue}_{delay}", **flags, **AHEAD), queue, delay


def test_engines_hold_the_weights_that_the_responses_claim(probe_run):
    """The trainer compares each response's version with the step that it expects; here the weights are compared."""
    result, folder, queue, delay = probe_run
    assert len(result.metrics) == 5
    weights = noted_weights(folder)
    for step, row in enumerate(result.metrics):
        asked = max(0, step - queue)
        version = asked - asked % delay
        assert row["staleness/rollout_policy"] == step - version and weights[step, "fresh"] == weights[version, "actor"]
    again = {step for step, kind in weights if kind == "reevaluated"}
    assert again == {step for step in (2, 4) if step % delay}  # the others go with a rollout
    assert all(weights[step, "reevaluated"] == weights[step, "actor"] for step in again)
    assert weights[0, "actor"] != weights[4, "actor"]  # the actor does learn


def test_ratios_are_those_of_the_claimed_weights(probe_run):
    """Today's log-probs and those under the weights of the version are computed outside, by transformers."""
    result, folder, _, _ = probe_run
    checked = set()
    for step in range(1, len(result.metrics)):
        data = np.load(folder / f"experience{step}.npz")
        for source in ("fresh", "reevaluated", "replayed"):
            for index in np.flatnonzero(data["source"] == source)[:2]:
                version = int(data["weights_version"][index])
                current, actions = recomputed(folder / f"actor{step}", data, index)
                then, _ = recomputed(folder / f"actor{version}", data, index)
                stored, old = (data[f"{index}/{name}_log_probs"][: len(actions)] for name in ("rollout", "action"))
                assert stored[actions] == pytest.approx(then[actions], abs=0.03)  # bf16
                assert old[actions] == pytest.approx((current if version == step else stored)[actions], abs=0.03)
                assert data["log_ratios"][index] == pytest.approx(float((current - then)[actions].sum()), abs=0.06)
                checked.add((source, step - version))
    assert {source for source, _ in checked} == {"fresh", "reevaluated", "replayed"}
    assert max(lag for _, lag in checked) >= 2


KILLS = 13  # of each run
VICTIMS = ("driver", "trainer", "engine", "core", "actor")


@slow
@pytest.mark.parametrize(("queue", "delay"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_killed_at_random_moments(train, workspace, queue, delay):
    """A run is killed 13 times, each time at most two steps after it went on, and ends with the same numbers."""
    values = RUN | GRPO | AHEAD | {"adapt__reevaluate_every": 1, "adapt__c1": "4/8", "train__num_episodes": 3}
    values |= {"train__async_queue_size": queue, "adapt__rollout_delay": delay}
    reference = train(f"ahead_whole_{queue}_{delay}", own_ray=True, **values)
    rng, in_flight = random.Random(100 * queue + delay), 0
    name = f"ahead_killed_{queue}_{delay}"
    store = CheckpointStore(workspace / name / "checkpoints", critic=False)
    for kill in range(KILLS):
        tag = store.newest_whole(lambda text: None) if kill else None
        step = int(re.search(r"\d+$", tag)[0]) if tag else 0
        if step == 0 or step > 6:  # near the end it begins again
            shutil.rmtree(workspace / name, ignore_errors=True)
            shutil.rmtree(workspace / "runs" / name, ignore_errors=True)
            step = 0
        if step:
            state = load_state(store.folder(tag))
            in_flight += bool(state["method"]["hard"]["in_flight"])
            assert state["ahead"]["rollouts"]
        fault = f"{rng.choice(VICTIMS)}/{step + rng.randrange(2)}//{rng.uniform(0.05, 1.0):.2f}"
        options = marked(f"{name}_{kill}", fault) | values | (AGAIN if step else {})
        result = train(name, *PROBE, status=None, **options)
        assert result.status != 0, fault
        assert_nothing_is_left(f"{name}_{kill}")
    result = train(name, own_ray=True, **values | AGAIN)
    same_steps(result.metrics, reference.metrics)
    assert in_flight >= 5 or delay > 1  # hard prompts travel only right after a sync, so few checkpoints have them then
