"""The numbers by which reward model and critic divide, in models that OpenRLHF has loaded."""

import json

import pytest
import torch
from openrlhf.models import get_llm_for_sequence_regression
from transformers import Qwen3Config, Qwen3Model

from bapo_openrlhf.training.worker.mended_models import restore_normalisation


@pytest.mark.parametrize("kind", ["reward", "critic"])
@pytest.mark.parametrize("given", [{}, {"mean": 0.25, "std": 2.0}])
def test_they_are_those_of_the_configuration(tmp_path, kind, given):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Qwen3Config(vocab_size=20, num_key_value_heads=1, head_dim=16, **sizes)
    Qwen3Model(config).to(torch.bfloat16).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | given))
    model, plain = (
        get_llm_for_sequence_regression(
            str(tmp_path), kind, normalize_reward=normalised, attn_implementation="eager", init_value_head=False
        ).eval()
        for normalised in (True, False)
    )
    plain.score.weight.data.copy_(model.score.weight.data)
    for number in (model.mean, model.std):  # what may be in the memory
        number.fill_(7.0)
    restore_normalisation(torch.nn.Sequential(model))  # it is in an engine
    tokens, mask = torch.tensor([[3, 4, 5, 6]]), torch.ones(1, 4, dtype=torch.long)
    inputs = {"attention_mask": mask} | ({"action_mask": mask[:, 1:]} if kind == "critic" else {})
    with torch.no_grad():
        score, before = model(tokens, **inputs).float(), plain(tokens, **inputs).float()
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    assert torch.allclose(score, (before - mean) / std, atol=0.02) and before.abs().max() > 0.05
