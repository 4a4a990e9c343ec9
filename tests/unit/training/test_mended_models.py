"""Models after they were loaded. test_rotary.py of the stack has DeepSpeed's rounding, which is imitated here."""

import json

import pytest
import torch
from openrlhf.models import get_llm_for_sequence_regression
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Gemma3TextModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
    Qwen3Config,
    Qwen3Model,
)

from bapo_openrlhf.training.worker.mended_models import make_savable, restore_frequencies, restore_normalisation

SIZES = {
    "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA = LlamaConfig(**SIZES)
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
LAYERS = Gemma3TextConfig(
    **SIZES, layer_types=["full_attention", "sliding_attention"], pad_token_id=0,
    rope_parameters={"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
)  # fmt: skip
VISION = Qwen2_5_VLConfig(
    text_config=SIZES | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 9.0}},
    vision_config={"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 8},
)


def frequencies(model):
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}


def rounded(model, stage=3):
    """The model as a stage leaves it. DeepSpeed gives each parameter that stage 3 divides a `ds_id`."""
    for name in frequencies(model):
        folder, _, key = name.rpartition(".")
        module = model.get_submodule(folder)
        setattr(module, key, getattr(module, key).bfloat16())
    for number, parameter in enumerate(model.parameters()):
        if stage == 3:
            parameter.ds_id = number
    return model


@pytest.mark.parametrize(
    ("kind", "config", "buffers"),
    [(LlamaModel, LLAMA, 2), (Gemma3TextModel, LAYERS, 4), (Qwen2_5_VLModel, VISION, 3)],
)
def test_frequencies_are_those_of_a_new_model(kind, config, buffers):
    """Also inside another module, as the engine of DeepSpeed is one."""
    wanted, model = frequencies(kind(config)), rounded(kind(config))
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    restore_frequencies(torch.nn.Sequential(model))
    actual = frequencies(model)
    assert actual.keys() == wanted.keys() and len(actual) == buffers
    for name, buffer in wanted.items():
        assert actual[name].dtype == torch.float32 and torch.equal(actual[name], buffer), name
        assert not torch.equal(buffer.bfloat16().float(), buffer)
    assert all(torch.equal(weights[name], parameter) for name, parameter in model.named_parameters())
    assert not any("inv_freq" in name for name in model.state_dict())


def test_frequencies_of_a_lower_stage_are_left():
    model = rounded(LlamaModel(LLAMA), stage=2)
    before = frequencies(model)
    restore_frequencies(model)
    assert all(buffer is before[name] for name, buffer in frequencies(model).items())


class Own(torch.nn.Module):
    """A rotary module that transformers does not know."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.1]), persistent=False)


@pytest.mark.parametrize("inside", ["unknown", "with weights", "in no model"])
def test_frequencies_that_cannot_be_computed_again_are_kept_and_named(caplog, inside):
    model = LlamaModel(LLAMA)
    if inside == "unknown":
        model.rotary = Own()
    elif inside == "with weights":
        model.rotary_emb.weight = torch.nn.Parameter(torch.ones(2))
    else:
        model = torch.nn.Sequential(model)
        model.rotary = Own()
    name, kind = ("rotary_emb", "LlamaRotaryEmbedding") if inside == "with weights" else ("rotary", "Own")
    module = model.get_submodule(name)
    rounded(model)
    before = dict(module.named_buffers())
    restore_frequencies(model)
    assert all(buffer is before[key] for key, buffer in module.named_buffers())
    (message,) = caplog.messages
    assert message.startswith(f"{name} ({kind}): ZeRO stage 3 rounded the rotary frequencies to bfloat16, and ")
    others = [buffer for key, buffer in frequencies(model).items() if not key.startswith(f"{name}.")]
    assert all(buffer.dtype == torch.float32 for buffer in others) and len(others) == (2 if kind == "Own" else 0)


@pytest.mark.parametrize("kind", ["reward", "critic"])
@pytest.mark.parametrize("given", [{}, {"mean": 0.25, "std": 2.0}])
def test_mean_and_deviation_are_those_of_the_configuration(tmp_path, kind, given):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Qwen3Config(vocab_size=20, num_key_value_heads=1, head_dim=16, **sizes)
    Qwen3Model(config).to(torch.bfloat16).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | given))
    settings = {"attn_implementation": "eager", "init_value_head": False}
    model, plain = (
        get_llm_for_sequence_regression(str(tmp_path), kind, normalize_reward=normalised, **settings).eval()
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


def model_with(folder, **generation):
    LlamaForCausalLM(LLAMA).save_pretrained(folder)
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


def test_what_can_be_saved_stays_and_what_never_could_is_an_error_at_once(tmp_path):
    model = model_with(tmp_path, repetition_penalty=1.1)
    before = model.generation_config.to_dict()
    make_savable(model)
    assert model.generation_config.to_dict() == before
    model.generation_config.max_new_tokens = 0
    with pytest.raises(ValueError, match="max_new_tokens"):
        make_savable(model)
