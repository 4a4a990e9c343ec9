"""Noise of a model in training: after it is set to 0, a forward pass in training is that of an evaluation."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from bapo_openrlhf.training.worker.mended_models import noise_of, without_noise

SMALL = {"vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
# Of each kind of code: noise in modules, in attributes of modules, and in the configuration that a forward pass reads.
KINDS = {
    "gpt2": {"n_embd": 8, "n_layer": 2, "n_head": 2},  # has dropout by default
    "opt": {**SMALL, "ffn_dim": 8, "word_embed_proj_dim": 8, "layerdrop": 0.5, "attention_dropout": 0.3},
    "qwen3": {**SMALL, "intermediate_size": 8, "num_key_value_heads": 2, "head_dim": 4, "attention_dropout": 0.3},
    "falcon": {**SMALL, "hidden_dropout": 0.3, "attention_dropout": 0.3, "parallel_attn": False},
    "mixtral": {**SMALL, "intermediate_size": 8, "num_key_value_heads": 2, "num_local_experts": 4,
                "router_jitter_noise": 0.4},
}  # fmt: skip


def make_model(kind):
    torch.manual_seed(0)
    settings = KINDS[kind] | {"vocab_size": 17, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def logits(model, *, training, seed=1):
    torch.manual_seed(seed)
    with torch.no_grad():
        return model.train(training)(torch.arange(3, 15)[None]).logits


@pytest.mark.parametrize("kind", KINDS)
def test_training_computes_what_an_evaluation_does(kind):
    model = make_model(kind)
    wanted = logits(model, training=False)
    assert not all(torch.equal(logits(model, training=True, seed=seed), wanted) for seed in range(5))
    without_noise(model)
    assert all(torch.equal(logits(model, training=True, seed=seed), wanted) for seed in range(5))
    assert noise_of(model.config.to_dict()) == {}


def test_loras_own_dropout_stays():
    model = get_peft_model(make_model("gpt2"), LoraConfig(r=2, lora_dropout=0.25, target_modules=["c_attn"]))
    without_noise(model)
    noise = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Dropout)]
    assert {("lora" in name, module.p) for name, module in noise} == {(True, 0.25), (False, 0.0)}


def test_what_is_noise():
    settings = {"attn_pdrop": 0.1, "dropout": 0, "layerdrop": None, "token_dropout": True, "drop_path_rate": 1,
                "jitter_noise": 0.2, "hidden_size": 8}  # fmt: skip
    assert noise_of(settings) == {"attn_pdrop": 0.1, "drop_path_rate": 1, "jitter_noise": 0.2}
