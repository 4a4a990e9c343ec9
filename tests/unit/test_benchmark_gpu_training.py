"""benchmarks/gpu_training.py as far as no model is needed: Ray in one process, rollouts, numbers, the page."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import one_process
import pytest

from bapo_openrlhf.adapt.state import group_state
from bapo_openrlhf.cli import arguments
from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.methods import BAPO
from bapo_openrlhf.record.state_file import save_state
from bapo_openrlhf.workbench.planning.constants import GIB
from bapo_openrlhf.workbench.planning.shapes import ModelShape

ROOT = Path(__file__).parents[2]
SMALL = ModelShape("small", 1, 4, 1, 1, 4, 8, 10)  # 160 weights in products; the head has 4 x 10
NAMES = {
    "actor.model_name_or_path": "model",
    "critic.model_name_or_path": "model",
    "data.prompt_dataset": "data.jsonl",
    "reward.remote_url": "reward.py",
}


@pytest.fixture(scope="module")
def script():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_training", ROOT / "benchmarks" / "gpu_training.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "gpu_training", module)
        spec.loader.exec_module(module)
        yield module


# ── Ray in one process ──


def test_ray_and_vllm_are_imported_only_in_the_block(monkeypatch):
    for name in ("ray", "ray.data"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("ray", "vllm")}
    with one_process.stand_ins():
        import ray
        from ray.util.placement_group import placement_group
        from vllm.utils import random_uuid

        assert ray.remote is one_process.remote and importlib.util.find_spec("vllm") is not None
    after = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("ray", "vllm")}
    assert after == before
    for absent in (placement_group, random_uuid):
        with pytest.raises(RuntimeError, match="neither Ray's cluster nor vLLM"):
            absent()


WITHOUT_RAY = """
from importlib.util import find_spec
import one_process
from bapo_openrlhf.cpu import stack
stack.prepare_environment()
stack.install()
assert find_spec("ray") is find_spec("vllm") is None
with one_process.stand_ins():
    from bapo_openrlhf.training import dealing, experience, workers
assert find_spec("ray") is find_spec("vllm") is None
group = dealing.DealtActorGroup(1, 1, workers.ReferenceActor)
(worker,) = group._actor_handlers
assert type(worker.actor) is workers.ReferenceWorker
assert one_process.get(worker.get_master_addr_port.remote())[0] == "127.0.0.1"
"""


@pytest.mark.slow
def test_a_worker_without_ray_and_vllm():
    places = [ROOT / "tests" / "without_ray", ROOT / "benchmarks", ROOT, os.environ.get("PYTHONPATH", "")]
    words = [sys.executable, "-c", WITHOUT_RAY]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places)), cpu.SWITCH: "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("decorate", [one_process.remote, one_process.remote(num_gpus=1)])
def test_an_actor_gets_copies_and_gives_references(decorate):
    class Plain:
        def __init__(self, items):
            self.items = items

        def execute_batch(self, method, batch, start, end):
            return [getattr(self, method)(item) for item in batch[start:end]]

        def add(self, item):
            item.append("added")
            self.items.append(item)
            return len(self.items)

        def fail(self):
            raise FloatingPointError("no number")

    decorated = decorate(Plain)
    assert decorated.__ray_metadata__.modified_class is Plain
    handle = decorated.options(num_cpus=1).remote([])
    batch = one_process.Ref([["a"], ["b"], ["c"]])
    one_process.SECONDS.clear()
    references = [handle.execute_batch.remote("add", batch, 0, 2), handle.add.remote(item=["d"])]
    assert one_process.get(references) == [[1, 2], 3]
    assert batch.value == [["a"], ["b"], ["c"]]  # Ray would have sent a copy
    assert handle.actor.items == [["a", "added"], ["b", "added"], ["d", "added"]]
    assert one_process.SECONDS.keys() == {"add"}
    with pytest.raises(FloatingPointError, match="no number"):
        handle.fail.remote()


# ── Rollouts ──


def test_a_made_up_rollout(script):
    groups = script.made_up_rollout(40, 4096, 1000)
    assert len(groups) == 40 and {group.size for group in groups} == {script.G}
    responses = [response for group in groups for response in group.responses]
    lengths = np.array([len(response.log_probs) for response in responses])
    assert 512 <= lengths.min() < 560 and 3900 < lengths.max() <= 4096
    assert np.mean(lengths < 512 * 8**0.5) == pytest.approx(0.5, abs=0.1)  # 320 lengths: standard error 0.028
    for group in groups:
        prompts = {tuple(response.token_ids[: script.PROMPT]) for response in group.responses}
        assert len(prompts) == 1
    assert all(response.action_spans == ((256, len(response.token_ids)),) for response in responses)
    assert {float(response.reward) for response in responses} == {0.0, 1.0}
    again = script.made_up_rollout(40, 4096, 1000)[7].responses[3].token_ids
    assert np.array_equal(groups[7].responses[3].token_ids, again)


@pytest.fixture
def checkpoint(script, tmp_path):
    """The state of a run's checkpoint, with three groups in the replay buffer. One has fewer responses."""
    groups = script.made_up_rollout(3, 16, 50)
    groups[1] = replace(groups[1], responses=groups[1].responses[:4])
    groups[2].responses[0].extras["reference"] = ("name", np.zeros(3, np.float32))
    method = {"method": "bapo", "version": BAPO.VERSION, "hard": {"entries": []}}
    method["replay"] = {"groups": [group_state(group) for group in groups], "counts": {}}
    save_state(tmp_path, {"step": 5, "engine_step": 5, "method": method})
    return tmp_path, groups


