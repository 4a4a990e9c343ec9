"""benchmarks/floor.py: the replayed steps, the floor's arithmetic, and the page."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bapo_openrlhf import user_file

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name):
    return user_file.load("benchmark", BENCHMARKS / f"{name}.py")


@pytest.fixture(scope="module")
def floor():
    return load("floor")


@pytest.fixture(scope="module")
def replay():
    return load("floor_replay")


def test_the_window_is_one_period_after_the_warm_up(floor):
    assert floor.window(8, 4, 2, 4) == (4, 8)
    assert floor.window(40, 4, 4, 6) == (4, 16)
    with pytest.raises(ValueError, match="a run has 9 steps; 10 are needed"):
        floor.window(9, 4, 2, 3)


def batch(*lengths):
    """Token ids of samples of these lengths, padded on the right, with one prompt token."""
    longest = max(lengths)
    mask = torch.tensor([[1] * length + [0] * (longest - length) for length in lengths])
    ids = torch.arange(len(lengths) * longest).reshape(mask.shape) % 50
    return {"sequences": ids, "attention_mask": mask, "action_mask": mask[:, 1:]}


def test_events_belong_to_the_step_in_which_they_happen(replay):
    call = [[([5, 6], [3, 4])]]
    noted = [{"end": 10.0, "calls": call}, {"end": 12.5, "calls": []}, {"end": 14.0, "calls": call}]
    first, second, third = batch(3, 4), batch(5), batch(6)
    workers = {
        "actor": [(9.0, "forward", first), (9.5, "train", second), (9.6, "sync", {}), (13.0, "train", third)],
        "critic": [(12.0, "forward", first)],
    }
    steps = replay.steps_of(noted, workers)
    assert [step.seconds for step in steps[1:]] == [2.5, 1.5] and steps[0].seconds != steps[0].seconds
    assert [step.syncs for step in steps] == [1, 0, 0]
    assert steps[0].forward["actor"] == [first] and steps[0].train["actor"] == [second]
    assert steps[1].forward["critic"] == [first] and not steps[1].train and steps[2].train["actor"] == [third]


def test_each_part_has_its_fastest_variant(replay):
    one = {"generation": 8.0, "forward": 2.0, "training": 4.0, "weights": 1.0}
    two = {"generation": 6.0, "forward": 3.0, "training": 2.0, "weights": 1.5}
    result = replay.fastest({"1 eager": one, "2 eager": two, "1 sdpa": {"forward": 1.0, "training": 3.0}}, 4)
    assert [result[part] for part in replay.PARTS] == [1.5, 0.25, 0.5, 0.25]
    assert [result[f"{part}_variant"] for part in replay.PARTS] == ["2 eager", "1 sdpa", "2 eager", "1 eager"]
    parts = {"2 eager": ["generation", "training"], "1 sdpa": ["forward"], "1 eager": ["weights"]}
    assert replay.chosen_variants(result) == parts
    every = {"1 eager": [*replay.PARTS], "2 eager": [*replay.PARTS]}
    of_torch = ["forward", "training"]
    assert replay.every_variant([1, 2]) == every | {"1 sdpa": of_torch, "2 sdpa": of_torch}


def test_log_probs_and_entropies_are_those_of_all_positions(replay, tmp_path):
    """Of a padded micro-batch, against the model's own logits."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    trained = replay.Trained(str(tmp_path), critic=False)
    trained.model.float()
    samples = batch(7, 4)
    hidden, labels = trained.hidden(samples)
    log_probs, entropy = replay.head(hidden, trained.weight, labels, entropy=True)
    wanted, spread = [], []
    for ids, length in zip(samples["sequences"], (7, 4), strict=True):
        distribution = trained.model(ids[None, :length]).logits[0].log_softmax(-1)
        wanted += [distribution[place, ids[place + 1]] for place in range(length - 1)]
        spread += [-(distribution[place].exp() * distribution[place]).sum() for place in range(length - 1)]
    torch.testing.assert_close(log_probs, torch.stack(wanted))
    torch.testing.assert_close(entropy, torch.stack(spread))


def test_training_is_on_the_device_of_the_models(replay):
    """On the device `meta`, torch refuses an operation with a tensor of another device, as it does on a GPU."""
    weight = torch.nn.Parameter(torch.empty(50, 16, device="meta"))

    class Model:
        def __init__(self, weight):
            self.weight, self.hidden_states, self.updates = weight, torch.empty(6, 16, device="meta"), 0

        def hidden(self, batch):
            return self.hidden_states, torch.zeros(6, dtype=torch.long, device="meta")

        def update(self):
            self.updates += 1

    floor = object.__new__(replay.Floor)
    floor.actor, floor.critic = Model(weight), Model(torch.nn.Parameter(torch.empty(1, 16, device="meta")))
    floor.train(replay.Step(train={"actor": [{}, {}], "critic": [{}]}))
    assert floor.actor.weight.grad.device.type == floor.critic.weight.grad.device.type == "meta"
    assert floor.actor.updates == floor.critic.updates == 1


def entry(total, floor, variant="2 eager"):
    real = {"generation": 0.5, "forward": 0.25, "training": 1.0, "weights": 0.125, "adapt": 0.01}
    parts = {"generation": floor / 2, "forward": 0.0, "training": floor / 2, "weights": 0.0}
    return {
        "real": real | {"between": total - sum(real.values()), "total": total},
        "work": {"responses": 40.0, "tokens": 2560.0, "trained": 32.0, "syncs": 0.5},
        "floor": parts | {f"{part}_variant": variant for part in parts},
    }


