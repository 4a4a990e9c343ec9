"""Groups without a signal that no model passes (`--adapt.skip_zero_advantage`), beside a run that trains on them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.stack, pytest.mark.slow]  # test_first_hour.py has runs with it in `make test`

PROMPTS, RESPONSES, STEPS, MAX_NORM = 6, 4, 3, 0.05
FLAGS = {  # a rollout has two whole optimizer steps and one of four samples
    "algorithm": "bapo_grpo", "algo__kl__init_coef": 0.0, "train__full_determinism_enable": True,
    "adapt__reevaluate_every": 0, "adapt__replay_steps": 0, "adapt__rollout_delay": 1, "actor__max_norm": MAX_NORM,
    "reward__remote_url": Path(__file__).parent / "silent_step_reward.py", "verifier__processes": 1,
    "rollout__batch_size": PROMPTS, "rollout__n_samples_per_prompt": RESPONSES, "rollout__micro_batch_size": 1,
    "train__batch_size": 10, "train__micro_batch_size": 1, "data__max_samples": PROMPTS * STEPS,
}  # fmt: skip


def test_skipping_changes_no_weight(train, workspace):
    """Bit by bit, after shuffling, with clipped gradients, and after a step of which all samples are skipped."""
    runs = []
    for name, flags in (("control", {"adapt__filter": "none"}), ("skip", {"adapt__skip_zero_advantage": True})):
        result = train(f"{name}_of_skipping", environment={"PROMPTS": str(PROMPTS)}, **FLAGS | flags)
        weights = load_file(workspace / f"{name}_of_skipping" / "model" / "model.safetensors")
        runs.append((result.metrics, weights))
    (control, wanted), (metrics, weights) = runs
    skipped = [row["responses/skipped"] for row in metrics]
    assert len(control) == STEPS and skipped[1] == PROMPTS * RESPONSES and 0 < skipped[0] + skipped[2] < 2 * skipped[1]
    assert control[0]["actor_grad_norm"] > MAX_NORM  # it is that before the clip
    for row, other in zip(metrics, control, strict=True):
        assert row["actor_lr"] == other["actor_lr"] > 0 and row["actor_grad_norm"] == other["actor_grad_norm"]
        assert row["responses/trained"] == PROMPTS * RESPONSES - row["responses/skipped"]
    before = load_file(workspace / "model" / "model.safetensors")
    assert all(torch.equal(weight, wanted[name]) for name, weight in weights.items())
    assert any(not torch.equal(weight, before[name]) for name, weight in weights.items())