def test_the_rollout_of_a_checkpoint(script, checkpoint):
    folder, groups = checkpoint
    found = script.recorded_rollout(folder, 50)
    assert [group.uid for group in found] == [0, 2]
    for mine, theirs in zip(found[1].responses, groups[2].responses, strict=True):
        assert np.array_equal(mine.token_ids, theirs.token_ids) and mine.reward == theirs.reward
    with pytest.raises(ConfigError, match=r"has token \d+, and --model has 20 tokens"):
        script.recorded_rollout(folder, 20)
    (folder / "state.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"rollout .* cannot be read: .*state.safetensors is missing"):
        script.recorded_rollout(folder, 50)


def test_each_step_is_on_policy_and_asks_the_reference_model_again(script):
    groups = [replace(group, step=4, policy_step=2) for group in script.made_up_rollout(2, 16, 50)]
    for group in groups:
        group.responses[1].extras["reference"] = ("name", np.zeros(3, np.float32))
    batch = script.on_policy(groups)
    assert all(group.policy_step == 0 for group in batch.fresh)
    assert not any("reference" in response.extras for group in batch.fresh for response in group.responses)
    batch.fresh[0].responses[0].extras["reference"] = "of this step"
    assert "reference" not in script.on_policy(batch.fresh).fresh[0].responses[0].extras
    assert "reference" not in script.on_policy(groups).fresh[0].responses[0].extras


# ── What the models are told ──


def test_a_variant_switches_every_model(script):
    class Model(SimpleNamespace):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs):
            self.checkpointing = gradient_checkpointing_kwargs["use_reentrant"]

        def gradient_checkpointing_disable(self):
            self.checkpointing = None

    actor, critic, reference = Model(), Model(), Model()
    strategy = SimpleNamespace(args=SimpleNamespace(actor=SimpleNamespace(gradient_checkpointing_reentrant=False)))
    workers = {
        "actor": SimpleNamespace(actor=actor, strategy=strategy),
        "reference": SimpleNamespace(model=reference),
        "critic": SimpleNamespace(critic=SimpleNamespace(module=critic), strategy=strategy),
    }
    script.Variant("all off", sliced=False, checkpointing=False, packed=False).apply(workers, packs=True)
    assert not any(model.sliced or model.packing_samples for model in (actor, critic, reference))
    assert actor.checkpointing is critic.checkpointing is None
    script.USUAL.apply(workers, packs=True)
    assert all(model.sliced and model.packing_samples for model in (actor, critic, reference))
    assert actor.checkpointing is critic.checkpointing is False and not hasattr(reference, "checkpointing")
    script.USUAL.apply(workers, packs=False)
    assert not actor.packing_samples


