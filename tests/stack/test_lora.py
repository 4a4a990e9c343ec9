"""LoRA on the real stack: the engines sample from the model with the adapter of today's actor merged into it."""

import numpy as np
import pytest
import torch
from peft import PeftModel
from test_training import recomputed
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.fixture(scope="module")
def probe_folder(watch):
    """Four steps of BAPO-GRPO with adapters on 2 actor ranks under ZeRO-3 and 2 engines; what the probe noted."""
    flags = {
        "algorithm": "bapo_grpo", "adapt__rollout_delay": 1, "actor__num_gpus_per_node": 2, "vllm__num_engines": 2,
        "ds__zero_stage": 3, "ds__lora__rank": 8, "ds__lora__alpha": 64, "actor__adam__lr": 1e-2,
        "data__max_samples": 32,
    }  # fmt: skip
    return watch("lora", **flags)[1]


def test_engines_sample_from_the_merged_model(probe_folder, workspace):
    moved = 0.0
    for step in range(4):
        base, other = (
            AutoModelForCausalLM.from_pretrained(workspace / "model", dtype=torch.bfloat16) for _ in range(2)
        )
        merged = PeftModel.from_pretrained(other, probe_folder / f"actor{step}").merge_and_unload()
        data = np.load(probe_folder / f"experience{step}.npz")
        fresh = np.flatnonzero(data["source"] == "fresh")
        assert data["on_policy"][fresh].all()
        for index in fresh[:6]:
            wanted, mask = recomputed(merged, data, index)
            assert data[f"{index}/rollout_log_probs"][: len(mask)][mask] == pytest.approx(wanted[mask], abs=0.05)
            if step >= 2:  # two updates have changed the adapter
                moved = max(moved, np.abs(wanted - recomputed(base, data, index)[0])[mask].max())
    assert moved > 0.2
