"""BAPO-GRPO with images on the real stack: a tiny Qwen2.5-VL and problems that were drawn for it."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bapo_openrlhf.cpu.prefork.client import ADDRESS
from bapo_openrlhf.record.checkpoint_store import CheckpointStore
from bapo_openrlhf.record.state_file import load_state

pytestmark = [pytest.mark.stack, pytest.mark.slow]

HERE = Path(__file__).parent
STEPS = 4


@pytest.fixture(scope="module")
def folder(workspace):
    """With model/ and data.jsonl, and probe/ for what the run notes."""
    folder = workspace / "vision_inputs"  # not the folder of the run, which is named "vision"
    (folder / "probe").mkdir(parents=True)
    if importlib.util.find_spec("torchvision") is None:
        (folder / "site").mkdir()
        shutil.copy(HERE / "vision_torchvision.py", folder / "site" / "torchvision.py")
    subprocess.run([sys.executable, HERE / "vision_model.py", folder], env=environment(folder), check=True)
    return folder


def environment(folder):
    path = os.pathsep.join(map(str, (HERE, folder / "site", os.environ.get("PYTHONPATH", ""))))
    more = {"PYTHONPATH": path, "PROBE_FOLDER": str(folder / "probe"), "BAPO_OPENRLHF_CPU": "1"}
    return os.environ | more | {ADDRESS: ""}  # not forked from a process that has transformers without torchvision


@pytest.fixture(scope="module")
def result(train, folder):
    """Four steps with delayed weights, re-evaluation and replay."""
    flags = {
        "algorithm": "bapo_grpo", "run__logs": "full", "actor__model_name_or_path": folder / "model",
        "critic__model_name_or_path": None, "data__prompt_dataset": folder / "data.jsonl",
        "data__max_images_per_prompt": 1, "data__max_len": 192, "data__apply_chat_template": True,
        "adapt__rollout_delay": 3, "adapt__reevaluate_every": 1, "adapt__c3": "7/8", "ckpt__save_steps": 2,
        "ckpt__max_num": 2, "train__full_determinism_enable": True, "environment": environment(folder), "own_ray": True,
    }  # fmt: skip
    return train("vision", str(HERE / "probe.py"), "vision", **flags)


def experience(folder, step):
    """The first sample of each group: its tensors, its image, and its source."""
    arrays = np.load(folder / "probe" / f"experience{step}.npz")
    images = json.loads((folder / "probe" / f"images{step}.json").read_text())
    names = ("sequences", "attention_mask", "action_mask", "rollout_log_probs")
    return [
        {name: arrays[f"{index}/{name}"] for name in names}
        | {name: arrays[name][index] for name in ("source", "on_policy", "log_ratios")}
        | {"images": images[str(index)]}
        for index in range(0, len(arrays["source"]), 4)
    ]


@pytest.fixture(scope="module")
def recomputed(folder, result):
    """(sample, log-probs with its own image, with another problem's) of every step, by transformers only."""
    import torch
    from PIL import Image
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

    # Not the processor of the run, and no torchvision: the images need no resizing, so that both make the same of them.
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 252 * 252})

    def log_probs(model, sample, image):
        sequence = torch.from_numpy(sample["sequences"][sample["attention_mask"].astype(bool)])[None].long()
        with torch.no_grad():
            kinds = (sequence == model.config.image_token_id).int()
            given = processor(images=[Image.open(image)], return_tensors="pt")
            mask = torch.ones_like(sequence)
            logits = model(sequence, attention_mask=mask, mm_token_type_ids=kinds, **given).logits.float()
        actual = logits.log_softmax(-1)[0, :-1].gather(-1, sequence[0, 1:, None])[:, 0].numpy()
        return actual[sample["action_mask"][: len(actual)].astype(bool)]

    actual = []
    for step in range(STEPS):
        how = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "probe" / f"actor{step}", **how)
        samples = experience(folder, step)
        for sample in samples:
            (image,) = sample["images"]
            other = next(other["images"][0] for other in samples if other["images"] != sample["images"])
            actual.append((sample, log_probs(model, sample, image), log_probs(model, sample, other)))
    return actual


def behaviour(sample):
    return sample["rollout_log_probs"][sample["action_mask"].astype(bool)]


def test_all_three_sources_had_images(result, folder, recomputed):
    assert [row["step"] for row in result.metrics] == list(range(1, STEPS + 1))
    assert {sample["source"] for sample, _, _ in recomputed} == {"fresh", "reevaluated", "replayed"}
    assert not any("skipped_update" in row or row["groups/failed"] for row in result.metrics)
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    assert len({row["input"] for row in rows}) == 3  # it is the images that tell the 32 prompts apart


@pytest.mark.parametrize("source", ["fresh", "reevaluated", "replayed"])
def test_the_actor_saw_each_samples_own_image(recomputed, source):
    actual = [triple for triple in recomputed if triple[0]["source"] == source]
    assert actual
    for sample, right, other in actual:
        assert sample["log_ratios"] == pytest.approx((right - behaviour(sample)).sum(), abs=1e-4)
        assert np.abs(right - other).max() > 0.05


@pytest.mark.parametrize("source", ["fresh", "reevaluated"])
def test_the_engine_saw_each_samples_own_image_with_the_weights_it_held(recomputed, source):
    """If it held today's, its log-probs are the actor's, except for rounding in bf16.

    vLLM keeps the embedding of an image that it has seen, whatever becomes of the weights: for what is generated again,
    this fails where nobody tells it to forget.
    """
    actual = [triple for triple in recomputed if triple[0]["source"] == source and triple[0]["on_policy"]]
    assert actual
    for sample, right, other in actual:
        assert np.abs(right - behaviour(sample)).max() < min(0.1, np.abs(other - behaviour(sample)).max() / 2)


def test_a_checkpoint_has_the_images_of_both_buffers(result, folder):
    store = CheckpointStore(folder.parent / "vision" / "checkpoints", critic=False)
    state = load_state(store.folder(f"global_step{STEPS}"))["method"]
    images = {str(path) for path in (folder / "images").glob("*.png")}
    hard, groups = state["hard"]["entries"], state["replay"]["groups"]
    assert hard and groups
    for prompt in [entry["prompt"] for entry in hard] + [group["prompt"] for group in groups]:
        assert len(prompt["images"]) == 1 and set(prompt["images"]) <= images
    for group in groups:
        for response in group["responses"]:
            inputs = response["extras"]["mm_train_inputs"]
            assert inputs["image_grid_thw"].tolist() == [[1, 18, 18]]  # 252 / 14 patches
            assert inputs["pixel_values"].shape == (18 * 18, 3 * 2 * 14 * 14)
