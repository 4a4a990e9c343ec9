"""Generation ahead of training (`--train.async_enable`) on the real stack: weights, ratios, counts, and kills."""

import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_faults import AHEAD, GRPO, PPO, PROBE, RUN, assert_nothing_is_left, marked, same_steps
from test_resume import killed_and_resumed
from test_training import noted_weights, recomputed, succeeded

from bapo_openrlhf.record.checkpoint_store import CheckpointStore
from bapo_openrlhf.record.state_file import load_state

pytestmark = pytest.mark.stack

HERE = Path(__file__).parent
METHODS = HERE.parents[1] / "configs" / "methods"
CLI = ("-m", "bapo_openrlhf.cli.train_ppo_ray")
STATES = ("fresh", "reevaluated", "filtered", "unimproved", "solved", "cut", "too_far", "nonfinite", "failed")
EVERY = 2  # m
slow = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[
        (1, 1),
        pytest.param((2, 1), marks=slow),
        pytest.param((1, 3), marks=slow),
        pytest.param((2, 3), marks=slow),
    ],
    ids=lambda case: "q{} v{}".format(*case),
)
def probe_run(train, workspace, request):
    """Five steps with 2 engines; what the probe noted."""
    queue, delay = request.param
    name = f"ahead_{queue}_{delay}"
    folder = workspace / f"probe_{name}"
    folder.mkdir()
    result = train(
        name,
        str(HERE / "probe.py"),
        "watched",
        switches=AHEAD,
        environment={"PROBE_FOLDER": str(folder)},
        algorithm="bapo_grpo",
        run__name=name,
        reward__remote_url=HERE / "scripted_reward.py",
        train__async_queue_size=queue,
        adapt__rollout_delay=delay,
        adapt__reevaluate_every=EVERY,
        adapt__c3="7/8",
        vllm__num_engines=2,
        data__max_samples=40,
    )
    return succeeded(result), folder, queue, delay


def test_engines_hold_the_weights_that_the_responses_claim(probe_run):
    """The trainer compares each response's version with the step that it expects; here the weights are compared."""
    result, folder, queue, delay = probe_run
    assert len(result.metrics) == 5
    weights = noted_weights(folder)
    for step, row in enumerate(result.metrics):
        asked = max(0, step - queue)
        version = asked - asked % delay
        assert row["staleness/rollout_policy"] == step - version
        assert weights[step, "fresh"] == weights[version, "actor"]
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


def test_generated_is_settled_or_in_flight(probe_run):
    result, _, queue, delay = probe_run
    rows = result.metrics
    for row in rows:
        assert sum(row[f"groups/{state}"] for state in STATES) == row["groups/generated"]
        assert row["groups/in_flight"] <= queue * 8 + 16
    assert rows[-1]["groups/in_flight"] == 0
    if delay == 1:  # the step's sync has waited for all rollouts
        assert all(row["groups/in_flight"] >= 8 for row in rows[: -queue - 1])


@slow
@pytest.mark.parametrize("run", [GRPO, PPO], ids=["bapo_grpo", "ba_ppo"])
@pytest.mark.parametrize("delay", [1, 3])
def test_without_staleness_it_is_the_synchronous_run(train, run, delay, tmp_path):
    """Number by number, with hard prompts, replay, and an empty batch."""
    results = []
    values = RUN | run | {"adapt__rollout_delay": delay, "reward__remote_url": HERE / "late_reward.py"}
    for mode, switches in (("waits", AHEAD), ("synchronous", ())):
        name = f"ahead_{mode}_{run['algorithm']}_{delay}"
        more = {"adapt__max_staleness": 0} if switches else {}
        (tmp_path / mode).mkdir()
        more |= {"environment": {"PROBE_FOLDER": str(tmp_path / mode)}, "run__name": name}
        results.append(
            succeeded(train(name, *CLI, switches=("train.full_determinism_enable", *switches), **values, **more))
        )
    ours, theirs = results
    same_steps(ours.metrics, theirs.metrics, first=1)
    rows = theirs.metrics
    assert sum(row["groups/reevaluated"] for row in rows) and sum(row["groups/replayed"] for row in rows)
    assert any(row.get("skipped_update") for row in rows)


# ── kill -9 at random moments ──


@slow
def test_bounded_staleness_is_killed_while_it_generates_and_resumed(train):
    """The preset: every group is trained on once, at most four steps after its weights were trained."""
    values = {"config": METHODS / "bounded_staleness.yaml", "ckpt__save_steps": 6, "train__num_episodes": 2}
    run = killed_and_resumed(train, "bounded", "engine", GRPO | values, phase="generating")
    same_steps(run.rows[: len(run.before)], run.before, first=1)
    assert [row["staleness/rollout_policy"] for row in run.rows] == [min(step, 4) for step in range(len(run.rows))]
    assert all(row["groups/fresh"] == row["groups/generated"] == 8 for row in run.rows) and len(run.rows) == 12
    assert not any(row["groups/replayed"] or row["groups/reevaluation_attempts"] for row in run.rows)


@slow
def test_a_critic_of_all_groups_is_killed_and_resumed(train):
    """Generation is one step ahead, and the critic has two ranks and the actor one."""
    values = {"train__async_queue_size": 1, "ckpt__save_steps": 3, "adapt__value_pretraining": 1}
    values |= {"critic__num_gpus_per_node": 2, "adapt__critic_baseline": "batch"}
    switches = ("train.full_determinism_enable", *AHEAD)
    run = killed_and_resumed(train, "taught_ahead", "critic", RUN | PPO | values, switches=switches)
    same_steps(run.rows[: len(run.before)], run.before, first=1)
    assert all(row["tokens/critic"] > row["tokens/trained"] for row in run.rows if row["groups/filtered"])
    assert any(row["groups/filtered"] for row in run.rows)


KILLS = 13  # of each run
VICTIMS = ("driver", "trainer", "engine", "core", "actor")


@slow
@pytest.mark.parametrize(("queue", "delay"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_killed_at_random_moments(train, workspace, queue, delay):
    """A run is killed 13 times, each time at most two steps after it went on, and ends with the same numbers."""
    switches = ("train.full_determinism_enable", *AHEAD)
    values = RUN | GRPO | {"train__async_queue_size": queue, "adapt__rollout_delay": delay, "train__num_episodes": 3}
    values |= {"adapt__reevaluate_every": 1, "adapt__c1": "4/8"}
    whole = f"ahead_whole_{queue}_{delay}"
    reference = succeeded(train(whole, *CLI, switches=switches, own_ray=True, run__name=whole, **values))
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
        options = marked(f"{name}_{kill}")
        options["environment"] |= {"FAULT": fault}
        more = ("ckpt.load_enable",) if step else ()
        result = train(name, *PROBE, switches=(*switches, *more), run__name=name, **options, **values)
        assert result.status != 0, fault
        assert_nothing_is_left(f"{name}_{kill}")
    result = train(name, *CLI, switches=(*switches, "ckpt.load_enable"), own_ray=True, run__name=name, **values)
    same_steps(succeeded(result).metrics, reference.metrics, first=1)
    assert in_flight >= 5 or delay > 1  # hard prompts travel only right after a sync, so few checkpoints have them then