def test_ratios_are_within_a_round(floor):
    rounds = [entry(3.0, 2.0), entry(8.0, 4.0), entry(2.5, 2.0)]
    header = {"machine": "a machine", "commit": "abc", "command": "python"}
    page = floor.markdown(header | {"runs": {"25m": {"grpo": rounds, "ppo": []}, "smollm2": {"grpo": []}}})
    row = "| GRPO | 3.00 (2.50 to 8.00) | 2.00 (2.00 to 4.00) | 1.000 | 0.000 | 1.000 | 0.000 | 2; 2 eager; 2 eager |"
    assert f"{row} **1.50 (1.25 to 2.00)** | 40 (2560) | 32 |" in page
    assert "| GRPO | 0.500 - 1.000 | 0.250 - 0.000 | 1.000 - 1.000 | 0.125 - 0.000 | 0.010 | 1.115 | 1.000 |" in page
    assert "PPO" not in page.replace("GRPO", "") and "SmolLM2" not in page


def test_seconds_of_the_real_step(floor, replay):
    rows = [{"timing/generation": 1.0, "timing/reevaluation": 0.5, "timing/ppo_train": 2.0}, {"timing/generation": 2.0}]
    steps = [replay.Step(seconds=5.0), replay.Step(seconds=4.0)]
    result = floor.real_seconds(rows, steps)
    assert result["generation"] == 1.75 and result["training"] == 1.0 and result["forward"] == 0.0
    assert result["total"] == 4.5 and result["between"] == 1.75


def test_only_the_same_commit_is_continued(floor, tmp_path):
    header = {"machine": "a machine", "commit": "abc", "versions": {"torch": "2"}, "command": "python"}
    assert floor.begun(header, tmp_path) == header | {"runs": {}}
    previous = header | {"runs": {"25m": {"grpo": [entry(1.0, 1.0)]}}}
    (tmp_path / "floor.json").write_text(json.dumps(previous))
    assert floor.begun(header, tmp_path) == floor.begun(header | {"commit": "abc-dirty"}, tmp_path) == previous
    for changed in ({"commit": "abd"}, {"versions": {"torch": "3"}}):
        assert floor.begun(header | changed, tmp_path)["runs"] == {}


def test_rewards_make_half_of_the_groups_informative():
    reward = load("floor_reward").reward_func
    mixed, means = 0, []
    for number in range(400):
        prompt = f"{number}+1="
        queries = [f"{prompt}{answer}" for answer in range(8)]
        rewards = reward(queries, [prompt] * 8, [""] * 8)["rewards"]
        assert rewards == reward(queries, [prompt] * 8, [""] * 8)["rewards"]
        mixed += 0 < sum(rewards) < 8
        means.append(sum(rewards) / 8)
    assert 0.5 < mixed / 400 < 0.7
    assert 0.1 < means.count(0.0) / 400 < 0.25 and means.count(1.0) / 400 > 0.2


def test_rounds_are_interleaved_and_continued(floor, tmp_path, monkeypatch):
    asked = []

    def measure(size, kinds, seed, folder, before):
        asked.append((size, list(kinds), seed))
        assert {len(before[kind]) for kind in kinds} == {seed - 1}
        if len(asked) == 3:
            raise KeyboardInterrupt
        return {kind: entry(3.0, 2.0) for kind in kinds}

    monkeypatch.setattr(floor, "measure", measure)
    monkeypatch.setattr(floor, "RESULTS", tmp_path)
    monkeypatch.setattr(floor.cpu, "forked_processes", floor.tempfile.TemporaryDirectory)
    monkeypatch.setattr(floor.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["floor.py", "--sizes", "25m", "smollm2", "--kinds", "grpo", "ppo", "--rounds=2"])
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(KeyboardInterrupt):
        floor.main()
    assert asked == [("25m", ["grpo", "ppo"], 1), ("smollm2", ["grpo", "ppo"], 1), ("25m", ["ppo", "grpo"], 2)]
    floor.main()
    assert asked[3:] == [("25m", ["ppo", "grpo"], 2), ("smollm2", ["ppo", "grpo"], 2)]
    runs = json.loads((tmp_path / "floor.json").read_text())["runs"]
    assert {len(entries) for of_size in runs.values() for entries in of_size.values()} == {2}
    assert "SmolLM2" in (tmp_path / "floor.md").read_text()


STOPPED = """
import contextlib, pathlib, subprocess, sys
import floor
floor.cpu.forked_processes, floor.RESULTS = contextlib.nullcontext, pathlib.Path(sys.argv.pop())
run = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
floor.measure = lambda *_: subprocess.run([sys.executable, "-c", run])
floor.main()
"""


def test_what_it_runs_ends_with_it(tmp_path):
    environment = os.environ | {"PYTHONPATH": f"{BENCHMARKS}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", STOPPED, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        run = int(process.stdout.readline())
        process.terminate()
        try:
            assert process.wait() == 1
            with pytest.raises(ProcessLookupError):
                os.kill(run, 0)
        finally:
            with suppress(ProcessLookupError):
                os.kill(run, signal.SIGKILL)
