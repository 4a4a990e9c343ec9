"""Merging LoRA adapters in a vLLM worker: the weights that arrive are PEFT's merged model, whatever the parcels."""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

from bapo_openrlhf.training.engine.engines import RolloutEngine
from bapo_openrlhf.training.engine.weight_receipt import MergingLoader, merge_adapters, require_merged


class Net(torch.nn.Module):
    """Two linear layers, one of them with a bias, and a norm."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)
        self.up, self.down = torch.nn.Linear(4, 6), torch.nn.Linear(6, 4, bias=False)

    def forward(self, x):
        return self.down(self.up(self.norm(x)))


@pytest.fixture(scope="module")
def models():
    """PEFT's model with adapters that are not 0, and the same model after PEFT has merged them."""
    torch.manual_seed(0)
    model = get_peft_model(Net(), LoraConfig(r=2, lora_alpha=6, target_modules=["up", "down"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    sent = [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]
    return sent, dict(model.merge_and_unload().named_parameters())


@given(cuts=st.sets(st.integers(0, 8)), order=st.randoms(use_true_random=False))
@settings(derandomize=True, database=None)
def test_loads_what_peft_merges_in_parcels_of_any_size_and_order(models, cuts, order):
    sent, merged = list(models[0]), models[1]
    order.shuffle(sent)
    loaded = {}

    def load(weights):
        loaded.update((name, tensor.clone()) for name, tensor in weights)
        return {name for name, _ in weights}

    loader = MergingLoader(load, 6 / 2)
    ends = [*sorted(cuts), len(sent)]
    for start, end in zip([0, *ends], ends, strict=False):
        parcel = [(name, tensor.clone()) for name, tensor in sent[start:end]]
        before = set(loaded)
        assert (loader(parcel) or set()) == loaded.keys() - before
        for _, tensor in parcel:
            tensor.fill_(float("nan"))  # the sender uses the memory again
    assert loaded.keys() == merged.keys() and not loader.parts
    for name, tensor in loaded.items():
        np.testing.assert_allclose(tensor.numpy(), merged[name].detach().numpy(), rtol=1e-5, atol=1e-6)


def test_bf16_weights_are_added_in_float32():
    base = torch.full((1, 1), 1.0, dtype=torch.bfloat16)
    a, b = torch.full((2, 1), 2.0**-5, dtype=torch.bfloat16), torch.full((1, 2), 2.0**-4, dtype=torch.bfloat16)
    parts, seen = {"base_layer": base, "lora_A.default": a, "lora_B.default": b}, {}
    weights = [(f"base_model.model.q.{name}.weight", part) for name, part in parts.items()]
    MergingLoader(lambda weights: seen.update(weights), 2.0)(weights)
    assert seen["q.weight"].dtype == torch.bfloat16 and seen["q.weight"].item() == 1 + 2 * 2 * 2.0**-9


def test_an_adapter_of_an_embedding_is_refused():
    loader = MergingLoader(lambda weights: None, 1.0)
    with pytest.raises(RuntimeError, match=r"embed_tokens\.lora_embedding_A\.default cannot be merged"):
        loader([("base_model.model.model.embed_tokens.lora_embedding_A.default", torch.ones(2, 2))])


def test_a_sync_that_leaves_a_part_of_an_adapter_behind_is_an_error():
    """PEFT's model of tied weights names the shared matrix once, so that the head's own base never comes."""
    tied, receiver = torch.nn.Module(), SimpleNamespace(load_weights=lambda weights: {"some"})
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=receiver))
    tied.embed_tokens, tied.lm_head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False)
    tied.lm_head.weight = tied.embed_tokens.weight
    require_merged(worker)  # before it merges adapters
    merge_adapters(worker, 1.0)
    model = get_peft_model(tied, LoraConfig(r=2, target_modules=["lm_head"]))
    sent = list(model.named_parameters())
    receiver.load_weights(sent)
    with pytest.raises(RuntimeError, match=r"^of lm_head only lora_A\.default, lora_B\.default reached"):
        require_merged(worker)
    receiver.load_weights([("base_model.model.lm_head.base_layer.weight", torch.zeros(5, 4))])
    require_merged(worker)


def test_an_engine_asks_its_workers_for_parts_that_were_left_behind_after_each_change_of_weights():
    engine = object.__new__(RolloutEngine)
    engine.llm = AsyncMock()
    asyncio.run(engine.changed(3))
    engine.llm.collective_rpc.assert_awaited_once_with(require_merged)
    engine.llm.reset_prefix_cache.assert_awaited_once_with(reset_running_requests=True)  # none goes on with old keys
    assert engine.weights_version == 3