@pytest.mark.parametrize("packs", [True, False])
def test_flags_are_those_of_the_rollout(script, monkeypatch, packs):
    monkeypatch.setenv(cpu.SWITCH, "0")
    given, groups = script.parse(["--micro", "3"]), script.made_up_rollout(2, 100, 50)
    flags = script.flags_for(given, groups, packs=packs) | NAMES
    lengths = [len(response.token_ids) for group in groups for response in group.responses]
    for kind in script.KINDS:
        args = arguments.parse(script.words_of(kind, script.USUAL, flags))
        assert (args.data.max_len, args.rollout.max_new_tokens) == (max(lengths), max(lengths) - 256)
        assert (args.train.batch_size, args.train.micro_batch_size, args.rollout.micro_batch_size) == (16, 3, 6)
        assert args.ds.packing_samples is packs and args.actor.gradient_checkpointing_enable
        kept = script.Variant("kept", checkpointing=False)
        assert not arguments.parse(script.words_of(kind, kept, flags)).actor.gradient_checkpointing_enable


def test_without_a_gpu_it_says_so(script, monkeypatch, capsys):
    monkeypatch.setenv(cpu.SWITCH, "1")
    with pytest.raises(SystemExit):
        script.parse([])
    assert "this machine has no GPU, and a GPU is what is measured; --dry-run" in capsys.readouterr().err
    assert script.parse(["--dry-run"]).model == "tiny"


def test_the_packages_to_carry_are_those_of_the_lock_file(script):
    pins = re.findall(r"[\w-]+==\S+", script.__doc__.replace("NAME==VERSION", ""))
    lock = (ROOT / "requirements" / "cuda.lock.txt").read_text().splitlines()
    assert "deepspeed==0.19.6" in pins and set(pins) <= set(lock)


# ── Numbers ──


STEP = {
    "experience_bytes": 2.0 * GIB,
    "training_bytes": 3.5 * GIB,
    "forward": 4.0,
    "append": 0.5,
    "fit": 2.0,
    "reload_states": 0.25,
    "offload_states": 0.5,
    "step_total": 8.0,
}


def test_numbers_by_hand(script):
    """A token of a sample of 10 tokens takes 400 + 80 operations, and of one of 20 tokens 400 + 160."""
    one_pass = 10 * 480 + 20 * 560
    found = script.numbers(STEP, [10, 20], SMALL, 10_000.0, critic=False)
    assert found["mfu"] == pytest.approx(3 * one_pass / 20_000)
    assert found["forward_mfu"] == pytest.approx(2 * one_pass / 40_000)  # actor and reference model
    assert (found["trained_per_second"], found["moving"], found["step_total"]) == (15.0, 0.75, 8.0)
    assert (found["experience_gib"], found["training_gib"]) == (2.0, 3.5)
    critic = 10 * (2 * 164 + 80) + 20 * (2 * 164 + 160)  # its head has one number instead of 10
    both = script.numbers(STEP, [10, 20], SMALL, 10_000.0, critic=True)
    assert both["mfu"] == pytest.approx(3 * (one_pass + critic) / 20_000)
    assert both["forward_mfu"] == pytest.approx((2 * one_pass + critic) / 40_000)


def test_page(script):
    first = script.numbers(STEP, [10, 20], SMALL, 10_000.0, critic=False)
    runs = [first, first | {"mfu": 0.5, "training": 4.0, "training_gib": 3.75}, first | {"mfu": 0.25, "training": 3.0}]
    usual = script.USUAL.name
    result = {
        "dry_run": False, "model": "Qwen3-0.6B", "attention": "sdpa", "lengths": [768, 4352], "micro": 2, "rounds": 3,
        "source": "random tokens", "machine": "x86_64", "commit": "abc", "command": "python", "peak_tflops": 989.0,
        "planned_gib": {"BAPO-GRPO": {usual: {"experience": 2.26, "training": 4.0}}},
        "left_out": {"BAPO-GRPO": ["logits of all positions"], "BA-PPO": []},
        "runs": {"BAPO-GRPO": {usual: {"differs": 0.0, "runs": runs}}},
    }  # fmt: skip
    page = script.markdown(result)
    row = next(line for line in page.splitlines() if line.startswith("| BAPO-GRPO"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == f"BAPO-GRPO, {usual}" and cells[1:5] == ["8.00 (8.00 to 8.00)", "4.00", "3.00", "0.75"]
    assert cells[7] == "50.0 (25.0 to 240.0)"
    assert cells[8:] == ["2.0", "2.3", "3.8", "4.0", "0"]
    assert len(cells) == len(script.HEAD) + 1
    assert "2 samples of 768 to 4,352 tokens, 5,120 together, from random tokens" in page
    assert "do not fit: BAPO-GRPO, logits of all positions." in page and "Dry run" not in page
