"""Models whose generation_config.json transformers does not write, with transformers itself."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from bapo_openrlhf.training.worker.mended_models import make_savable


def model_with(folder, **generation):
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **generation}))
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("generation", [{"temperature": 0.6}, {"do_sample": False, "top_p": 0.9}])
def test_a_temperature_without_sampling(tmp_path, generation):
    model = model_with(tmp_path, **generation)
    with pytest.raises(ValueError, match="do_sample"):
        model.save_pretrained(tmp_path / "saved")
    make_savable(torch.nn.Sequential(model))
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved.items() >= (generation | {"eos_token_id": 2, "do_sample": True}).items()


def test_what_can_be_saved_stays(tmp_path):
    model = model_with(tmp_path, repetition_penalty=1.1)
    before = model.generation_config.to_dict()
    make_savable(model)
    assert model.generation_config.to_dict() == before


def test_what_could_never_be_saved_is_an_error_at_once(tmp_path):
    model = model_with(tmp_path)
    model.generation_config.max_new_tokens = 0
    with pytest.raises(ValueError, match="max_new_tokens"):
        make_savable(model)
